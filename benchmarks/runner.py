"""Runs a grid of cells into a durable table: resumable, parallel, shared by runners."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks._batches import Batches, kinds_of
from benchmarks._cells import CellFunction, plan_cells
from benchmarks._code import Code
from benchmarks._pools import open_pool
from benchmarks._process import Process
from benchmarks._sweep import GridSummary, Sweep
from benchmarks._version import function_name
from benchmarks._work import Work
from benchmarks.results import ResultsStore, load_failures, load_results
from gpclml.errors import ArgumentError

__all__ = ["Batches", "GridSummary", "load_failures", "load_results", "run_grid"]

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def run_grid(
    cells: Iterable[Mapping[str, Any]],
    function: CellFunction,
    results_path: str | os.PathLike,
    *,
    jobs: int = 1,
    backend: str = "loky",
    address: str | None = None,
    batches: Batches | None = None,
    environment: Mapping[str, str] = NO_VARIABLES,
    retry_failed: bool = False,
    progress: bool = True,
    sources: Iterable[str | Path] = (),
    threads_per_job: int = 1,
) -> GridSummary:
    """Computes the cells that a results file lacks, and saves each as soon as it ends.

    A cell is known by its whole configuration and the version of the code, so an
    interrupted sweep goes on where it was when the same call is made again. A failed cell
    is saved with its error and the sweep goes on. Several runners, also on several
    machines, may share a file: each claims its cells; the claims of a killed runner are
    free at once on its machine, and after ``LEASE_SECONDS`` without a heartbeat elsewhere.
    When a worker is lost its cell is computed again; a cell that keeps taking its workers
    down is saved as failed.

    Args:
        cells: Configurations, JSON-serialisable dictionaries; equal ones are computed once.
        function: Importable ``function(configuration) -> {metric: value}``. It gets a copy
            of the configuration as JSON gives it back (lists for tuples), and seeds its own
            random draws. Values are numbers, strings, lists, tensors or arrays.
        results_path: The SQLite file; made if it is missing, in a folder that exists.
        jobs: Number of worker processes; -1 for one a core. 1 with ``"loky"`` computes in
            this process. A cluster with an address has its own number.
        backend: ``"loky"`` (joblib): processes of this machine. ``"dask"`` or ``"ray"``: a
            cluster, whose workers need the same code, packages and data, and one thread
            each; the results are sent to this process, which alone writes them.
        address: Address of the cluster, such as ``"tcp://host:8786"``; without it one is
            started on this machine for the run (in a script, below
            ``if __name__ == "__main__"``).
        batches: How cells are computed several at a time, if they are. The version of the
            code covers the module of their function; name it in ``sources`` where a table
            is also computed without batches.
        environment: Environment variables that workers set around each cell, such as
            ``GPCLML_DATA``, which a cluster does not inherit.
        retry_failed: Whether to compute failed cells again.
        progress: Whether to show a progress bar on stderr.
        sources: What else decides a result: dotted names of modules, or paths of files.
        threads_per_job: Number of torch and BLAS threads of a cell, however many jobs run.

    Returns:
        The number of cells by what became of them.

    Raises:
        ArgumentError: If an argument cannot be used, or a cluster cannot be reached or has
            other code; before any cell is computed. Also when a cluster is lost later on.
        DataError: If the results file cannot be used; before any cell, or when it fails.
        KeyboardInterrupt: When interrupted; what ended is saved and all claims are released.
    """
    _check_counts(jobs, threads_per_job)
    _check_environment(environment)
    together = () if batches is None else (function_name(batches.function).partition(":")[0],)
    code = Code.here(function, (*sources, *together))
    plan = plan_cells(cells, code.version)
    kinds = kinds_of(plan, batches)
    work = Work(
        function, batches and batches.function, threads_per_job, dict(environment),
        driver=Process.here() if backend == "loky" else None,
        code=None if backend == "loky" else code,
    )  # fmt: skip
    with (
        open_pool(backend, jobs, address, code) as pool,
        ResultsStore(results_path, function_name(function), code.version, code.packages) as store,
        _bar(len(plan), progress) as bar,
    ):
        sweep = Sweep(store, plan, kinds, retry_failed, bar)
        with _interrupts_told(sweep.summary):
            for tasks in sweep.passes():
                with contextlib.closing(pool.run(work, tasks)) as answers:
                    for task, answer in answers:
                        sweep.settle(task, answer)
        return sweep.finish()


@contextlib.contextmanager
def _interrupts_told(summary: GridSummary) -> Iterator[None]:
    """Says on stderr what an interrupted run has saved."""
    try:
        yield
    except KeyboardInterrupt:
        saved = summary.computed + summary.skipped
        message = f"Interrupted: {saved} of {summary.total} cells are saved in {summary.path}."
        print(f"\n{message} Run the same command again to resume.", file=sys.stderr)
        raise


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=not progress, file=sys.stderr, unit="cell")


def _check_counts(jobs: int, threads: int) -> None:
    if jobs == 0:
        raise ArgumentError("jobs", jobs, "a number of processes, or -1 for all", "Use 1.")
    if threads < 1:
        raise ArgumentError("threads_per_job", threads, "at least 1", "Use 1.")


def _check_environment(environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        if not isinstance(name, str) or not isinstance(value, str):
            mend = "Leave out what is not to be set."
            raise ArgumentError("environment", {name: value}, "strings by name", mend)
