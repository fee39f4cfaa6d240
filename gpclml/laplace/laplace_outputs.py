"""Likelihood, hyperparameters and covariances of the outputs of a Laplace posterior."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, SoftmaxLikelihood
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Normal

from gpclml._utils.arguments import callers_level
from gpclml.curvature import output_gradients
from gpclml.curvature.structure import OutputCovariance
from gpclml.fit import FitWarning
from gpclml.laplace.laplace_parts import only_trained
from gpclml.mlls import LaplaceEvidence
from gpclml.mlls.evidence_search import (
    fit_noise_to_residuals,
    maximize_evidence,
    told_of_link,
    told_of_scales,
)

__all__ = ["covariances_of", "joined", "likelihood_of_kind", "search_hyperparameters"]

_NUMBERS = 2**24  # of gradients in memory at a time


def likelihood_of_kind(kind: str, outputs: Tensor) -> Likelihood:
    """The likelihood that ``"classification"`` or ``"regression"`` means for such outputs."""
    if kind == "regression":
        return GaussianLikelihood().to(outputs)
    classes = max(outputs.shape[-1], 2)  # one output is a logit
    return SoftmaxLikelihood(num_classes=classes, mixing_weights=False).to(outputs)


def search_hyperparameters(
    evidence: LaplaceEvidence, precision: float | str, keeps_noise: bool
) -> None:
    """Climbs the evidence, or fits the noise beside a given precision; warns of what is wrong.

    Args:
        evidence: That of all points.
        precision: A number, or a name: then the evidence is climbed.
        keeps_noise: Whether the likelihood came with a noise, which stays beside a number.
    """
    likelihood = cast(Likelihood, evidence.mll.likelihood)
    told = told_of_link(likelihood, *evidence.seen) or told_of_scales(likelihood, *evidence.seen)
    if isinstance(precision, str):
        told = maximize_evidence(evidence) or told
    elif not keeps_noise:
        told = fit_noise_to_residuals(evidence) or told
    if told:
        warnings.warn(told, FitWarning, stacklevel=callers_level())


def covariances_of(
    network: torch.nn.Module,
    names: Sequence[str],
    functions: Sequence[OutputCovariance],
    x: Tensor,
    outputs: int,
) -> list[Tensor]:
    """Covariances of outputs at points, ``(N, C, C)``, by each function of their gradients.

    Args:
        network: The network.
        names: Names of the parameters in the posterior.
        functions: As :meth:`gpclml.curvature.Curvature.output_covariance` returns them.
        x: Points.
        outputs: Number C of outputs.
    """
    chunks = []
    with only_trained(network, names):
        first = output_gradients(network, x[:1], outputs)
        numbers = sum(
            one.numel() if isinstance(one, Tensor) else one.gradients.numel()
            for one in first.values()
        )
        for some in x.split(max(1, _NUMBERS // numbers)):
            gradients = output_gradients(network, some, outputs)
            chunks.append([function(gradients) for function in functions])
    return [torch.cat(of_function) for of_function in zip(*chunks, strict=True)]


def joined(chunks: Sequence[Distribution]) -> Distribution:
    """One distribution of all points."""
    if isinstance(chunks[0], Normal):
        loc, scale = (torch.cat([getattr(one, k) for one in chunks]) for k in ("loc", "scale"))
        return Normal(loc, scale)
    logits = torch.cat([cast(Categorical | Bernoulli, one).logits for one in chunks])
    return cast(Any, type(chunks[0]))(logits=logits)
