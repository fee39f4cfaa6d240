"""What decides a result: a version of the code and the packages it ran under."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import platform
from collections.abc import Callable, Iterable
from importlib import metadata, util
from operator import attrgetter
from pathlib import Path

from gpclml.errors import ArgumentError

__all__ = ["code_version", "function_name", "package_versions"]

PACKAGES = ("gpclml", "torch", "gpytorch", "botorch")


def function_name(function: Callable) -> str:
    """The name ``module:function`` under which any process can import a cell function.

    Raises:
        ArgumentError: If the function is not found there: a lambda, a nested function, a
            partial, or one defined in the script that is being run.
    """
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if module and qualname and module != "__main__" and "<" not in qualname:
        with contextlib.suppress(ImportError, AttributeError):
            if attrgetter(qualname)(importlib.import_module(module)) is function:
                return f"{module}:{qualname}"
    raise ArgumentError(
        "function",
        repr(function),
        "a function that other processes can import",
        "Define it at the top level of a module that is imported, not run as a script.",
    )


def code_version(
    function: Callable, sources: Iterable[str | Path] = (), *, as_first_seen: bool = False
) -> str:
    """Hash over the sources that decide the result of a cell, 16 hexadecimal digits.

    It covers the Python and CSV files of ``gpclml``, the module of the function, and
    what ``sources`` names. Other files (reports, documentation) leave it as it is, and so
    do the folder of the checkout and the kind of line ends.

    Args:
        function: The cell function; its name counts too, so that two functions of one
            module never share a result.
        sources: Further modules by dotted name (a package stands for all Python and CSV
            files beneath it), or paths of files.
        as_first_seen: Take each file as this process first saw it, for processes that may
            outlast an edit: what they have imported stays as it was.

    Raises:
        ArgumentError: If a source does not exist.
    """
    name = function_name(function)
    files: dict[str, Path] = {}
    for source in ("gpclml", name.partition(":")[0], *sources):
        files |= _files_of_path(source) if isinstance(source, Path) else _files_of_module(source)
    total = hashlib.sha256(name.encode())
    for label, path in sorted(files.items()):
        digest = _first_digest(path) if as_first_seen else _digest(path)
        total.update(hashlib.sha256(label.encode()).digest() + digest)
    return total.hexdigest()[:16]


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute, by name."""
    return {"python": platform.python_version()} | {name: _installed(name) for name in PACKAGES}


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).digest()


_first_digest = functools.cache(_digest)


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return str(importlib.import_module(package).__version__)


def _files_of_path(path: Path) -> dict[str, Path]:
    if not path.is_file():
        raise ArgumentError("sources", str(path), "the path of a file", "Name one that exists.")
    return {path.name: path}


def _files_of_module(name: str) -> dict[str, Path]:
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        mend = "Give dotted names of modules, or pathlib.Path objects for files."
        raise ArgumentError("sources", repr(name), "a Python module with a source file", mend)
    if spec.submodule_search_locations is None:
        return {name: Path(str(spec.origin))}
    return {
        f"{name}/{path.relative_to(root).as_posix()}": path
        for root in map(Path, spec.submodule_search_locations)
        for pattern in ("*.py", "*.csv")
        for path in root.rglob(pattern)
    }
