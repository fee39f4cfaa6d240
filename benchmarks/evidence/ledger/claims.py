"""What a paper claims, what came out here, and how the two compare."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata, spearmanr

from benchmarks._tables import mean_and_error
from benchmarks._tables import with_error as with_error  # for the experiments

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
        kind: A ``"claim"`` of a paper about what happens; an ``"identity"`` or theorem, which is
            checked; or our own ``"question"`` about the subject of the paper.
    """

    source: str
    statement: str
    published: str
    ours: str
    verdict: Verdict
    remark: str = ""
    rule: str = ""
    doubt: str = ""
    kind: Literal["claim", "identity", "question"] = "claim"


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
        ready: Called before the first cell of a run; raises DataError if a file is missing.
        items: Tables and figures of the paper that it tries.
        paper: The settings that the paper states, by the source of claims or how it begins;
            without an entry it states none.
        constants: The settings among them that no cell holds since the code fixes them.
        departures: Where it departs from what the paper's text says, in a sentence.
    """

    name: str
    title: str
    grid: Callable[[], Iterable[Mapping[str, Any]]]
    run: Callable[[Mapping[str, Any]], dict[str, Any]]
    claims: Callable[[pandas.DataFrame], Iterable[Claim]]
    draw: Callable[[pandas.DataFrame, Figure], None]
    size: tuple[float, float] = (8.0, 3.2)
    hours: bool = False
    ready: Callable[[], object] = lambda: None
    items: tuple[str, ...] = ()
    paper: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    departures: str = ""

    def cells(self) -> list[dict[str, Any]]:
        """The configurations; each names the experiment."""
        return [{"experiment": self.name, **cell} for cell in self.grid()]

    def differences(self, claim: Claim, cells: pandas.DataFrame) -> list[str] | None:
        """Settings in which cells are not as the paper states for a claim; None if it states none.

        The claim is tried at the paper's size where there are none.
        """
        keys = [source for source in self.paper if claim.source.startswith(source)]
        if not keys:
            return None
        stated = self.paper[max(keys, key=len)]
        differences = []
        for name, value in stated.items():
            here = self.constants[name] if name in self.constants else _setting(cells, name)
            if isinstance(value, AtLeast):
                agrees = bool(np.size(here)) and np.min(here) >= value.least  # in all cells
            else:
                agrees = here == value
            if not agrees:
                words = name.replace("_", " ")
                differences.append(f"{words} {_setting_text(here)} (paper: {_setting_text(value)})")
        return differences


@dataclass(frozen=True)
class AtLeast:
    """A number of repetitions of one measurement, of which more only lessen the error."""

    least: float


def _setting(cells: pandas.DataFrame, name: str) -> Any:
    """What all cells have in a column, or the sorted tuple of what they have."""
    values = cells.get(name, pandas.Series()).dropna()
    distinct = sorted({tuple(value) if isinstance(value, list) else value for value in values})
    return distinct[0] if len(distinct) == 1 else tuple(distinct)


def _setting_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_setting_text, value)) or "none"
    value = value.least if isinstance(value, AtLeast) else value
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def together(claims: Mapping[str, Claim]) -> Claim:
    """One claim that was tried on several data sets: reproduced if it is on each of them.

    Args:
        claims: By what tells them apart; the first has the statement.
    """
    several = list(claims.values())
    rules = dict.fromkeys(claim.rule for claim in several)
    doubts = dict.fromkeys(c.doubt for c in several if c.doubt and c.verdict != "reproduced")
    return replace(
        several[0],
        published="; ".join(dict.fromkeys(claim.published for claim in several)),
        ours="; ".join(f"{on}: {claim.ours} ({claim.verdict})" for on, claim in claims.items()),
        rule="; ".join(f"{on}: {claim.rule}" for on, claim in claims.items())
        if len(rules) > 1 else several[0].rule,
        verdict=graded(
            all(claim.verdict == "reproduced" for claim in several),
            any(claim.verdict != "not" for claim in several),
        ),
        remark="\n\n".join(dict.fromkeys(claim.remark for claim in several if claim.remark)),
        doubt=" ".join(doubts),
    )  # fmt: skip


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


def differs(values: ArrayLike, sign: int) -> bool:
    """Whether the mean of paired differences has a sign, beyond two standard errors."""
    mean, error = mean_and_error(values)
    return sign * mean > 2 * error


def rank_correlations(first: Iterable, second: Iterable) -> NDArray[np.float64]:
    """Spearman's rank correlation of two scores of the same models, for each cell."""
    pairs = zip(first, second, strict=True)
    return np.array([spearmanr(*pair).statistic for pair in pairs])  # type: ignore[attr-defined]


def rank_interval(first: ArrayLike, second: ArrayLike) -> tuple[float, float, float]:
    """Spearman's rank correlation of two scores, and the ends of an interval over models.

    The interval has 95 % of 2000 bootstrap samples of the models, drawn with a fixed seed.
    """
    x, y = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    # Models are drawn with replacement, scores of one model together.
    drawn = np.random.RandomState(0).randint(len(x), size=(2000, len(x)))
    low, high = np.nanquantile(rank_correlation_rows(x[drawn], y[drawn]), (0.025, 0.975))
    return float(rank_correlation_rows(x[None], y[None])[0]), float(low), float(high)


def rank_correlation_rows(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank correlation of each row of one array with that row of the other."""
    ranks = [rankdata(values, axis=1) for values in (x, y)]
    x_ranks, y_ranks = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    with np.errstate(invalid="ignore"):  # samples of one model
        return (x_ranks * y_ranks).sum(1) / np.sqrt((x_ranks**2).sum(1) * (y_ranks**2).sum(1))
