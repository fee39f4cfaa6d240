"""Where cells are computed: executors of this process, of this machine, of a Dask cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from benchmarks.runner.cells import Cell, Row, Work
from benchmarks.runner.code import OtherCodeError
from gpclml.errors import ArgumentError, UnknownNameError

__all__ = ["Answer", "Workers", "open_workers"]

BACKENDS = ("loky", "dask")
IDLE_SECONDS = 300  # after which a process of this machine without work ends
CONNECT_SECONDS = 5.0
WORKER_SECONDS = 50.0  # without any worker of a cluster, at the start or later: an error
START = "dask worker ADDRESS --nworkers -1 --nthreads 1"

Answer = list[Row] | Exception
"""What came of cells, or the error of a batch, or that of a worker that was lost with them."""


class Workers:
    """An executor that can be made again after it lost a worker.

    Args:
        executor: Gives one that can be used.
        places: Number of tasks that it computes at a time.
    """

    def __init__(self, executor: Callable[[], Executor], places: int) -> None:
        self._executor, self._places = executor, places

    @property
    def places(self) -> int:
        """Number of tasks that are computed at a time."""
        return self._places

    def submit(self, work: Work, cells: list[Cell]) -> Future:
        """Hands cells to a worker."""
        while True:
            with contextlib.suppress(BrokenProcessPool):  # a worker was lost between two tasks
                return self._executor().submit(work, cells)

    def answer(self, future: Future) -> Answer:
        """What a worker made of its cells; the error of a lost worker is returned, not raised."""
        try:
            return future.result()
        except BrokenProcessPool as error:
            return error

    def check(self) -> None:
        """Raises where waiting for answers has become useless."""


def open_workers(
    backend: str, jobs: int, address: str | None, check: Callable[[], None]
) -> contextlib.AbstractContextManager[Workers]:
    """The workers of a backend; a cluster is reached or started, and its workers are checked.

    Args:
        backend: ``"loky"`` or ``"dask"``.
        jobs: Number of worker processes; -1 for one a core. A cluster with an address has
            its own.
        address: Address of a running cluster; None for a cluster on this machine.
        check: Called on the workers of a cluster; raises where they have other code.

    Raises:
        ArgumentError: If the backend is unknown or not installed, or the cluster cannot be
            reached or its workers cannot be used.
    """
    if backend not in BACKENDS:
        raise UnknownNameError("backend", backend, BACKENDS)
    if backend == "dask":
        return _dask_workers(jobs, address, check)
    if address is not None:
        fix = "Use backend='dask', or leave the address out."
        raise ArgumentError("address", repr(address), "None with backend='loky'", fix)
    return contextlib.nullcontext(Workers(_ThisProcess, 1)) if jobs == 1 else _loky_workers(jobs)


class _ThisProcess(Executor):
    """Computes at once what it is handed."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextlib.contextmanager
def _loky_workers(jobs: int) -> Iterator[Workers]:
    """Processes of this machine. One that is killed takes all with it; then new ones start."""
    from joblib.externals.loky import cpu_count, get_reusable_executor

    places = jobs if jobs > 0 else max(1, cpu_count() + 1 + jobs)
    executor = partial(
        get_reusable_executor, max_workers=places, timeout=IDLE_SECONDS,
        initializer=_end_with_driver, initargs=(os.getpid(),),
    )  # fmt: skip
    try:
        yield Workers(executor, places)
    except BaseException:
        executor().shutdown(wait=True, kill_workers=True)
        raise


def _end_with_driver(driver: int) -> None:
    """Ends this worker when its driver is gone: a killed driver leaves no work behind."""

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-driver").start()


class _DaskWorkers(Workers):
    """The workers of a Dask cluster; the scheduler gives a lost worker's cells to others.

    Args:
        client: A client connected to the scheduler.
        address: Address of the scheduler, for messages.
    """

    def __init__(self, client: Any, address: str) -> None:
        pool = client.get_executor(pure=False)
        super().__init__(lambda: pool, 1)
        self._client, self._address = client, address
        self._workers_seen = time.monotonic()

    @property
    def places(self) -> int:
        """One task a worker, also for those that joined later."""
        return max(1, len(self._workers()))

    def answer(self, future: Future) -> Answer:
        from distributed import KilledWorker

        try:
            return future.result()
        except KilledWorker as error:
            return error
        except (CancelledError, OSError) as error:
            raise self._lost(error) from error
        except Exception as error:
            raise self.unusable(error) from error

    def unusable(self, error: Exception) -> ArgumentError:
        """What to raise for workers that cannot import the work, or have other code."""
        fix = "" if isinstance(error, OtherCodeError) else (
            "Start the workers where gpclml, benchmarks and the cell function can be imported."
        )  # fmt: skip
        got = f"{self._address} with workers that cannot be used ({type(error).__name__}: {error})"
        return ArgumentError("address", got, "workers with the code of the driver", fix)

    def check(self) -> None:
        """Raises where the scheduler is lost, or had no worker for ``WORKER_SECONDS``."""
        if not self._workers() and time.monotonic() - self._workers_seen > WORKER_SECONDS:
            got = f"{self._address} without workers for {WORKER_SECONDS:g} s"
            fix = f"Start some: {START}. What ended is saved: repeat the call then."
            raise ArgumentError("address", got, "at least one", fix)

    def _workers(self) -> dict[str, int]:
        """Number of threads by worker, which is one."""
        try:
            threads = self._client.nthreads()
        except OSError as error:
            raise self._lost(error) from error
        if threads:
            most = max(threads.values())
            if most > 1:  # torch has one state a process
                got = f"{self._address} with workers of {most} threads"
                fix = f"Start them by: {START}."
                raise ArgumentError("address", got, "workers of one thread", fix)
            self._workers_seen = time.monotonic()
        return threads

    def _lost(self, why: object) -> ArgumentError:
        return ArgumentError(
            "address", f"{self._address}, which was lost ({why})",
            "a scheduler that lives as long as the run",
            "What ended is saved: start the cluster again and repeat the call.",
        )  # fmt: skip


@contextlib.contextmanager
def _dask_workers(
    jobs: int, address: str | None, check: Callable[[], None]
) -> Iterator[_DaskWorkers]:
    try:
        import distributed
    except ImportError as error:
        fix = f"Install it: pip install 'gpclml[dask]'. {error}"
        raise ArgumentError("backend", "'dask'", "the package distributed", fix) from None
    with contextlib.ExitStack() as stack:
        if address is None:
            cluster = distributed.LocalCluster(
                n_workers=(os.cpu_count() or 1) if jobs < 0 else jobs, threads_per_worker=1,
                processes=True, dashboard_address="127.0.0.1:0", memory_limit=None,
            )  # fmt: skip
            address = str(stack.enter_context(cluster).scheduler_address)
        _check_scheduler(address)
        client = stack.enter_context(distributed.Client(address, set_as_default=False))
        workers = _DaskWorkers(client, address)
        with contextlib.suppress(TimeoutError):
            client.wait_for_workers(1, timeout=WORKER_SECONDS)
        workers.check()
        try:
            client.run(check)
        except Exception as error:
            raise workers.unusable(error) from error
        yield workers


def _check_scheduler(address: str) -> None:
    """Whether a scheduler answers; a client that fails to connect would not close cleanly."""
    from distributed import rpc

    async def kind() -> str:
        async with rpc(address) as remote:
            identity: Any = await asyncio.wait_for(remote.identity(), CONNECT_SECONDS)
            return identity["type"]

    try:
        with ThreadPoolExecutor(1) as thread:  # this thread may run a loop, as in a notebook
            answer = thread.submit(asyncio.run, kind()).result()
        why = f"It is a {answer}."
    except (OSError, ValueError, TypeError) as error:
        answer, why = None, f"{type(error).__name__}: {error}"
    if answer != "Scheduler":
        expected = f"the address of a Dask scheduler that answers within {CONNECT_SECONDS:.0f} s"
        fix = "Start one with `dask scheduler` and give the address that it prints."
        raise ArgumentError("address", repr(address), expected, f"{fix} {why}")
