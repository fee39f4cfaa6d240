"""What a comparison says, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from gpclml.evaluation._criteria import (
    CRITERIA,
    Criterion,
    Scores,
    difference_in,
    favourites,
    scored_in,
    value_of,
)
from gpclml.evaluation.differences import ROUNDING
from gpclml.evaluation.findings import Finding
from gpclml.evaluation.words import joined, plus_minus

__all__ = ["sentences"]

_SMALLEST_WEIGHT = 0.005


def sentences(
    scores: Scores,
    rank_by: Criterion,
    weights: Mapping[str, float],
    findings: Sequence[Finding],
) -> tuple[str, ...]:
    """Ranking, agreement, weights, then the texts of the findings."""
    if len(scores) == 1:
        return tuple(finding.text for finding in findings)
    said = [*_ranking(scores, rank_by), *_agreement(scores, findings), *_mixture(scores, weights)]
    return (*said, *(finding.text for finding in findings))


def _ranking(scores: Scores, rank_by: Criterion) -> Iterator[str]:
    first, *others = scored_in(rank_by, scores)
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
