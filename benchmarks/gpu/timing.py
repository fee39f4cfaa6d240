"""Steps in turn, as many rounds as a number of seconds has room for, with memory at the peak."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import torch

from benchmarks.gpu.records import FAILED, message_of
from benchmarks.speed.methods import BASE, Problem, gradient_step
from benchmarks.speed.runs import interleaved_times, ratios, wait_for

__all__ = ["timed", "warm_up"]

_MOST_ROUNDS = 31
_LONG = 6.0  # seconds of a first call beyond which warming up is too little of it to be left out


def timed(
    steps: Mapping[str, Callable[[], object]],
    device: str,
    seconds: float,
    *,
    base: str | None = None,
    memory: bool = False,
) -> dict[str, dict[str, Any]]:
    """Times of steps, of which one may fail.

    Each is called to warm up, and once more unless that took long; then all are called in turn for
    as many rounds as the seconds have room for, 31 at most. Where there is room for none, the last
    of the calls before counts.

    Args:
        steps: By name.
        device: What is waited for.
        seconds: That the rounds may take.
        base: The step whose ratio is 1.
        memory: Measure a GPU's memory at the peak of those calls.

    Returns:
        By name: ``ms``, the median; ``ratio`` to the base in the same round, with quartiles
        ``low`` and ``high``; ``rounds``; ``GiB`` beyond what was there before. Or ``error``.
    """
    found: dict[str, dict[str, Any]] = {}
    first: dict[str, float] = {}
    on_gpu = torch.device(device).type == "cuda"
    for name, step in steps.items():
        try:
            for _ in range(2):
                if memory and on_gpu:
                    first[name], peak = _with_peak(step, device)
                    found[name] = {"GiB": peak / 2**30}
                else:
                    first[name] = _seconds(step, device)
                if first[name] > _LONG:
                    break
        except Exception as error:  # out of memory, say: that is what is to be known of it
            first.pop(name, None)
            found[name] = {FAILED: message_of(error)}
        if on_gpu:
            gc.collect()
    if not first:
        return found
    rounds = min(_MOST_ROUNDS, int(seconds / sum(first.values())))
    times = pd.DataFrame([first])
    if rounds:
        running = {name: steps[name] for name in first}
        times = interleaved_times(running, rounds, device, warm_up=False)
    table = ratios(times, base) if base in times else None
    for name in first:
        row = {"ms": 1e3 * float(times[name].median()), "rounds": max(rounds, 1)}
        if table is not None:
            row["ratio"] = float(table.loc[name, "median"])
            row |= {column: float(table.loc[name, column]) for column in ("low", "high")}
        found[name] = row | found.get(name, {})
    return {name: found[name] for name in steps}


def warm_up(device: str) -> None:
    """Has libraries loaded by a small step in either type, so that no first figure has that."""
    for dtype in (torch.float32, torch.float64):
        gradient_step(BASE, Problem(20, dtype, device))()
    wait_for(device)


def _seconds(step: Callable[[], object], device: str) -> float:
    wait_for(device)
    start = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - start


def _with_peak(step: Callable[[], object], device: str) -> tuple[float, int]:
    gc.collect()
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    seconds = _seconds(step, device)
    return seconds, torch.cuda.max_memory_allocated(device) - before
