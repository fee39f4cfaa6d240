"""A comparison of models: its table, the scores in it, and sentences about them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.evaluation.findings import (
    Finding,
    failed_fits,
    failures_in_words,
    joined,
    plus_minus,
)
from gpclml.evaluation.model_scores import (
    CRITERIA,
    ROUNDING,
    Criterion,
    Scores,
    difference_in,
    favourites,
    scored_in,
    stacking_weights,
    value_of,
)
from gpclml.inference.units import Units

if TYPE_CHECKING:
    import pandas

__all__ = ["Comparison", "make_table"]

_SMALLEST_WEIGHT = 0.005
# Columns that fit a line of a terminal. Findings and failures are among the sentences.
_PRINTED = ["lml", "clml", "loo", "difference", "difference_se", "p_worse", "weight"]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Scores of models on their training data; it prints as a table with sentences.

    Attributes:
        table: The table of :func:`gpclml.evaluation.compare`.
        scores: All scores of each model, in the order of the ranking.
        findings: Reasons for care.
        models: The models, in the same order.
        targets: Observed targets in the units of the comparison, ``(n,)``.
        rows: Rows of these targets in the training data, ``(n,)``.
        orders: Rows in the order of each ordering, ``(k, n)``.
        m: Number of points that the CLML conditions on.
        rank_by: The criterion by which models are ranked.
        units: Units of the targets.
    """

    table: pandas.DataFrame
    scores: Scores
    findings: tuple[Finding, ...]
    models: Mapping[str, ExactGP]
    targets: Tensor
    rows: Tensor
    orders: Tensor
    m: int
    rank_by: Criterion
    units: Units

    @property
    def sentences(self) -> tuple[str, ...]:
        """The comparison in sentences: ranking, agreement, weights, then each finding."""
        weights = dict(zip(self.table.index, self.table["weight"], strict=True))
        said = [finding.text for finding in self.findings]
        if len(self.scores) == 1:
            return tuple(said)
        failed = failed_fits(self.findings)
        ranked = {name: one for name, one in self.scores.items() if name not in failed}
        return (
            *_ranking(ranked, self.rank_by),
            *(_agreement(ranked, self.findings) if len(ranked) > 1 else ()),
            *_mixture(self.scores, weights),
            *said,
        )

    @property
    def favourites(self) -> Mapping[Criterion, str]:
        """The best model by each criterion; of equal ones the first-ranked."""
        return favourites(self.scores)

    @property
    def pointwise(self) -> pandas.DataFrame:
        """Log densities of points given all others, with a column for each model."""
        import pandas

        columns = {name: scores.loo.numpy() for name, scores in self.scores.items()}
        return pandas.DataFrame(columns, index=pandas.Index(self.rows.numpy(), name="row"))

    def __repr__(self) -> str:
        table = self._shown().to_string(float_format="{:.2f}".format, na_rep="")
        return "\n".join([self._head(), table, *(f"- {sentence}" for sentence in self.sentences)])

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.sentences)
        table = self._shown().to_html(float_format="{:.2f}".format, na_rep="")
        return f"<p>{html.escape(self._head())}</p>{table}<ul>{items}</ul>"

    def _shown(self) -> pandas.DataFrame:
        """The table as it is printed."""
        probabilities = self.table["p_worse"].map("{:.3f}".format, na_action="ignore")
        return self.table[_PRINTED].assign(p_worse=probabilities)

    def _head(self) -> str:
        return (
            f"{len(self.models)} models of {len(self.targets)} targets in {self.units} units, in "
            f"nats; CLML of {len(self.targets) - self.m} points given {self.m}, mean over "
            f"{len(self.orders)} orderings; ranked by {self.rank_by.upper()}"
        )


def make_table(scores: Scores, rank_by: Criterion, findings: Sequence[Finding]) -> pandas.DataFrame:
    """The table, with a row for each model in their order."""
    import pandas

    first = next(iter(scores.values()))
    weights, failed = _weights(scores), failed_fits(findings)
    rows = []
    for rank, (name, model) in enumerate(scores.items()):
        difference = difference_in(rank_by, model, first)
        in_loo = difference_in("loo", model, first)
        rows.append(
            {
                "rank": math.nan if name in failed else rank,
                "lml": model.lml,
                "clml": value_of("clml", model),
                "clml_se": _deviation(model.clml) / math.sqrt(len(model.clml)),
                "loo": value_of("loo", model),
                "loo_se": _deviation(model.loo) * math.sqrt(len(model.loo)),
                "difference": difference.value,
                "difference_se": difference.standard_error,
                "p_worse": in_loo.p_worse if rank else math.nan,
                "weight": weights.get(name, math.nan),
                "findings": tuple(one.name for one in findings if name in one.models),
                "failure": "; ".join(failures_in_words(model)),
            }
        )
    return pandas.DataFrame(rows, index=pandas.Index(list(scores), name="model"))


def _weights(scores: Scores) -> dict[str, float]:
    """Stacking weights of the models that have LOO."""
    names = scored_in("loo", scores)
    if not names:
        return {}
    weights = stacking_weights(torch.stack([scores[name].loo for name in names]))
    return dict(zip(names, weights.tolist(), strict=True))


def _deviation(values: Tensor) -> float:
    return float(values.std()) if len(values) > 1 else math.nan


def _ranking(scores: Scores, rank_by: Criterion) -> Iterator[str]:
    first, *others = scored_in(rank_by, scores) or [""]
    if not first:
        yield "No model is ranked, because each fit failed."
        return
    if not others and len(scores) == 1:
        yield f"{first} is the only model whose fit did not fail."
        return
    if not others:
        yield f"{first} is the only model whose {rank_by.upper()} could be computed."
        return
    second = others[0]
    lead = difference_in(rank_by, scores[first], scores[second])
    yield f"{rank_by.upper()} ranks {first} first, {plus_minus(lead)} ahead of {second}."
    in_loo = difference_in("loo", scores[second], scores[first])
    if math.isnan(in_loo.value):
        return
    yield (
        f"The probability that {second} predicts worse than {first} is {in_loo.p_worse:.3f}, from "
        "paired differences in LOO."
    )


def _agreement(scores: Scores, findings: Sequence[Finding]) -> Iterator[str]:
    best = favourites(scores)
    if len(set(best.values())) == 1:
        alike = [
            name for name in scores if _score_the_same(scores, name, next(iter(best.values())))
        ]
        names = joined([criterion.upper() for criterion in best])
        if len(alike) == len(scores):
            yield f"{names} are the same for all models."
        elif len(best) > 1:
            every = "all" if len(best) == len(CRITERIA) else "both"
            yield f"{names} {every} prefer {joined(alike)}."
        return
    by_model = {
        name: joined([criterion.upper() for criterion in best if best[criterion] == name])
        for name in dict.fromkeys(best.values())
    }
    parts = [
        f"{criteria} {'prefer' if ' and ' in criteria else 'prefers'} {name}"
        for name, criteria in by_model.items()
    ]
    clear = any(finding.name == "criteria-disagree" for finding in findings)
    yield f"{'; '.join(parts)}{'' if clear else ', none of them clearly'}."


def _mixture(scores: Scores, weights: Mapping[str, float]) -> Iterator[str]:
    if len(scored_in("loo", scores)) < 2:
        return
    shares = {name: weights[name] for name in scores if weights[name] >= _SMALLEST_WEIGHT}
    if len(shares) == 1:
        yield f"Stacking gives {next(iter(shares))} all weight: no mixture predicts better."
        return
    parts = [f"{weight:.2f} of {name}" for name, weight in shares.items()]
    yield f"The mixture that predicts best in LOO is {joined(parts)}."


def _score_the_same(scores: Scores, name: str, other: str) -> bool:
    differences = [
        difference_in(one, scores[name], scores[other])
        for one in CRITERIA
        if not math.isnan(value_of(one, scores[other]))
    ]
    return all(abs(difference.value) < ROUNDING for difference in differences)
