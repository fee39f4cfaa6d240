"""What a comparison says, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpclml.compare._criteria import CRITERIA, Criterion, Scores, difference_in, favourites
from gpclml.compare._words import joined, plus_minus
from gpclml.compare.differences import ROUNDING
from gpclml.compare.findings import ComparisonWarning

__all__ = ["sentences"]

_SMALLEST_WEIGHT = 0.005


def sentences(
    scores: Scores,
    rank_by: Criterion,
    weights: Mapping[str, float],
    warnings: Sequence[ComparisonWarning],
) -> tuple[str, ...]:
    """Ranking, agreement, weights, then the texts of the warnings."""
    if len(scores) == 1:
        return tuple(warning.text for warning in warnings)
    said = [*_ranking(scores, rank_by), _agreement(scores, warnings), _mixture(scores, weights)]
    return (*said, *(warning.text for warning in warnings))


def _ranking(scores: Scores, rank_by: Criterion) -> Iterator[str]:
    first, second = list(scores)[:2]
    lead = difference_in(rank_by, scores[first], scores[second])
    yield f"{rank_by.upper()} ranks {first} first, {plus_minus(lead)} ahead of {second}."
    in_loo = difference_in("loo", scores[second], scores[first])
    yield (
        f"The probability that {second} predicts worse than {first} is {in_loo.p_worse:.3f}, from "
        "paired differences in LOO."
    )


def _agreement(scores: Scores, warnings: Sequence[ComparisonWarning]) -> str:
    best = favourites(scores)
    if len(set(best.values())) == 1:
        alike = [name for name in scores if _score_the_same(scores, name, best["loo"])]
        if len(alike) == len(scores):
            return "LML, CLML and LOO are the same for all models."
        return f"LML, CLML and LOO all prefer {joined(alike)}."
    by_model = {
        name: joined([criterion.upper() for criterion in CRITERIA if best[criterion] == name])
        for name in dict.fromkeys(best.values())
    }
    parts = [
        f"{criteria} {'prefer' if ' and ' in criteria else 'prefers'} {name}"
        for name, criteria in by_model.items()
    ]
    clear = any(warning.name == "criteria-disagree" for warning in warnings)
    return f"{'; '.join(parts)}{'' if clear else ', none of them clearly'}."


def _mixture(scores: Scores, weights: Mapping[str, float]) -> str:
    shares = {name: weights[name] for name in scores if weights[name] >= _SMALLEST_WEIGHT}
    if len(shares) == 1:
        return f"Stacking gives {next(iter(shares))} all weight: no mixture predicts better."
    parts = [f"{weight:.2f} of {name}" for name, weight in shares.items()]
    return f"The mixture that predicts best in LOO is {joined(parts)}."


def _score_the_same(scores: Scores, name: str, other: str) -> bool:
    differences = [difference_in(one, scores[name], scores[other]) for one in CRITERIA]
    return all(abs(difference.value) < ROUNDING for difference in differences)
