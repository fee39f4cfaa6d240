"""Tasks on a Ray cluster.

Ray is driven directly: joblib's Ray backend gives nothing before all tasks have ended, and
loses them all with one worker.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from benchmarks._code import Code, unusable_worker
from benchmarks._work import Answers, Task, Work
from gpclml.errors import ArgumentError

__all__ = ["RayPool", "ray_pool"]

CONNECT_SECONDS = 5.0
WORKER_SECONDS = 50.0  # without any core, at the start or in a run, until that is an error
RETRIES = 3


@contextlib.contextmanager
def ray_pool(jobs: int, address: str | None, code: Code) -> Iterator[RayPool]:
    """Connects to a cluster, or starts one on this machine, and checks one of its workers.

    Args:
        jobs: Number of cores of a cluster on this machine; -1 for all.
        address: Address of the head node, or ``"auto"``; None to start a cluster.
        code: The code that the workers must have.

    Raises:
        ArgumentError: If Ray is not installed or in use by this process, the head node does
            not answer, or the workers cannot be used.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        mend = "Install it: pip install ray."
        raise ArgumentError("backend", "'ray'", "the package ray beside it", f"{mend}") from error
    if ray.is_initialized():
        mend = "Call ray.shutdown() first, and name the cluster by its address."
        raise ArgumentError("backend", "'ray', connected already", "Ray not in use", mend)
    try:
        _connect(ray, jobs, address)
        pool = RayPool(ray)
        pool.check(code)
        yield pool
    finally:
        ray.shutdown()


class RayPool:
    """The cores of a Ray cluster; each computes one task at a time.

    Args:
        ray: The module, connected.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._call = ray.remote(num_cpus=1, max_retries=RETRIES)(_call)

    def check(self, code: Code) -> None:
        """Checks a worker; every other checks itself when it gets a task.

        Raises:
            ArgumentError: If it has other code, or there is no core to start one on.
        """
        try:
            checked = self._call.remote(code.check)
            self._first_of([checked])
            self._ray.get(checked)
        except self._ray.exceptions.RayError as error:
            raise unusable_worker("on Ray", getattr(error, "cause", None) or error) from error

    def run(self, work: Work, tasks: Iterable[Task]) -> Answers:
        """Computes tasks; one whose worker died is computed again.

        Raises:
            ArgumentError: If the cluster is lost, has had no core for ``WORKER_SECONDS``, or a
                worker has other code.
        """
        tasks = iter(tasks)
        running: dict[Any, Task] = {}

        def fill() -> None:
            places = max(1, self._cores())
            for task in islice(tasks, max(0, places - len(running))):
                running[self._call.remote(work, task)] = task

        fill()
        while running:
            ended = self._first_of(list(running))
            task, answer = running.pop(ended), self._answer(ended)
            del ended
            yield task, answer
            fill()

    def _cores(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))

    def _first_of(self, calls: list[Any]) -> Any:
        """The first that ends; raises where there has been no core for too long to do so."""
        seen = time.monotonic()
        while True:
            ended, _ = self._ray.wait(calls, timeout=WORKER_SECONDS / 10)
            if ended:
                return ended[0]
            if self._cores():  # they compute, or are busy with another's tasks
                seen = time.monotonic()
            elif time.monotonic() - seen > WORKER_SECONDS:
                raise ArgumentError(
                    "address",
                    f"a Ray cluster without cores for {WORKER_SECONDS:g} s",
                    "at least one",
                    "Start some: ray start --address HEAD. What ended is saved: repeat the call "
                    "then.",
                )

    def _answer(self, ended: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ended)
        except (errors.WorkerCrashedError, errors.OutOfMemoryError) as error:
            return error
        except errors.RayError as error:
            raise unusable_worker("on Ray", getattr(error, "cause", None) or error) from error


def _call(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def _connect(ray: Any, jobs: int, address: str | None) -> None:
    options = {"log_to_driver": False, "logging_level": "warning"}
    if address is None:
        path = os.pathsep.join(filter(None, sys.path))  # as processes of this machine would
        ray.init(
            num_cpus=(os.cpu_count() or 1) if jobs < 0 else jobs, include_dashboard=False,
            runtime_env={"env_vars": {"PYTHONPATH": path}}, **options,
        )  # fmt: skip
        return
    try:
        if address != "auto":  # Ray itself would try for minutes
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        expected = "host:port of a Ray head node, or 'auto'"
        mend = "Start one with `ray start --head` and give the address that it prints."
        raise ArgumentError("address", repr(address), expected, f"{mend} {error}") from error
