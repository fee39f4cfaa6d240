"""GPyTorch's own tests with our objectives in the place of its exact ones.

``python -m benchmarks.upstream`` fetches the source distribution of the installed GPyTorch, takes
the tests that use ``ExactMarginalLogLikelihood`` or ``LeaveOneOutPseudoLikelihood`` and runs them
twice: as they are, and with the conditional log marginal likelihood under these names, held out
as ``LastPoints(m=0)`` and ``LeaveOneOut()`` say. None of the tests is part of this project. A
network, or pip's cache, is needed.

The same file is the pytest plugin that puts the objectives in place (``-p benchmarks.upstream``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated, Any

import gpytorch
import typer

from benchmarks._tables import command_lines
from gpclml.conditioning import LastPoints, LeaveOneOut
from gpclml.mlls import ConditionalMarginalLogLikelihood

_SWAPPED = "GPCLML_UPSTREAM_SWAPPED"


class _Counted(ConditionalMarginalLogLikelihood):
    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Counts the evaluations."""
        _Counted.calls += 1
        return super().forward(*args, **kwargs)


class MarginalLogLikelihood(_Counted):
    """The log marginal likelihood with the constructor of GPyTorch's objective."""

    def __init__(self, likelihood: Any, model: Any) -> None:
        super().__init__(likelihood, model, LastPoints(m=0))


class LeaveOneOutLikelihood(_Counted):
    """The leave-one-out objective with the constructor of GPyTorch's."""

    def __init__(self, likelihood: Any, model: Any) -> None:
        super().__init__(likelihood, model, LeaveOneOut())


def pytest_configure(config: Any) -> None:
    """Puts our objectives in the place of GPyTorch's, before any test is imported."""
    if os.environ.get(_SWAPPED) != "1":
        return
    for module in (gpytorch, gpytorch.mlls, gpytorch.mlls.exact_marginal_log_likelihood):
        module.ExactMarginalLogLikelihood = MarginalLogLikelihood
    gpytorch.mlls.LeaveOneOutPseudoLikelihood = LeaveOneOutLikelihood
    # Its default class was bound when GPyTorch was imported.
    gpytorch.mlls.SumMarginalLogLikelihood.__init__.__defaults__ = (MarginalLogLikelihood,)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how often ours were evaluated, so that a swap that failed is seen."""
    terminalreporter.write_line(f"our objectives: {_Counted.calls} evaluations")


def fetch_tests(folder: Path) -> list[Path]:
    """The tests of the installed GPyTorch that use its exact objectives.

    Args:
        folder: Where to unpack GPyTorch's tests; nothing is written outside it.

    Returns:
        The test files, below ``folder``.
    """
    pip = "-m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest"
    source = f"gpytorch=={gpytorch.__version__}"
    subprocess.run([sys.executable, *pip.split(), str(folder), source], check=True)
    [archive] = folder.glob("gpytorch-*.tar.gz")
    with tarfile.open(archive) as tar:
        # The package itself stays behind: the installed one is to be tested.
        members = [m for m in tar.getmembers() if m.name.split("/")[1:2] == ["test"]]
        tar.extractall(folder, members, filter="data")
    pattern = re.compile(r"\b((Exact|Sum)MarginalLogLikelihood|LeaveOneOutPseudoLikelihood)\b")
    tests = folder.glob("gpytorch-*/test/**/test_*.py")
    return sorted(test for test in tests if pattern.search(test.read_text()))


def run_tests(tests: list[Path], swapped: bool, options: list[str]) -> int:
    """Runs the tests in a process of their own.

    Returns:
        The exit status of pytest.
    """
    root = next(parent for parent in tests[0].parents if (parent / "test").is_dir())
    here = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, _SWAPPED: str(int(swapped))}
    # -P: the unpacked tests must not shadow the installed package.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "no:warnings"]
    command += ["-p", "benchmarks.upstream", f"--rootdir={root}", *options, *map(str, tests)]
    return subprocess.run(command, cwd=root, env=environment).returncode


def main(
    keyword: Annotated[str, typer.Option("-k", help="Only tests that pytest's -k selects.")] = "",
) -> None:
    """GPyTorch's own tests of its exact objectives, with these and with ours in their place."""
    print(command_lines("benchmarks.upstream"), flush=True)
    options = ["-k", keyword] if keyword else []
    with tempfile.TemporaryDirectory() as folder:
        tests = fetch_tests(Path(folder))
        print(f"\n{len(tests)} files, GPyTorch's objectives:", flush=True)
        before = run_tests(tests, False, options)
        print(f"\n{len(tests)} files, ours in their place:", flush=True)
        after = run_tests(tests, True, options)
    raise typer.Exit(after if before == 0 else before)


if __name__ == "__main__":
    typer.run(main)
