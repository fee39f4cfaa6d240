"""Where cells are computed: executors of this process, of this machine, of a Dask cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from benchmarks.runner.cells import Cell, Row, Work
from gpclml.errors import ArgumentError

__all__ = ["Answer", "Workers", "open_workers"]

IDLE_SECONDS = 300  # after which a process of this machine without work ends
CONNECT_SECONDS = 5.0
WORKER_SECONDS = 50.0  # without any worker of a cluster at the start: an error
START = "dask worker ADDRESS --nworkers -1 --nthreads 1"

Answer = list[Row] | Exception
"""What came of cells, or the error of a batch, or that of a worker that was lost with them."""


class Workers:
    """An executor that can be made again after it lost a worker.

    Args:
        executor: Gives one that can be used.
        places: Gives the number of tasks that it computes at a time.
    """

    def __init__(self, executor: Callable[[], Executor], places: Callable[[], int]) -> None:
        self._executor, self.places = executor, places

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


def open_workers(
    jobs: int, address: str | None, check: Callable[[], None]
) -> contextlib.AbstractContextManager[Workers]:
    """This process, processes of this machine, or the workers of a cluster, which are checked.

    Args:
        jobs: Number of processes; -1 for one a core.
        address: Address of a running cluster, which has its own number of workers; or None.
        check: Called on the workers of a cluster; raises where they have other code.

    Raises:
        ArgumentError: If the cluster cannot be reached or its workers cannot be used.
    """
    if address is not None:
        return _dask_workers(address, check)
    if jobs == 1:
        return contextlib.nullcontext(Workers(_ThisProcess, lambda: 1))
    return _loky_workers(jobs)


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
        yield Workers(executor, lambda: places)
    except BaseException:
        executor().shutdown(wait=True, kill_workers=True)
        raise


def _end_with_driver(driver: int) -> None:
    """Ends this worker when its driver is gone, however that ended; Ctrl-C is the driver's."""

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(1.0)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True, name="end-with-driver").start()


class _DaskWorkers(Workers):
    """The workers of a Dask cluster; the scheduler gives a lost worker's cells to others.

    Args:
        client: A client connected to the scheduler.
        address: Address of the scheduler, for messages.
    """

    def __init__(self, client: Any, address: str) -> None:
        pool = client.get_executor(pure=False)
        # One task a worker, also for those that join later.
        super().__init__(lambda: pool, lambda: max(1, len(self.threads())))
        self._client, self._address = client, address

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
        got = f"{self._address} with workers that cannot be used ({type(error).__name__}: {error})"
        fix = "Start them with the code and packages of this process."
        return ArgumentError("address", got, "usable ones", fix)

    def threads(self) -> dict[str, int]:
        """Number of threads by worker."""
        try:
            return self._client.nthreads()
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, why: object) -> ArgumentError:
        return ArgumentError(
            "address", f"{self._address}, which was lost ({why})",
            "a scheduler that lives as long as the run",
            "What ended is saved: start the cluster again and repeat the call.",
        )  # fmt: skip


@contextlib.contextmanager
def _dask_workers(address: str, check: Callable[[], None]) -> Iterator[Workers]:
    try:
        import distributed
    except ImportError as error:
        fix = f"Install it: pip install 'gpclml[dask]'. {error}"
        raise ArgumentError("address", repr(address), "the package distributed", fix) from None
    _check_scheduler(address)
    with distributed.Client(address, set_as_default=False) as client:
        workers = _DaskWorkers(client, address)
        with contextlib.suppress(TimeoutError):
            client.wait_for_workers(1, timeout=WORKER_SECONDS)
        threads = workers.threads().values()
        if set(threads) != {1}:  # torch has one state a process
            got = f"{max(threads)} threads" if threads else f"none within {WORKER_SECONDS:g} s"
            expected = "workers of one thread"
            raise ArgumentError("address", f"{address}, {got}", expected, f"Start: {START}.")
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
            why = f"It is a {thread.submit(asyncio.run, kind()).result()}."
    except (OSError, ValueError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    if why != "It is a Scheduler.":
        expected = f"the address of a Dask scheduler that answers within {CONNECT_SECONDS:.0f} s"
        fix = "Start one with `dask scheduler` and give the address that it prints."
        raise ArgumentError("address", repr(address), expected, f"{fix} {why}")
