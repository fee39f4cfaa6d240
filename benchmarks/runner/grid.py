"""Runs a grid of cells: which of them wait, which are under way, what became of the rest."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.runner.cells import (
    Batches,
    Cell,
    CellFunction,
    Work,
    failed_row,
    group_cells,
    plan_cells,
)
from benchmarks.runner.code import check_code, code_version, function_name, package_versions
from benchmarks.runner.executors import Answer, Workers, open_workers
from benchmarks.runner.results import ResultsStore, open_results
from gpclml.errors import ArgumentError

__all__ = ["GridSummary", "run_grid"]

RERUNS = 3  # of a cell whose worker was lost


@dataclass
class GridSummary:
    """How many cells of a grid were computed, and what became of the others."""

    path: Path
    total: int  # of distinct cells
    computed: int = 0  # and saved by this run
    failed: int = 0  # in this run
    skipped: int = 0  # for they were done before
    failed_before: int = 0  # and not tried again
    seconds: float = 0.0  # wall time of this run

    @property
    def complete(self) -> bool:
        """Whether every cell of the grid is done."""
        return self.computed + self.skipped == self.total

    def __str__(self) -> str:
        parts = [f"{self.computed + self.skipped} of {self.total} cells done"]
        parts += [f"{self.computed} in this run ({self.seconds:.0f} s)"] if self.computed else []
        failed = self.failed + self.failed_before
        parts += [f"{failed} failed (see load_failures; retry_failed=True)"] if failed else []
        return f"{', '.join(parts)}: {self.path}"


def run_grid(
    cells: Iterable[Mapping[str, Any]],
    function: CellFunction,
    results_path: str | os.PathLike,
    *,
    jobs: int = 1,
    address: str | None = None,
    batches: Batches | None = None,
    environment: Mapping[str, str] | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    sources: Iterable[str] = (),
    command: str | None = None,
) -> GridSummary:
    """Computes the cells that a results file lacks, and saves each as soon as it ends.

    A cell is known by its whole configuration and the version of the code, so an
    interrupted run goes on where it was when the same call is made again. A failed cell
    is saved with its error and the run goes on. This process alone writes the file; a second
    run on it is refused as long as this one lives. When a worker is lost its cell is computed
    again, three times at most, and then saved as failed with the error of the loss. A cell has one
    thread of torch and BLAS, whatever the number of jobs.

    Args:
        cells: Configurations, JSON-serialisable dictionaries; equal ones are computed once.
        function: Importable ``function(configuration) -> {metric: value}``. It gets a copy
            of the configuration as JSON gives it back (lists for tuples), and seeds its own
            random draws. Values are numbers, strings, lists, tensors or arrays.
        results_path: The SQLite file; made if it is missing, in a folder that exists.
        jobs: Number of worker processes of this machine; -1 for one a core; 1 computes in this
            process.
        address: Address of a Dask scheduler, such as ``"tcp://host:8786"``, whose workers compute
            in the place of this machine's. They need the same code, packages and data, and one
            thread each; how often a lost worker's cell is computed again is its
            ``distributed.scheduler.allowed-failures``, 3 where nothing else is set.
        batches: How cells are computed several at a time, if they are. The module of their
            function counts as one of the ``sources``.
        environment: Environment variables that workers set around each cell, such as
            ``GPCLML_DATA``, which a cluster does not inherit.
        retry_failed: Whether to compute failed cells again.
        progress: Whether to show a progress bar on stderr.
        sources: Dotted names of further modules that decide a result.
        command: What computes these cells, kept in the file for
            :func:`benchmarks.runner.load_commands`.

    Returns:
        The number of cells by what became of them.

    Raises:
        ArgumentError: If an argument cannot be used, or a cluster cannot be reached, has other
            code, or is lost later on.
        DataError: If the results file cannot be used, or another run is writing it; before any
            cell. Also when it fails later on.
        KeyboardInterrupt: When interrupted; what ended is saved.
    """
    if jobs == 0:
        raise ArgumentError("jobs", jobs, "a number of processes, or -1 for all", "Use 1.")
    sources = tuple(sources)
    if batches is not None:
        sources = (*sources, function_name(batches.function).partition(":")[0])
    version, packages = code_version(function, sources), package_versions()
    plan = plan_cells(cells, version)
    check = partial(check_code, function, sources, {"code": version, **packages})
    work = Work(
        function, batches and batches.function, environment or {},
        None if address is None else check,
    )  # fmt: skip
    about = {"function": function_name(function), "code_version": version, **packages}
    with (
        open_workers(jobs, address, check) as workers,
        open_results(results_path, about, command) as store,
        tqdm(total=len(plan), disable=not progress, file=sys.stderr, unit="cell") as bar,
    ):
        stored = store.stored()
        fates = {"done": "skipped", "failed": None if retry_failed else "failed_before"}
        before = {cell: fates.get(stored.get(cell.key, "")) for cell in plan}
        groups = group_cells([cell for cell in plan if before[cell] is None], batches)
        run = _Run(store, GridSummary(store.path, len(plan)), bar, deque(map(_Task, groups)))
        for fate in filter(None, before.values()):
            run.count(fate)
        run.compute(workers, work)
        return run.summary


@dataclass(eq=False)
class _Task:
    """Cells that a worker is handed at once, and how many workers were lost with them."""

    cells: list[Cell]
    losses: int = 0


@dataclass
class _Run:
    """The state of a run.

    Attributes:
        store: The results file, opened.
        summary: What became of the cells so far.
        bar: A tqdm bar over all cells.
        tasks: Those that wait.
        suspects: Those whose worker was lost, which are computed one at a time.
        running: Those that workers have.
    """

    store: ResultsStore
    summary: GridSummary
    bar: Any
    tasks: deque[_Task]
    suspects: deque[_Task] = field(default_factory=deque)
    running: dict[Future, _Task] = field(default_factory=dict)

    def compute(self, workers: Workers, work: Work) -> None:
        """Computes all that waits, until all is done or the user interrupts it."""
        start = time.perf_counter()
        try:
            self._fill(workers, work)
            while self.running:
                done, _ = wait(self.running, return_when=FIRST_COMPLETED)
                while done:  # no name keeps a future: a cluster forgets answers that are read
                    future = done.pop()
                    self._settle(self.running.pop(future), workers.answer(future))
                    del future
                self._fill(workers, work)
        except KeyboardInterrupt:
            for future in self.running:
                if future.done() and not future.cancelled() and not future.exception():
                    self._save(future.result())
            saved = self.summary.computed + self.summary.skipped
            text = f"{saved} of {self.summary.total} cells are saved in {self.summary.path}."
            print(f"\nInterrupted: {text} Run the same command again to resume.", file=sys.stderr)
            raise
        finally:
            self.summary.seconds = time.perf_counter() - start

    def _fill(self, workers: Workers, work: Work) -> None:
        """Hands tasks to workers that are free.

        A lost worker takes its neighbours with it. So all tasks that ran beside it are computed
        again one at a time, which tells the one that costs its workers from the others.
        """
        while waiting := self.suspects or self.tasks:
            if len(self.running) >= (1 if self.suspects else workers.places()):
                return
            task = waiting.popleft()
            self.running[workers.submit(work, task.cells)] = task

    def _settle(self, task: _Task, answer: Answer) -> None:
        """Saves what came of a task; the cells of a batch that failed wait to be computed alone."""
        if isinstance(answer, list):
            self._save(answer)
        elif isinstance(answer, BrokenProcessPool) and task.losses < RERUNS:
            task.losses += 1
            self.suspects.append(task)
        elif len(task.cells) == 1:
            self._save([failed_row(task.cells[0], answer, 0.0)])
        else:
            self.tasks.extend(_Task([cell]) for cell in task.cells)
            text = f"A batch of {len(task.cells)} cells failed and is computed cell by cell"
            warnings.warn(f"{text}: {answer}", RuntimeWarning, stacklevel=1)

    def _save(self, rows: Answer) -> None:
        if isinstance(rows, list):
            self.store.record(rows)
            for row in rows:
                self.count("computed" if "metrics" in row else "failed")

    def count(self, fate: str) -> None:
        """Counts a cell by what became of it."""
        setattr(self.summary, fate, getattr(self.summary, fate) + 1)
        failed = self.summary.failed + self.summary.failed_before
        self.bar.set_postfix(failed=failed, refresh=False)
        self.bar.update()
