"""Runs a grid of cells into a durable table: resumable, parallel, shared by runners."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._cells import CellFunction, Outcome, compute_cell, plan_cells
from benchmarks._process import Process
from benchmarks._version import code_version, function_name, package_versions
from benchmarks.results import Claim, ResultsStore, load_failures, load_results
from gpclml.errors import ArgumentError, DataError

__all__ = ["GridSummary", "load_failures", "load_results", "run_grid"]


@dataclass
class GridSummary:
    """How many cells of a grid were computed, and what became of the others.

    Args:
        path: The results file.
        total: Number of distinct cells.
        computed: Computed and saved by this run.
        failed: Failed in this run.
        skipped: Done before, or by another runner meanwhile.
        failed_before: Failed earlier and not tried again.
        elsewhere: Still being computed by another runner.
        seconds: Wall time of this run.
    """

    path: Path
    total: int
    computed: int = 0
    failed: int = 0
    skipped: int = 0
    failed_before: int = 0
    elsewhere: int = 0
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every cell of the grid is done."""
        return self.computed + self.skipped == self.total

    def __str__(self) -> str:
        parts = [f"{self.computed + self.skipped} of {self.total} cells done"]
        parts += [f"{self.computed} in this run ({self.seconds:.0f} s)"] if self.computed else []
        failed = self.failed + self.failed_before
        parts += [f"{failed} failed (see load_failures; retry_failed=True)"] if failed else []
        parts += [f"{self.elsewhere} with another runner"] if self.elsewhere else []
        return f"{', '.join(parts)}: {self.path}"


def run_grid(
    cells: Iterable[Mapping[str, Any]],
    function: CellFunction,
    results_path: str | os.PathLike,
    *,
    jobs: int = 1,
    backend: str = "loky",
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

    Args:
        cells: Configurations, JSON-serialisable dictionaries; equal ones are computed once.
        function: Importable ``function(configuration) -> {metric: value}``. It gets a copy
            of the configuration as JSON gives it back (lists for tuples), and seeds its own
            random draws. Values are numbers, strings, lists, tensors or arrays.
        results_path: The SQLite file; made if it is missing, in a folder that exists.
        jobs: Number of worker processes; 1 computes in this process, -1 on every core.
        backend: A joblib backend of separate processes: ``"loky"``, ``"dask"``, ``"ray"``.
        retry_failed: Whether to compute failed cells again.
        progress: Whether to show a progress bar on stderr.
        sources: What else decides a result: dotted names of modules, or paths of files.
        threads_per_job: Number of torch and BLAS threads of a cell, however many jobs run.

    Returns:
        The number of cells by what became of them.

    Raises:
        ArgumentError: If an argument cannot be used; before any cell is computed.
        DataError: If the results file cannot be used; before any cell, or when it fails.
        KeyboardInterrupt: When interrupted; what ended is saved and all claims are released.
    """
    _check_counts(jobs, threads_per_job)
    version = code_version(function, sources)
    plan = plan_cells(cells, version)
    pool = _pool(jobs, backend) if jobs != 1 else None
    store = ResultsStore(results_path, function_name(function), version, package_versions())
    with store, _bar(len(plan), progress) as bar:
        sweep = _Sweep(store, plan, retry_failed, GridSummary(Path(results_path), len(plan)), bar)
        try:
            while sweep.waiting and _run_pass(sweep, pool, function, threads_per_job):
                pass
        except KeyboardInterrupt:
            saved = sweep.summary.computed + sweep.summary.skipped
            message = f"Interrupted: {saved} of {len(plan)} cells are saved in {results_path}."
            print(f"\n{message} Run the same command again to resume.", file=sys.stderr)
            raise
        return sweep.finish()


@dataclass
class _Sweep:
    """One run over a grid: which cells wait, which are under way, what became of the rest."""

    store: ResultsStore
    waiting: dict[str, str]
    retry_failed: bool
    summary: GridSummary
    bar: Any
    running: dict[str, str] = field(default_factory=dict)
    fault: DataError | None = None

    def __post_init__(self) -> None:
        self._start = time.perf_counter()
        stored = self.store.stored()
        self._attempts = {key: tries for key, tries in stored.items() if tries is not None}
        self.waiting = dict(self.waiting)
        for key in [key for key in self.waiting if key in stored]:
            if stored[key] is None:
                self._leave(key, "skipped")
            elif not self.retry_failed:
                self._leave(key, "failed_before")

    def claimed(self) -> Iterator[tuple[str, str]]:
        """Claims and gives the waiting cells one by one, passing over those held elsewhere."""
        for key in list(self.waiting):
            answer = self.store.claim(key, self._attempts.get(key, 0))
            if answer is Claim.GRANTED:
                self.running[key] = self.waiting.pop(key)
                yield key, self.running[key]
            elif answer is Claim.DONE:
                self._leave(key, "skipped")
            elif answer is Claim.FAILED:
                self._leave(key, "failed_before")

    def claimed_for_pool(self) -> Iterator[tuple[str, str]]:
        """As :meth:`claimed`; a pool's own thread asks, where an error would be lost."""
        try:
            yield from self.claimed()
        except DataError as error:
            self.fault = error

    def save(self, outcome: Outcome) -> None:
        """Saves what came of a cell."""
        configuration = self.running[outcome.key]
        try:
            self.store.record(outcome, configuration)
        except KeyboardInterrupt:  # the cell has ended, so it is saved first
            self.store.record(outcome, configuration)
            raise
        finally:
            del self.running[outcome.key]
            self._count("computed" if outcome.error_type is None else "failed")

    def finish(self) -> GridSummary:
        """The summary at the end of the run."""
        self.summary.elsewhere = len(self.waiting)
        self.summary.seconds = time.perf_counter() - self._start
        return self.summary

    def _leave(self, key: str, fate: str) -> None:
        del self.waiting[key]
        self._count(fate)

    def _count(self, fate: str) -> None:
        setattr(self.summary, fate, getattr(self.summary, fate) + 1)
        self.bar.set_postfix(failed=self.summary.failed + self.summary.failed_before, refresh=False)
        self.bar.update()


def _run_pass(sweep: _Sweep, pool: Any, function: CellFunction, threads: int) -> bool:
    """Goes through the waiting cells once; says whether any of them could be claimed."""
    before = len(sweep.waiting)
    arguments = (threads, Process.here())
    if pool is None:
        for key, configuration in sweep.claimed():
            sweep.save(compute_cell(function, key, configuration, *arguments))
    else:
        _run_pooled(sweep, pool, function, arguments)
    return len(sweep.waiting) < before


def _run_pooled(sweep: _Sweep, pool: Any, function: CellFunction, arguments: tuple) -> None:
    from joblib import delayed

    cell = delayed(compute_cell)
    tasks = (cell(function, *item, *arguments) for item in sweep.claimed_for_pool())
    try:
        with contextlib.closing(pool(tasks)) as outcomes:
            for outcome in outcomes:
                sweep.save(outcome)
    except BrokenProcessPool:
        # A worker was killed (memory, a crash in native code) and took the pool with it.
        # Alone in a pool, a cell that does so can be told from its innocent neighbours.
        for key, configuration in list(sweep.running.items()):
            task = cell(function, key, configuration, *arguments)
            try:
                [outcome] = pool([task])
                sweep.save(outcome)
            except BrokenProcessPool as error:
                name, message = type(error).__name__, str(error)
                sweep.save(Outcome(key, 0.0, "", error_type=name, error_message=message))
    if sweep.fault is not None:
        raise sweep.fault


def _pool(jobs: int, backend: str) -> Any:
    """A joblib pool that hands cells out singly, and results back as they come."""
    from joblib import Parallel

    expected = "a joblib backend of separate processes that returns results as they come"
    if backend in ("threading", "sequential"):  # cells would share torch's global state
        raise ArgumentError("backend", repr(backend), expected, "Use 'loky'.")
    try:
        return Parallel(
            n_jobs=jobs, backend=backend, return_as="generator_unordered", batch_size=1,
            pre_dispatch="n_jobs",
        )  # fmt: skip
    except (ValueError, ImportError) as error:
        raise ArgumentError("backend", repr(backend), expected, f"Use 'loky'. {error}") from error


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=not progress, file=sys.stderr, unit="cell")


def _check_counts(jobs: int, threads: int) -> None:
    if jobs == 0:
        raise ArgumentError("jobs", jobs, "a number of processes, or -1 for all", "Use 1.")
    if threads < 1:
        raise ArgumentError("threads_per_job", threads, "at least 1", "Use 1.")
