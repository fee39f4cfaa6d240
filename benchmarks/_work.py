"""What a worker does with the cells that it is handed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

from benchmarks._allocator import keep_freed_memory
from benchmarks._batches import BatchFunction
from benchmarks._cells import CellFunction, Outcome
from benchmarks._code import Code
from benchmarks._environment import variables
from benchmarks._process import Process
from gpclml.errors import ArgumentError

__all__ = ["Answer", "Answers", "BatchError", "Task", "Work"]

Task = list[tuple[str, str]]
"""Key and configuration (JSON text) of each cell that a worker is handed at once."""


class BatchError(RuntimeError):
    """A batch function failed as a whole; says with what."""


Answer = list[Outcome] | Exception
"""What came of the cells of a task, in order; or the error that ended all of them at once."""

Answers = Generator[tuple[Task, Answer], None, None]
"""Tasks and their answers, as these come."""


@dataclass(frozen=True)
class Work:
    """Computes tasks, in any process.

    Args:
        function: The cell function.
        batch_function: Computes several cells; None if every task is one cell.
        threads: Number of threads for torch and BLAS; what was set before is restored.
        environment: Environment variables set meanwhile, and restored.
        driver: The process that hands out tasks, if a worker on its machine is to end with
            it; None where a cluster looks after its workers.
        code: The driver's code, if a worker may have other code: on a cluster.
    """

    function: CellFunction
    batch_function: BatchFunction | None
    threads: int
    environment: Mapping[str, str]
    driver: Process | None = None
    code: Code | None = None

    def __call__(self, task: Task) -> Answer:
        """Computes a task; its errors are returned.

        Raises:
            OtherCodeError: If this worker has other code than the driver.
        """
        if self.driver is not None:
            _end_with(self.driver)
        if self.code is not None:  # a worker may join a cluster after the others' check
            self.code.check()
        keep_freed_memory()
        if len(task) == 1 or self.batch_function is None:
            return [self._compute_cell(*cell) for cell in task]
        return self._compute_batch(task)

    def _compute_cell(self, key: str, configuration: str) -> Outcome:
        start = time.perf_counter()
        try:
            with self._surroundings():
                start = time.perf_counter()
                metrics = self.function(json.loads(configuration))
        except (Exception, SystemExit) as error:
            return Outcome.failed(key, error, time.perf_counter() - start)
        return Outcome.done(key, metrics, configuration, time.perf_counter() - start)

    def _compute_batch(self, task: Task) -> Answer:
        assert self.batch_function is not None
        try:
            with self._surroundings():
                start = time.perf_counter()
                answers = self.batch_function([json.loads(text) for _, text in task])
                share = (time.perf_counter() - start) / len(task)
                _check_answers(answers, len(task))
        except (Exception, SystemExit) as error:
            return BatchError(f"{type(error).__name__}: {error}")
        return [
            Outcome.failed(key, answer, share)
            if isinstance(answer, Exception)
            else Outcome.done(key, answer, configuration, share)
            for (key, configuration), answer in zip(task, answers, strict=True)
        ]

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        with _threads(self.threads), variables(self.environment):
            yield


def _check_answers(answers: object, count: int) -> None:
    if not isinstance(answers, list) or len(answers) != count:
        got = f"{len(answers)} entries" if isinstance(answers, list) else type(answers).__name__
        mend = "Return metrics or an exception for each cell, in order."
        raise ArgumentError("answers of the batch function", got, f"a list of {count}", mend)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Sets the threads of torch and of the BLAS libraries, and restores them."""
    import threadpoolctl
    import torch

    before = torch.get_num_threads()
    with threadpoolctl.threadpool_limits(count):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _end_with(driver: Process) -> None:
    """Ends this worker when its driver is gone: a killed driver leaves no work behind."""
    if driver.pid == os.getpid():
        return
    if driver.lives() is False:  # this task was still in the queue
        os._exit(1)
    if os.getppid() == driver.pid:
        _watch(driver.pid)


@functools.cache
def _watch(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-driver").start()
