"""One cell of any study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.evidence.architectures import run_architecture, run_size
from benchmarks.evidence.bounds import run_estimator
from benchmarks.evidence.online import run_invariance, run_regression, run_search

__all__ = ["SOURCES", "run_cell"]

_FUNCTIONS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, float]]] = {
    "architectures": run_architecture,
    "bounds": run_estimator,
    "invariance": run_invariance,
    "online-regression": run_regression,
    "online-search": run_search,
    "training-speed": run_size,
}

SOURCES = (
    "benchmarks._images", "benchmarks.evidence.architectures", "benchmarks.evidence.bounds",
    "benchmarks.evidence.online", "benchmarks.evidence.training",
)  # fmt: skip
"""The modules beside this one that decide the results of :func:`run_cell`."""


def run_cell(cell: Mapping[str, Any]) -> dict[str, float]:
    """What a network reaches.

    Args:
        cell: Its configuration: ``study``, and what that study's function asks for.

    Returns:
        Scores by name; see the function of the study.
    """
    return _FUNCTIONS[cell["study"]](cell)
