"""One run over a grid: which cells wait, which are under way, what became of the rest."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._batches import Kind, group
from benchmarks._cells import Outcome
from benchmarks._work import Answer, Task
from benchmarks.results import Claim, ResultsStore

__all__ = ["GridSummary", "Sweep"]


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


class Sweep:
    """The state of a run.

    Args:
        store: The results file, opened.
        plan: Configurations as JSON text by key.
        kinds: Kinds of the cells that may be computed together, by key.
        retry_failed: Whether to compute failed cells again.
        bar: A tqdm bar over all cells.
    """

    def __init__(
        self,
        store: ResultsStore,
        plan: Mapping[str, str],
        kinds: Mapping[str, Kind],
        retry_failed: bool,
        bar: Any,
    ) -> None:
        self.summary = GridSummary(store.path, len(plan))
        self._store, self._bar = store, bar
        self._waiting, self._kinds = dict(plan), dict(kinds)
        self._running: dict[str, str] = {}
        self._start = time.perf_counter()
        self._granted = True
        stored = store.stored()
        self._attempts = {key: tries for key, tries in stored.items() if tries is not None}
        for key in plan:
            if key in stored and stored[key] is None:
                self._leave(key, "skipped")
            elif key in stored and not retry_failed:
                self._leave(key, "failed_before")

    def passes(self) -> Iterator[Iterator[Task]]:
        """Passes over the waiting cells, as long as the last one got any of them."""
        while self._waiting and self._granted:
            self._granted = False
            yield self._tasks()

    def settle(self, task: Task, answer: Answer) -> None:
        """Saves what came of a task; the cells of a batch that failed wait to be computed alone."""
        if isinstance(answer, list):
            self._save(answer)
        elif len(task) == 1:
            self._save([Outcome.failed(task[0][0], answer, 0.0)])
        else:
            text = f"A batch of {len(task)} cells failed and is computed cell by cell: {answer}"
            for key, _ in task:
                self._kinds.pop(key)
                self._waiting[key] = self._running.pop(key)
            warnings.warn(text, RuntimeWarning, stacklevel=1)

    def finish(self) -> GridSummary:
        """The summary at the end of the run."""
        self.summary.elsewhere = len(self._waiting)
        self.summary.seconds = time.perf_counter() - self._start
        return self.summary

    def _tasks(self) -> Iterator[Task]:
        """Claims the waiting cells task by task, passing over those held elsewhere."""
        for keys in group(list(self._waiting), self._kinds):
            task = list(self._claim(keys))
            if task:
                yield task

    def _claim(self, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
        answers = self._store.claim_all({key: self._attempts.get(key, 0) for key in keys})
        for key, answer in answers.items():
            if answer is Claim.GRANTED:
                self._granted = True
                self._running[key] = self._waiting.pop(key)
                yield key, self._running[key]
            elif answer is Claim.DONE:
                self._leave(key, "skipped")
            elif answer is Claim.FAILED:
                self._leave(key, "failed_before")

    def _save(self, outcomes: list[Outcome]) -> None:
        left = iter(outcomes)
        try:
            for outcome in left:
                self._save_one(outcome)
        except KeyboardInterrupt:  # these cells have ended, so they are saved first
            for outcome in left:
                self._save_one(outcome)
            raise

    def _save_one(self, outcome: Outcome) -> None:
        configuration = self._running[outcome.key]
        try:
            self._store.record(outcome, configuration)
        except KeyboardInterrupt:
            self._store.record(outcome, configuration)
            raise
        finally:
            del self._running[outcome.key]
            self._count("computed" if outcome.error_type is None else "failed")

    def _leave(self, key: str, fate: str) -> None:
        del self._waiting[key]
        self._count(fate)

    def _count(self, fate: str) -> None:
        setattr(self.summary, fate, getattr(self.summary, fate) + 1)
        failed = self.summary.failed + self.summary.failed_before
        self._bar.set_postfix(failed=failed, refresh=False)
        self._bar.update()
