"""What a paper claims, what came out here, and how the two compare."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata, spearmanr

from benchmarks._tables import mean_and_error, with_error

__all__ = [
    "Claim", "Experiment", "Verdict", "array", "claims_by", "differs", "graded",
    "listed", "mean_and_error", "rank_correlation_rows", "rank_correlations",
    "rank_interval", "with_error",
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
        rule: When it counts as reproduced; parts of it make it partly so.
        doubt: Whose fault it is where it is not reproduced, and what was tried.
        question: Whether it is no claim of the paper but our question about its subject.
        full_size: Whether it is tried at the size at which the paper claims it.
    """

    source: str
    statement: str
    published: str
    ours: str
    verdict: Verdict
    remark: str = ""
    rule: str = ""
    doubt: str = ""
    question: bool = False
    full_size: bool = True


@dataclass(frozen=True)
class Experiment:
    """An experiment of the ledger.

    Attributes:
        name: As the command takes it.
        title: Of its section.
        grid: Gives the configurations, but for the name.
        run: Computes one of them; importable.
        claims: Reads the claims off all finished cells.
        draw: Draws them in the manner of the paper.
        size: Of the picture, in inches.
        hours: Whether it takes hours, so that it runs by its own name only.
    """

    name: str
    title: str
    grid: Callable[[], Iterable[Mapping[str, Any]]]
    run: Callable[[Mapping[str, Any]], dict[str, Any]]
    claims: Callable[[pandas.DataFrame], Sequence[Claim]]
    draw: Callable[[pandas.DataFrame, Figure], None]
    size: tuple[float, float] = (8.0, 3.2)
    hours: bool = False

    def cells(self) -> list[dict[str, Any]]:
        """The configurations; each names the experiment."""
        return [{"experiment": self.name, **cell} for cell in self.grid()]


def claims_by(
    *functions: Callable[[pandas.DataFrame], Claim],
) -> Callable[[pandas.DataFrame], list[Claim]]:
    """Reads each claim off the cells by a function of its own."""
    return lambda cells: [function(cells) for function in functions]


def array(lists: pandas.Series) -> NDArray[np.float64]:
    """Lists of equal length, one a cell, as an array: cells along its first axis."""
    return np.array(lists.tolist(), dtype=float)


def graded(*holds: bool) -> Verdict:
    """Whether all parts of a claim hold, some or none."""
    if all(holds):
        return "reproduced"
    return "partly" if any(holds) else "not"


def listed(lines: Iterable[tuple[Any, ...]], before: str = "") -> tuple[str, Verdict]:
    """What is said of the parts of a claim as one text, and the verdict on all of it.

    Args:
        lines: Of each a text, and whether it holds, once or more often.
        before: Begins the text.
    """
    texts, holds = zip(*((text, several) for text, *several in lines), strict=True)
    return before + "; ".join(texts), graded(*itertools.chain(*holds))


def differs(values: ArrayLike, sign: int, errors: float = 2.0) -> bool:
    """Whether the mean of paired differences has a sign, beyond so many standard errors."""
    mean, error = mean_and_error(values)
    return sign * mean > errors * error


def rank_correlations(first: Iterable, second: Iterable) -> NDArray[np.float64]:
    """Spearman's rank correlation of two scores of the same models, for each cell."""
    pairs = zip(first, second, strict=True)
    return np.array([spearmanr(*pair).statistic for pair in pairs])  # type: ignore[attr-defined]


_RESAMPLED = 2000


def rank_interval(first: ArrayLike, second: ArrayLike) -> tuple[float, float, float]:
    """Spearman's rank correlation of two scores, and the ends of an interval over models.

    The interval has 95 % of 2000 bootstrap samples of the models, drawn with a fixed seed.
    """
    x, y = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    # Models are drawn with replacement, scores of one model together.
    drawn = np.random.RandomState(0).randint(len(x), size=(_RESAMPLED, len(x)))
    low, high = np.nanquantile(rank_correlation_rows(x[drawn], y[drawn]), (0.025, 0.975))
    return float(rank_correlation_rows(x[None], y[None])[0]), float(low), float(high)


def rank_correlation_rows(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank correlation of each row of one array with that row of the other."""
    ranks = [rankdata(values, axis=1) for values in (x, y)]
    x_ranks, y_ranks = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    with np.errstate(invalid="ignore"):  # samples of one model
        return (x_ranks * y_ranks).sum(1) / np.sqrt((x_ranks**2).sum(1) * (y_ranks**2).sum(1))
