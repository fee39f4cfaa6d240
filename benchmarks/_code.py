"""Whether a worker of a cluster has the code and the packages of the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks._version import code_version, package_versions
from gpclml.errors import ArgumentError

__all__ = ["Code", "OtherCodeError", "unusable_worker"]


class OtherCodeError(RuntimeError):
    """A worker has other code than the driver; says what to do about it."""


@dataclass(frozen=True)
class Code:
    """The code of a sweep, as its driver has it.

    Args:
        function: The cell function.
        sources: What else decides a result: dotted names of modules, or absolute paths.
        version: The version of both.
        packages: Versions of Python and the packages, by name.
    """

    function: Callable
    sources: tuple[str | Path, ...]
    version: str
    packages: dict[str, str]

    @classmethod
    def here(cls, function: Callable, sources: Iterable[str | Path]) -> Code:
        """The code of this process.

        Raises:
            ArgumentError: If the function cannot be imported, or a source does not exist.
        """
        sources = tuple(
            source.absolute() if isinstance(source, Path) else source for source in sources
        )
        return cls(function, sources, code_version(function, sources), package_versions())

    def check(self) -> None:
        """Compares with this process, a worker.

        Raises:
            OtherCodeError: If the process has other code, or other versions of packages.
        """
        mine = package_versions()
        if mine != self.packages:
            unlike = {name: (mine[name], self.packages[name]) for name in mine
                      if mine[name] != self.packages[name]}  # fmt: skip
            listed = ", ".join(f"{name} {here} here, {there} at the driver"
                               for name, (here, there) in unlike.items())  # fmt: skip
            raise OtherCodeError(f"{listed}. Install the same versions on every machine.")
        mend = "Bring every machine to the same code and restart its workers."
        try:
            version = code_version(self.function, self.sources, as_first_seen=True)
        except ArgumentError as error:
            raise OtherCodeError(f"{error} {mend}") from None
        if version != self.version:
            text = f"code version {version} here, {self.version} at the driver"
            raise OtherCodeError(f"{text}. {mend}")


def unusable_worker(worker: str, error: BaseException) -> ArgumentError:
    """What to tell of a worker that failed before its first task.

    Args:
        worker: Its address.
        error: What it said.
    """
    mend = "" if isinstance(error, OtherCodeError) else (
        "Start the workers where gpclml, benchmarks and the cell function can be imported."
    )  # fmt: skip
    got = f"workers that cannot be used ({worker}: {type(error).__name__}: {error})"
    return ArgumentError("address", got, "workers with the code of the driver", mend)
