"""Curvatures and likelihoods as tensors and numbers, which files hold without pickled objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from torch import Tensor

from gpclml.curvature.blocks import (
    Block,
    BlockCurvature,
    DiagonalCurvature,
    Factors,
    LastSoftmax,
    LowRankCurvature,
    SubnetworkCurvature,
)
from gpclml.curvature.layers import Products
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.curvature.structure import Curvature
from gpclml.errors import UnsupportedError
from gpclml.likelihoods import HeteroscedasticGaussianLikelihood, LogisticLikelihood

_CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        Block, BlockCurvature, DiagonalCurvature, Factors, LastSoftmax, LowRankCurvature, Products,
        SubnetworkCurvature,
    )
}  # fmt: skip
_LIKELIHOODS: dict[str, Any] = {
    "softmax": SoftmaxLikelihood, "bernoulli": BernoulliLikelihood, "gaussian": GaussianLikelihood,
    "gaussians": MultitaskGaussianLikelihood, "student_t": StudentTLikelihood,
    "logistic": LogisticLikelihood, "heteroscedastic": HeteroscedasticGaussianLikelihood,
}  # fmt: skip
_OPTIONS = {  # of the constructors, with the number of classes or outputs
    "softmax": lambda count: {"num_classes": count, "mixing_weights": False},
    "gaussians": lambda count: {"num_tasks": count, "has_global_noise": False},
}


def content_of_curvature(value: Any) -> Any:
    """What :func:`curvature_of_content` makes the curvature, or a part of one, of again."""
    kind = type(value).__name__
    if kind in _CLASSES:
        entries = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"<class>": kind} | content_of_curvature(entries)
    if isinstance(value, Curvature):
        raise UnsupportedError("curvature", kind, "any but FunctionSpace")
    if isinstance(value, Mapping):
        return {name: content_of_curvature(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [content_of_curvature(entry) for entry in value]
    return value.detach() if isinstance(value, Tensor) else value


def curvature_of_content(content: Any) -> Any:
    """The curvature that :func:`content_of_curvature` was given, or a KeyError."""
    if isinstance(content, list):
        return [curvature_of_content(entry) for entry in content]
    if not isinstance(content, Mapping):
        return content
    values = {name: curvature_of_content(entry) for name, entry in content.items()}
    return _CLASSES[values.pop("<class>")](**values) if "<class>" in values else values


def content_of_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """What :func:`likelihood_of_content` makes the likelihood of a network again."""
    output_likelihood(likelihood)  # refuses other classes
    kind = next(name for name, cls in _LIKELIHOODS.items() if isinstance(likelihood, cls))
    count = getattr(likelihood, "num_classes", getattr(likelihood, "num_tasks", 0))
    return {"kind": kind, "classes": count, "state": likelihood.state_dict()}


def likelihood_of_content(content: Mapping[str, Any]) -> Likelihood:
    """The likelihood that :func:`content_of_likelihood` was given, or a KeyError."""
    kind, state = content["kind"], content["state"]
    likelihood = _LIKELIHOODS[kind](**_OPTIONS.get(kind, lambda count: {})(content["classes"]))
    likelihood.to(next(iter(state.values()), torch.zeros(())))
    likelihood.load_state_dict(state)
    return likelihood
