"""What a paper claims, what came out here, and how the two compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas
from matplotlib.figure import Figure
from scipy.stats import spearmanr

__all__ = [
    "Claim", "Experiment", "Verdict", "best_place", "differs", "graded", "less", "mean_and_error",
    "rank_correlation", "with_error",
]  # fmt: skip

Verdict = Literal["reproduced", "partly", "not"]


@dataclass(frozen=True)
class Claim:
    """A claim and what became of it.

    Attributes:
        source: Paper and figure.
        statement: What it says, in one sentence.
        published: Its figure.
        ours: What came out, with its error.
        verdict: Whether that is what the paper says.
        remark: What a reader should know beside it.
    """

    source: str
    statement: str
    published: str
    ours: str
    verdict: Verdict
    remark: str = ""


@dataclass(frozen=True)
class Experiment:
    """An experiment of the ledger.

    Attributes:
        name: As the command takes it.
        title: Of its section.
        cells: Gives the configurations; each names the experiment.
        run: Computes one of them; importable.
        claims: Reads the claims off all finished cells.
        draw: Draws them in the manner of the paper.
        size: Of the picture, in inches.
        modules: Dotted names of modules beside that of ``run`` that decide its results.
    """

    name: str
    title: str
    cells: Callable[[], Sequence[Mapping[str, Any]]]
    run: Callable[[Mapping[str, Any]], dict[str, Any]]
    claims: Callable[[pandas.DataFrame], Sequence[Claim]]
    draw: Callable[[pandas.DataFrame, Figure], None]
    size: tuple[float, float] = (8.0, 3.2)
    modules: tuple[str, ...] = ()


def graded(*holds: bool) -> Verdict:
    """Whether all parts of a claim hold, some or none."""
    if all(holds):
        return "reproduced"
    return "partly" if any(holds) else "not"


def with_error(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard error of values, as text."""
    mean, error = mean_and_error(values)
    if math.isinf(error):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of values and its standard error, infinite for a single value."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, math.inf
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def differs(values: Sequence[float], sign: int, errors: float = 2.0) -> bool:
    """Whether the mean of paired differences has a sign, beyond so many standard errors."""
    mean, error = mean_and_error(values)
    return sign * mean > errors * error


def less(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Differences of values that belong together."""
    return [a - b for a, b in zip(first, second, strict=True)]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation of two scores of the same models."""
    return float(spearmanr(first, second).statistic)  # type: ignore[attr-defined]


def best_place(values: Sequence[float]) -> int:
    """Place of the largest value, the first of equal ones."""
    return max(range(len(values)), key=values.__getitem__)
