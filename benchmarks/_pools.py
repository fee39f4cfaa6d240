"""Where tasks are computed: this process, processes of this machine, or a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from benchmarks._code import Code
from benchmarks._work import Answer, Answers, Task, Work
from gpclml.errors import ArgumentError, DataError, UnknownNameError

__all__ = ["BACKENDS", "LokyPool", "Pool", "SerialPool", "open_pool"]

BACKENDS = ("loky", "dask", "ray")


class Pool(Protocol):
    """Takes tasks one by one as places come free, and gives answers as they come."""

    def run(self, work: Work, tasks: Iterable[Task]) -> Answers:
        """Computes tasks; an error for an answer means that the task cost its worker."""
        ...


class SerialPool:
    """This process."""

    def run(self, work: Work, tasks: Iterable[Task]) -> Answers:
        """Computes tasks one after another."""
        for task in tasks:
            yield task, work(task)


class LokyPool:
    """Processes of this machine, by joblib.

    Args:
        jobs: Number of processes; -1 for one a core.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def run(self, work: Work, tasks: Iterable[Task]) -> Answers:
        """Computes tasks; one whose worker died is tried once more, alone in the pool."""
        running: dict[str, Task] = {}
        faults: list[DataError] = []

        def noted() -> Iterator[Task]:
            try:
                for task in tasks:
                    running[task[0][0]] = task
                    yield task
            except DataError as error:  # joblib's own thread asks, where it would be lost
                faults.append(error)

        try:
            with contextlib.closing(self._answers(work, noted())) as answers:
                for task, answer in answers:
                    del running[task[0][0]]
                    yield task, answer
        except BrokenProcessPool:
            # A worker was killed (memory, a crash in native code) and took the pool with it.
            # Alone in a pool, a task that does so can be told from its innocent neighbours.
            for task in running.values():
                yield task, self._alone(work, task)
        if faults:
            raise faults[0]

    def _alone(self, work: Work, task: Task) -> Answer:
        try:
            [(_, answer)] = self._answers(work, [task])
        except BrokenProcessPool as error:
            return error
        return answer

    def _answers(self, work: Work, tasks: Iterable[Task]) -> Any:
        """A generator; of a new Parallel, as late news of a broken pool reaches its old one."""
        from joblib import Parallel, delayed

        singly: dict[str, Any] = {"batch_size": 1, "pre_dispatch": "n_jobs"}
        parallel = Parallel(
            n_jobs=self._jobs, backend="loky", return_as="generator_unordered", **singly
        )
        return parallel(delayed(_answer)(work, task) for task in tasks)


def open_pool(
    backend: str, jobs: int, address: str | None, code: Code
) -> contextlib.AbstractContextManager[Pool]:
    """The pool of a backend, a context manager; a cluster is reached or started.

    Args:
        backend: ``"loky"``, ``"dask"`` or ``"ray"``.
        jobs: Number of worker processes; -1 for one a core. A cluster with an address has
            its own.
        address: Address of a running cluster; None for a cluster on this machine.
        code: The code that the workers of a cluster must have.

    Raises:
        ArgumentError: If the backend is unknown or not installed, or the cluster cannot be
            reached or its workers cannot be used.
    """
    if backend not in BACKENDS:
        raise UnknownNameError("backend", backend, BACKENDS)
    if backend == "dask":
        from benchmarks._dask import dask_pool

        return dask_pool(jobs, address, code)
    if backend == "ray":
        from benchmarks._ray import ray_pool

        return ray_pool(jobs, address, code)
    if address is not None:
        mend = "Use backend='dask' or 'ray', or leave the address out."
        raise ArgumentError("address", repr(address), "None with backend='loky'", mend)
    return contextlib.nullcontext(SerialPool() if jobs == 1 else LokyPool(jobs))


def _answer(work: Work, task: Task) -> tuple[Task, Answer]:
    return task, work(task)
