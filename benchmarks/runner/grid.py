"""Runs the cells of a grid by joblib: in this process, in processes of this machine, or on Dask."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import joblib
import threadpoolctl
from tqdm import tqdm

from benchmarks._process import keep_freed_memory
from benchmarks.runner.code import check_code, code_version, function_name, package_versions
from benchmarks.runner.results import Row, canonical_json, open_results
from gpclml.errors import ArgumentError, DataError

LOSSES = 3  # of workers in one run; the next ends it
CONNECT_SECONDS, WORKER_SECONDS = 5, 50  # that a scheduler, and a first worker of it, may take

CellFunction = Callable[[dict[str, Any]], Mapping[str, Any]]
BatchFunction = Callable[[list[dict[str, Any]]], list[Mapping[str, Any] | Exception]]
Map = Callable[[Callable, list[list["Cell"]]], Iterable[list[Row]]]


class Cell(NamedTuple):
    """A cell of a grid: its key in the results file, and its configuration as JSON text."""

    key: str
    configuration: str


@dataclass(frozen=True)
class Batches:
    """How cells are computed several at a time.

    The results must be those of the cell function, to numerical tolerance: cells are saved
    under the same keys.

    Args:
        function: Importable ``function(configurations) -> answers``: one entry a cell, in
            order, its metrics or the exception that ended it. When the function itself
            raises, each cell of the batch is computed alone by the cell function.
        label: Hashable label of a configuration; cells of one label may be computed together.
        size: Most cells in a batch with this one; 1: alone, by the cell function.
    """

    function: BatchFunction
    label: Callable[[dict[str, Any]], Hashable]
    size: Callable[[dict[str, Any]], int]


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
        words = [f"{self.computed + self.skipped} of {self.total} cells done"]
        words += [f"{self.computed} in this run ({self.seconds:.0f} s)"] if self.computed else []
        failed = self.failed + self.failed_before
        words += [f"{failed} failed (see load_failures; retry_failed=True)"] if failed else []
        return f"{', '.join(words)}: {self.path}"


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
    command: str | None = None,
) -> GridSummary:
    """Computes the cells that a results file lacks, and saves each as soon as it ends.

    A cell is known by its whole configuration and the version of the code, so an
    interrupted run goes on where it was when the same call is made again. A failed cell
    is saved with its error and the run goes on. This process alone writes the file; a second
    run on it is refused as long as this one lives. When a worker is lost what it had is computed
    again; the fourth loss ends the run. A cell has one thread of torch and BLAS, whatever the
    number of jobs.

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
            thread each.
        batches: How cells are computed several at a time, if they are.
        environment: Environment variables that workers set around each cell, such as
            ``GPCLML_DATA``, which a cluster does not inherit.
        retry_failed: Whether to compute failed cells again.
        progress: Whether to show a progress bar on stderr.
        command: What computes these cells, kept in the file for
            :func:`benchmarks.runner.load_commands`.

    Returns:
        The number of cells by what became of them.

    Raises:
        ArgumentError: If an argument cannot be used, or a cluster cannot be reached, has other
            code, or is lost later on.
        DataError: If the results file cannot be used, or another run is writing it; before any
            cell. Also when it fails later on, and when workers are lost again and again.
        KeyboardInterrupt: When interrupted; what ended is saved.
    """
    if jobs == 0:
        raise ArgumentError("jobs", jobs, "a number of processes, or -1 for all", "Use 1.")
    functions = [function] if batches is None else [function, batches.function]
    # Before anything is opened: an argument that cannot be used leaves no file.
    version, packages = code_version(*functions), package_versions()
    texts = {cell_key(cell, version): canonical_json(dict(cell)) for cell in cells}
    plan = [Cell(*pair) for pair in texts.items()]
    if not plan:
        raise ArgumentError("cells", "no cell", "at least one", "Check what selects them.")
    check = partial(check_code, functions, {"code": version, **packages})
    together = batches and batches.function
    work = partial(_compute, function, together, environment or {}, check if address else None)
    about = {"function": function_name(function), "code_version": version, **packages}
    with (
        _open_workers(jobs, address, check) as map_tasks,
        open_results(results_path, about, command) as store,
        tqdm(total=len(plan), disable=not progress, file=sys.stderr, unit="cell") as bar,
    ):
        summary, start = GridSummary(store.path, len(plan)), time.perf_counter()

        def count(outcome: str) -> None:
            setattr(summary, outcome, getattr(summary, outcome) + 1)
            bar.set_postfix(failed=summary.failed + summary.failed_before, refresh=False)
            bar.update()

        known = store.stored()
        outcomes = {"done": "skipped", "failed": None if retry_failed else "failed_before"}
        before = {cell: outcomes.get(known.get(cell.key, "")) for cell in plan}
        for outcome in filter(None, before.values()):
            count(outcome)
        waiting = {cell.key: cell for cell in plan if before[cell] is None}
        losses = 0
        try:
            while waiting:
                # After a loss what is left is grouped again.
                groups = group_cells(waiting.values(), batches)
                try:
                    for rows in map_tasks(work, groups):
                        store.record(rows)
                        for row in rows:
                            del waiting[row["key"]]
                            count("computed" if "metrics" in row else "failed")
                except BrokenProcessPool as error:  # one that is killed takes all with it
                    losses += 1
                    if losses > LOSSES:
                        raise DataError(
                            f"{store.path}: {losses} workers were lost, perhaps for lack of "
                            f"memory ({type(error).__name__}). What ended is saved: run the same "
                            "command again with fewer jobs."
                        ) from error
        except KeyboardInterrupt:
            # An interruption may come between the saving of a cell and its count.
            statuses = store.stored()
            saved = sum(statuses.get(cell.key) == "done" for cell in plan)
            text = (
                f"{saved} of {summary.total} cells are saved in {summary.path}. Run the same "
                "command again to resume."
            )
            print(f"\nInterrupted: {text}", file=sys.stderr)
            raise
        finally:
            summary.seconds = time.perf_counter() - start
        return summary


def cell_key(configuration: Mapping[str, Any], version: str) -> str:
    """SHA-256 of a configuration together with the version of the code, hexadecimal."""
    text = canonical_json({"code": version, "cell": dict(configuration)})
    return hashlib.sha256(text.encode()).hexdigest()


def group_cells(cells: Iterable[Cell], batches: Batches | None) -> list[list[Cell]]:
    """Cells in groups of one label, none above its size, in the order of their first cells."""
    if batches is None:
        return [[cell] for cell in cells]
    groups, unfilled = [], {}
    for cell in cells:
        configuration = json.loads(cell.configuration)
        kind = batches.label(configuration), batches.size(configuration)
        # A label's group is full, or there is none: the next one starts.
        if len(unfilled.get(kind, ())) in (0, kind[1]):
            groups.append([])
            unfilled[kind] = groups[-1]
        unfilled[kind].append(cell)
    return groups


def make_row(cell: Cell, answer: object, seconds: float) -> Row:
    """The row of what came of a cell; one whose metrics cannot be saved has failed."""
    row: Row = {
        "key": cell.key, "configuration": json.loads(cell.configuration), "seconds": seconds,
    }  # fmt: skip
    try:
        if isinstance(answer, BaseException):
            raise answer
        return row | {"metrics": _plain_metrics(answer, row["configuration"])}
    except (Exception, SystemExit) as error:
        texts = {
            "_error_type": type(error).__name__, "_error_message": str(error),
            "_traceback": "".join(traceback.format_exception(error)),
        }  # fmt: skip
        return row | {"error": texts}


def _compute(
    function: CellFunction,
    batch_function: BatchFunction | None,
    environment: Mapping[str, str],
    check: Callable[[], None] | None,
    cells: list[Cell],
) -> list[Row]:
    """Rows of what came of cells, in any process; those of a batch that fails one by one."""
    if check is not None:
        # Workers may join a cluster after the driver looked at it.
        check()
    keep_freed_memory()
    configurations = [json.loads(cell.configuration) for cell in cells]
    start = time.perf_counter()
    with _one_thread(), mock.patch.dict(os.environ, environment):
        try:
            if len(cells) == 1 or batch_function is None:
                answers = [function(configuration) for configuration in configurations]
            else:
                answers = batch_function(configurations)
            pairs = list(zip(cells, answers, strict=True))
        except (Exception, SystemExit) as error:
            if len(cells) == 1:
                pairs = [(cells[0], error)]
            else:
                text = f"A batch of {len(cells)} cells failed and is computed cell by cell"
                print(f"{text}: {type(error).__name__}: {error}", file=sys.stderr)
                pairs = None
    # Alone, each cell tells its own error, and the others have results.
    if pairs is None:
        alone = (_compute(function, None, environment, None, [cell]) for cell in cells)
        return [row for rows in alone for row in rows]
    # A batch has one clock: its cells have equal shares.
    share = (time.perf_counter() - start) / len(cells)
    return [make_row(cell, answer, share) for cell, answer in pairs]


def _plain_metrics(metrics: object, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as JSON gives them back."""
    if not isinstance(metrics, Mapping):
        fix = "Let the cell function return {name: value}."
        raise ArgumentError("metrics", type(metrics).__name__, "a dictionary", fix)
    shared = sorted(set(metrics) & set(configuration))
    if shared:
        raise ArgumentError("metrics", shared, "names not used by the cell", "Rename them.")
    return json.loads(json.dumps(dict(metrics), default=_plain))


def _plain(value: Any) -> object:
    """Tensors and arrays as numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a metric of type {type(value).__name__} is not JSON serialisable")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Within the block torch and the BLAS libraries have one thread, whatever number of jobs."""
    import torch

    before = torch.get_num_threads()
    with threadpoolctl.threadpool_limits(1):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextlib.contextmanager
def _open_workers(jobs: int, address: str | None, check: Callable[[], None]) -> Iterator[Map]:
    """What maps tasks to answers as they end: in this process, in others, or on a cluster."""
    # Tasks one by one: a batch of joblib's would be saved, and lost, as a whole.
    options: dict[str, Any] = {"return_as": "generator_unordered", "batch_size": 1}
    if address is not None:
        # By its own client: joblib's backend for Dask waits for ever where a scheduler is lost.
        with _connected(address, check) as client:
            yield partial(_map_on_cluster, client, address)
        return
    if jobs != 1:
        options |= {"backend": "loky", "initializer": _end_with_driver, "initargs": (os.getpid(),)}
    yield lambda work, groups: joblib.Parallel(jobs, **options)(
        joblib.delayed(work)(group) for group in groups
    )


def _map_on_cluster(
    client: Any, address: str, work: Callable[[list[Cell]], list[Row]], groups: list[list[Cell]]
) -> Iterator[list[Row]]:
    """Answers of a Dask cluster, which gives what a lost worker had to others."""
    from distributed import as_completed

    try:
        for future in as_completed(client.map(work, groups, pure=False), loop=client.loop):
            yield future.result()
    except (Exception, CancelledError) as error:
        raise ArgumentError(
            "address", f"{address}, which failed ({type(error).__name__}: {error})",
            "a scheduler and workers that live as long as the run and have this code",
            "What ended is saved: start the cluster again and repeat the call.",
        ) from error  # fmt: skip


def _end_with_driver(driver: int) -> None:
    """Ends this worker when its driver is gone, however that ended; Ctrl-C is the driver's."""

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(1.0)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True, name="end-with-driver").start()


def _check_scheduler(address: str) -> None:
    """Whether a scheduler answers; a client that fails to connect would not close cleanly."""
    from distributed import rpc

    async def kind() -> str:
        async with rpc(address) as remote:
            identity: Any = await asyncio.wait_for(remote.identity(), CONNECT_SECONDS)
            return identity["type"]

    try:
        with ThreadPoolExecutor(1) as thread:  # this thread may run a loop, as in a notebook
            why = f"It is a {thread.submit(asyncio.run, kind()).result()}."
    except (OSError, ValueError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    if why != "It is a Scheduler.":
        expected = f"the address of a Dask scheduler that answers within {CONNECT_SECONDS} s"
        fix = "Start one with `dask scheduler` and give the address that it prints."
        raise ArgumentError("address", repr(address), expected, f"{fix} {why}")


@contextlib.contextmanager
def _connected(address: str, check: Callable[[], None]) -> Iterator[Any]:
    """A client of a Dask scheduler whose workers have one thread each and this process's code."""
    try:
        import distributed
    except ImportError as error:
        fix = f"Install it: pip install 'gpclml[dask]'. {error}"
        raise ArgumentError("address", repr(address), "the package distributed", fix) from None
    _check_scheduler(address)
    with distributed.Client(address, set_as_default=False) as client:
        with contextlib.suppress(TimeoutError):
            client.wait_for_workers(1, timeout=WORKER_SECONDS)
        threads = client.nthreads().values()
        if set(threads) != {1}:  # torch has one state a process
            got = f"{max(threads)} threads" if threads else f"none within {WORKER_SECONDS} s"
            fix = "Start: dask worker ADDRESS --nworkers -1 --nthreads 1."
            raise ArgumentError("address", f"{address}, {got}", "workers of one thread", fix)
        try:
            client.run(check)
        except Exception as error:
            got = f"{address} with workers that cannot be used ({type(error).__name__}: {error})"
            fix = "Start them with the code and packages of this process."
            raise ArgumentError("address", got, "usable ones", fix) from error
        yield client
