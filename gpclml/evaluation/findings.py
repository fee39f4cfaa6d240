"""Findings of a comparison: named reasons for care, each a sentence with the figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, cast

from gpytorch.kernels import Kernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.models import ExactGP

from gpclml.evaluation.copies import copied_rows
from gpclml.evaluation.model_scores import (
    Criterion,
    ModelScores,
    PairedDifference,
    favourites,
)
from gpclml.inference.posterior import are_constant

__all__ = [
    "Finding",
    "failed_fits",
    "failures_in_words",
    "find_bad_fits",
    "find_in_scores",
    "joined",
    "nats",
    "plus_minus",
]

Scores = Mapping[str, ModelScores]

_CLEAR_LML = 1.0  # nats
_CLEAR_CLML, _CLEAR_LOO = 2.0, 1.0  # standard errors
_FIRST_SHARE, _LARGE_SHARE = 0.1, 1 / 3  # of the points, of the difference
_LARGE_CHANGE, _SMALL_RATIO = 2.0, 0.1  # nats of LML; LOO against LML
_LARGEST_ROUNDING = 0.01
_FEW_POINTS = 100
_SMALL_DIFFERENCE = 4.0  # nats
_BELOW = 0.5  # nats
_MOST_DECIMALS = 4
_SMALLEST = 0.5 * 10**-_MOST_DECIMALS


@dataclass(frozen=True)
class Finding:
    """A reason for care in a comparison.

    Attributes:
        name: Name of the finding; :func:`gpclml.evaluation.compare` says what each means.
        models: Names of the models that it is about.
        text: A sentence with the figures.
    """

    name: str
    models: tuple[str, ...]
    text: str


def find_bad_fits(
    scores: Scores, models: Mapping[str, ExactGP], problems: Mapping[str, str]
) -> Iterator[Finding]:
    """Findings of the data, and of fits that failed, as reported or as seen in the scores."""
    model = cast(Any, next(iter(models.values())))
    y = model.train_targets.detach().cpu().double()
    x = model.train_inputs[0].detach().cpu().double().reshape(len(y), -1)
    observed = ~y.isnan()
    count = int(copied_rows(x[observed].numpy(), y[observed].numpy()).sum())
    if count:
        text = (
            f"{count} of {int(observed.sum())} points are copies of others in inputs and target: "
            "LOO and CLML predict each from its copy, and say less of new points. Leave them out."
        )
        yield Finding("copied-points", tuple(models), text)
    for name, problem in problems.items():
        if problem:
            yield Finding("fit-failed", (name,), f"{name}: {problem}")
    constant = [
        name for name, model in scores.items()
        if are_constant(model.loo_mean.var(correction=0), model.loo_variance.mean())
    ]  # fmt: skip
    if constant:
        text = (
            f"Whatever the inputs, {joined(constant)} predict{'s' if len(constant) == 1 else ''} "
            "the mean: there is nothing to find, or the fit missed it."
        )
        yield Finding("predicts-mean", tuple(constant), text)
    kernels = {name: _structure(model) for name, model in models.items()}
    for (name, kernel), (inner, other) in product(kernels.items(), repeat=2):
        if kernel[:1] != (RQKernel,) or other != (RBFKernel, *kernel[1:]):
            continue
        below = scores[inner].lml - scores[name].lml
        if below > _BELOW and scores[name].value("loo") < scores[inner].value("loo"):
            text = (
                f"{name} is {nats(below)} below {inner} in LML, which it contains as its shape "
                f"grows: its fit missed that. Start it from {inner}."
            )
            yield Finding("below-contained", (name,), text)


def _structure(model: ExactGP) -> tuple[object, ...]:
    """Class of the kernel within a scale, and all that another has to share; else empty."""
    kernel = getattr(model, "covar_module", None)
    base = kernel.base_kernel if isinstance(kernel, ScaleKernel) else None
    if not isinstance(base, Kernel) or base.active_dims is not None:
        return ()
    mean = type(getattr(model, "mean_module", None))
    return type(base), base.ard_num_dims, type(model), mean, type(model.likelihood)


def failed_fits(findings: Iterable[Finding]) -> set[str]:
    """Names of models whose fit failed, which are not ranked."""
    failures = "fit-failed", "below-contained"
    return {name for finding in findings if finding.name in failures for name in finding.models}


def failures_in_words(scores: ModelScores) -> list[str]:
    """What could not be computed for a model, and why: a text for each reason."""
    missing: dict[str, list[str]] = {}
    for name, reason in scores.failures.items():
        missing.setdefault(reason, []).append(name)
    return [f"no {joined(names, 'or')} ({reason.rstrip('.')})" for reason, names in missing.items()]


def find_in_scores(scores: Scores) -> tuple[Finding, ...]:
    """Findings that follow from the scores alone."""
    rules = _not_scored, _disagreement, _first_terms, _prior, _conditioning, _few, _small
    return tuple(finding for rule in rules for finding in rule(scores))


def _not_scored(scores: Scores) -> Iterator[Finding]:
    """Whether a score could not be computed."""
    for name, model in scores.items():
        if model.failures:
            text = f"{name} has {'; '.join(failures_in_words(model))}."
            yield Finding("not-scored", (name,), text)


def _disagreement(scores: Scores) -> Iterator[Finding]:
    """Whether two criteria clearly prefer different models."""
    best = favourites(scores)
    clauses: dict[str, None] = {}
    for first, second in combinations(best, 2):
        a, b = best[first], best[second]
        if a == b:
            continue
        leads = scores[a].difference(scores[b], first), scores[b].difference(scores[a], second)
        if _is_clear(first, leads[0]) and _is_clear(second, leads[1]):
            clauses[f"{first.upper()} prefers {a} to {b} by {plus_minus(leads[0])}"] = None
            clauses[f"{second.upper()} prefers {b} to {a} by {plus_minus(leads[1])}"] = None
    if clauses:
        models = tuple(name for name in scores if name in best.values())
        yield Finding("criteria-disagree", models, "; ".join(clauses) + ".")


def _is_clear(criterion: Criterion, lead: PairedDifference) -> bool:
    if criterion == "lml":
        return lead.value >= _CLEAR_LML
    errors = _CLEAR_CLML if criterion == "clml" else _CLEAR_LOO
    return lead.p_worse < 0.5 and lead.value >= errors * lead.standard_error


def _first_terms(scores: Scores) -> Iterator[Finding]:
    """Whether the first points decide a difference in LML."""
    best = favourites(scores).get("lml")
    if best is None:
        return
    count = scores[best].curves.shape[-1]
    first = max(1, round(_FIRST_SHARE * count))
    shares = {}
    for name, model in scores.items():
        difference = scores[best].lml - model.lml
        if difference < _CLEAR_LML or first == count:
            continue
        gains = (scores[best].curves - model.curves).mean(0)
        share = float(gains[:first].sum()) / difference
        if share >= _LARGE_SHARE:
            less = f"that {name} is below {best} in LML"
            shares[name] = f"{share:.0%} of the {nats(difference)} {less}"
    if shares:
        text = (
            f"{joined(list(shares.values()))} come from the first {first} of {count} points, "
            "before the models have learned much."
        )
        yield Finding("first-terms", tuple(shares), text)


def _prior(scores: Scores) -> Iterator[Finding]:
    """Whether the scale of the prior counts in the LML and not in LOO."""
    changes = {}
    for name, model in scores.items():
        lml = model.wider_lml - model.lml
        loo = float((model.wider_loo - model.loo).sum())
        if abs(lml) >= _LARGE_CHANGE and abs(loo) <= _SMALL_RATIO * abs(lml):
            changes[name] = f"{nats(lml, sign=True)} ({name}; LOO {nats(loo, sign=True)})"
    if changes:
        text = (
            "With twice the prior deviation of the function the LML changes by "
            f"{joined(list(changes.values()))}: differences in LML of that size may be of the "
            "priors, not of what is predicted."
        )
        yield Finding("prior-sensitive", tuple(changes), text)


def _conditioning(scores: Scores) -> Iterator[Finding]:
    """Whether rounding changes scores."""
    numbers = {
        name: f"{model.condition_number:.1e} ({name})"
        for name, model in scores.items()
        if model.rounding >= _LARGEST_ROUNDING
    }
    if numbers:
        text = (
            f"The condition number of the covariance is {joined(list(numbers.values()))}: rounding "
            "may change scores by nats. Use float64, more noise, or fewer near duplicates."
        )
        yield Finding("ill-conditioned", tuple(numbers), text)


def _few(scores: Scores) -> Iterator[Finding]:
    """Whether there are too few points for standard errors."""
    count = len(next(iter(scores.values())).loo)
    if count < _FEW_POINTS:
        text = (
            f"With n = {count}, fewer than {_FEW_POINTS} points, standard errors over points are "
            "mostly too small; the true ones may be twice as large."
        )
        yield Finding("few-points", tuple(scores), text)


def _small(scores: Scores) -> Iterator[Finding]:
    """Whether models are too close to the first one to tell which predicts worse."""
    first, *others = scores
    loo = scores[first].value("loo")
    close = [name for name in others if abs(scores[name].value("loo") - loo) < _SMALL_DIFFERENCE]
    if close:
        text = (
            f"In LOO {joined(close)} {'is' if len(close) == 1 else 'are'} within "
            f"{_SMALL_DIFFERENCE:g} nats of {first}: they predict about equally well, and "
            "probabilities that one is worse (p_worse) are rough."
        )
        yield Finding("small-difference", tuple(close), text)


def nats(value: float, sign: bool = False) -> str:
    """A number of nats as text, to a tenth, or to two digits if it is small."""
    return f"{value:{'+' if sign else ''}.{_decimals(value)}f} nats"


def plus_minus(difference: PairedDifference) -> str:
    """A difference and its error as text, to two digits of the error."""
    error = difference.standard_error
    if math.isnan(error) or error < _SMALLEST:
        return nats(difference.value)
    decimals = _decimals(error)
    return f"{difference.value:.{decimals}f} ± {error:.{decimals}f} nats"


def joined(words: Sequence[str], last: str = "and") -> str:
    """Joins words to a list in a sentence, with another word before the last."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _decimals(value: float) -> int:
    if abs(value) >= 1 or value == 0:
        return 1
    return min(_MOST_DECIMALS, 1 - math.floor(math.log10(abs(value))))
