"""Tasks on a Dask cluster.

The client is driven directly: joblib's Dask backend waits for ever after a task has cost
several workers their lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from benchmarks._code import Code, unusable_worker
from benchmarks._work import Answer, Answers, Task, Work
from gpclml.errors import ArgumentError

__all__ = ["DaskPool", "dask_pool"]

CONNECT_SECONDS = 5.0
WORKER_SECONDS = 50.0  # without any worker, at the start or in a run, until that is an error
POLL_SECONDS = 0.02
START = "dask worker ADDRESS --nworkers -1 --nthreads 1"


@contextlib.contextmanager
def dask_pool(jobs: int, address: str | None, code: Code) -> Iterator[DaskPool]:
    """Connects to a cluster, or starts one on this machine, and checks its workers.

    Args:
        jobs: Number of processes of a cluster on this machine; -1 for one a core.
        address: Address of the scheduler; None to start a cluster.
        code: The code that the workers must have.

    Raises:
        ArgumentError: If ``distributed`` is not installed, the scheduler does not answer,
            or the workers cannot be used.
    """
    try:
        import distributed
    except ImportError as error:
        mend = "Install it: pip install 'gpclml[dask]'."
        expected = "the package distributed beside it"
        raise ArgumentError("backend", "'dask'", expected, f"{mend} {error}") from None
    with contextlib.ExitStack() as stack:
        if address is None:
            address = str(stack.enter_context(_local_cluster(jobs)).scheduler_address)
        _check_scheduler(address)
        client = stack.enter_context(distributed.Client(address, set_as_default=False))
        _check_workers(client, address, code)
        yield DaskPool(client, address)


class DaskPool:
    """The workers of a Dask cluster; each computes one task at a time.

    Args:
        client: A client connected to the scheduler.
        address: Address of the scheduler, for messages.
    """

    def __init__(self, client: Any, address: str) -> None:
        self._client, self._address = client, address

    def run(self, work: Work, tasks: Iterable[Task]) -> Answers:
        """Computes tasks; one whose worker died is computed again by another.

        Raises:
            ArgumentError: If the cluster is lost, has had no worker for ``WORKER_SECONDS``, or a
                new worker has other code.
        """
        from distributed import as_completed

        tasks = iter(tasks)
        answers: Any = as_completed(loop=self._client.loop, with_results=True, raise_errors=False)
        running: dict[Any, Task] = {}

        def fill() -> None:
            places = max(1, len(self._workers()))
            for task in islice(tasks, max(0, places - len(running))):
                future = self._client.submit(work, task, pure=False)
                running[future] = task
                answers.add(future)

        fill()
        workers_seen = time.monotonic()
        while running:
            ended = answers.next_batch(block=False)
            if not ended:  # tasks without a worker would be waited for without end
                time.sleep(POLL_SECONDS)
                if time.monotonic() - workers_seen > WORKER_SECONDS / 10:
                    workers_seen = self._checked_workers(workers_seen)
            while ended:
                future, answer = ended.pop()
                task, answer = running.pop(future), self._judged(future, answer)
                del future  # the scheduler forgets the answer: a lost worker costs no other task
                yield task, answer
                fill()
                workers_seen = time.monotonic()

    def _checked_workers(self, seen: float) -> float:
        """When there was a worker last; raises where that is too long ago."""
        if self._workers():
            return time.monotonic()
        if time.monotonic() - seen > WORKER_SECONDS:
            raise _no_workers(self._address, "What ended is saved: repeat the call then.")
        return seen

    def _workers(self) -> dict[str, int]:
        """Number of threads by worker; one each, also of those that joined later."""
        try:
            threads = self._client.nthreads()
        except OSError as error:
            raise self._lost(error) from error
        _check_threads(threads, self._address)
        return threads

    def _judged(self, future: Any, answer: Any) -> Answer:
        """The answer, or the error of a task that cost its workers their lives."""
        from distributed import KilledWorker

        if future.status == "finished":
            return answer
        if future.status != "error":
            raise self._lost(future.status)
        error = answer[1]
        if isinstance(error, KilledWorker):
            return error
        raise unusable_worker(self._address, error)

    def _lost(self, why: object) -> ArgumentError:
        return ArgumentError(
            "address",
            f"{self._address}, which was lost ({why})",
            "a scheduler that lives as long as the run",
            "What ended is saved: start the cluster again and repeat the call.",
        )


def _local_cluster(jobs: int) -> Any:
    from distributed import LocalCluster

    return LocalCluster(
        n_workers=(os.cpu_count() or 1) if jobs < 0 else jobs, threads_per_worker=1,
        processes=True, dashboard_address="127.0.0.1:0", memory_limit=None,
    )  # fmt: skip


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
        mend = "Start one with `dask scheduler` and give the address that it prints."
        raise ArgumentError("address", repr(address), expected, f"{mend} {why}")


def _check_workers(client: Any, address: str, code: Code) -> None:
    """Whether there are workers, and all of them have the code."""
    with contextlib.suppress(TimeoutError):
        client.wait_for_workers(1, timeout=WORKER_SECONDS)
    threads = client.nthreads()
    if not threads:
        raise _no_workers(address)
    _check_threads(threads, address)
    try:
        answers = client.run(code.check, on_error="return")
    except Exception as error:  # of any kind: what a worker said that could not even start
        raise unusable_worker(address, error) from error
    for worker, answer in answers.items():
        if isinstance(answer, BaseException):
            raise unusable_worker(worker, answer)


def _no_workers(address: str, more: str = "") -> ArgumentError:
    return ArgumentError(
        "address",
        f"{address} without workers for {WORKER_SECONDS:g} s",
        "at least one",
        f"Start some: {START}. {more}".rstrip(),
    )


def _check_threads(threads: dict[str, int], address: str) -> None:
    """Workers have one thread each: torch has one state a process."""
    most = max(threads.values(), default=1)
    if most > 1:
        got = f"{address} with workers of {most} threads"
        raise ArgumentError("address", got, "workers of one thread", f"Start them by: {START}.")
