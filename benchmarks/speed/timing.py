"""Times of steps taken in turn, and their ratios round by round.

Every round takes each step once, so that whatever slows the machine for a while slows all
methods alike; a ratio is formed within its round only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pandas as pd
import torch

from gpclml.errors import ArgumentError, UnknownNameError

__all__ = ["interleaved_times", "ratios", "rounds_for", "wait_for"]


def rounds_for(n: int) -> int:
    """Number of rounds that keeps a run at n points within minutes, odd for a clear median."""
    return 41 if n <= 500 else 21 if n <= 1000 else 11 if n <= 2000 else 7


def interleaved_times(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str | torch.device = "cpu",
    warm_up: bool = True,
) -> pd.DataFrame:
    """Wall time of every step in every round, in seconds.

    A first round that is not kept warms up allocators and libraries. The order is rotated by
    one each round.

    Args:
        steps: What to run, by name.
        rounds: Number of rounds that are kept, at least 1.
        device: Waited for before the clock is read, where it is a GPU.
        warm_up: Whether there is that first round.

    Returns:
        A row a round, a column a step.

    Raises:
        ArgumentError: If ``rounds`` is below 1.
    """
    if rounds < 1:
        raise ArgumentError("rounds", rounds, "an integer of at least 1")
    names = list(steps)
    for name in names if warm_up else []:
        _seconds(steps[name], device)
    rows = []
    for turn in range(rounds):
        start = turn % len(names)
        times = {name: _seconds(steps[name], device) for name in names[start:] + names[:start]}
        rows.append(times)
    return pd.DataFrame(rows, columns=names)


def _seconds(step: Callable[[], object], device: str | torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device: str | torch.device) -> None:
    """Until all that is queued on a GPU is done.

    Args:
        device: Of any type.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def ratios(times: pd.DataFrame, base: str) -> pd.DataFrame:
    """Each step's time over the base's in the same round: median and quartiles over rounds.

    Args:
        times: From :func:`interleaved_times`.
        base: Name of the step that counts as 1.

    Returns:
        Columns ``median``, ``low`` and ``high`` (the quartiles), a row a step.

    Raises:
        UnknownNameError: If there is no such step.
    """
    if base not in times:
        raise UnknownNameError("base", base, times.columns)
    quantiles = times.div(times[base], axis=0).quantile([0.5, 0.25, 0.75]).T
    return quantiles.set_axis(["median", "low", "high"], axis=1)
