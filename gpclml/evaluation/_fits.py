"""What in a comparison says that a fit failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from gpytorch.kernels import Kernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.models import ExactGP

from gpclml.errors import UnknownNameError
from gpclml.evaluation._criteria import Scores, value_of
from gpclml.evaluation.findings import Finding
from gpclml.evaluation.model_scores import ModelScores
from gpclml.evaluation.words import joined, nats
from gpclml.inference.predictive import are_constant

__all__ = ["fit_findings"]

_BELOW = 0.5  # nats


def fit_findings(
    scores: Scores, models: Mapping[str, ExactGP], problems: Mapping[str, str]
) -> Iterator[Finding]:
    """Warnings of fits that failed, told or seen in the scores.

    Args:
        scores: Of the models.
        models: The models.
        problems: What is known to be wrong with fits, by name; empty where nothing is.

    Raises:
        UnknownNameError: A problem is of no model.
    """
    for name, problem in problems.items():
        if name not in scores:
            raise UnknownNameError("problems", name, scores)
        if problem:
            yield Finding("fit-failed", (name,), f"{name}: {problem}")
    constant = [name for name, model in scores.items() if _is_constant(model)]
    if constant:
        text = (
            f"Whatever the inputs, {joined(constant)} predict{'s' if len(constant) == 1 else ''} "
            "the mean: there is nothing to find, or the fit missed it."
        )
        yield Finding("predicts-mean", tuple(constant), text)
    for name, inner in _contained(models):
        below = scores[inner].lml - scores[name].lml
        worse = value_of("loo", scores[name]) < value_of("loo", scores[inner])
        if below > _BELOW and worse:
            text = (
                f"{name} is {nats(below)} below {inner} in LML, which it contains as its shape "
                f"grows: its fit missed that. Start it from {inner}."
            )
            yield Finding("below-contained", (name,), text)


def _is_constant(model: ModelScores) -> bool:
    return bool(are_constant(model.loo_mean.var(correction=0), model.loo_variance.mean()))


def _contained(models: Mapping[str, ExactGP]) -> Iterator[tuple[str, str]]:
    """Rational quadratic kernels, and the RBF kernels of the same build that they contain."""
    bases = {name: _base(model) for name, model in models.items()}
    for name, base in bases.items():
        if not isinstance(base, RQKernel):
            continue
        for inner, other in bases.items():
            alike = isinstance(other, RBFKernel) and other.ard_num_dims == base.ard_num_dims
            if alike and _same_parts(models[name], models[inner]):
                yield name, inner


def _base(model: ExactGP) -> torch.nn.Module | None:
    kernel = getattr(model, "covar_module", None)
    base = kernel.base_kernel if isinstance(kernel, ScaleKernel) else None
    plain = isinstance(base, Kernel) and base.active_dims is None
    return base if plain and type(base) in (RBFKernel, RQKernel) else None


def _same_parts(one: ExactGP, other: ExactGP) -> bool:
    parts = [
        (type(model), type(getattr(model, "mean_module", None)), type(model.likelihood))
        for model in (one, other)
    ]
    return parts[0] == parts[1]
