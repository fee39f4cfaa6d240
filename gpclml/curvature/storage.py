"""Curvatures and likelihoods as tensors and numbers, which files hold without pickled objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    SoftmaxLikelihood,
)

from gpclml._utils.arguments import checked
from gpclml.curvature._layers import Products
from gpclml.curvature.dense import Block, DenseCurvature, DiagonalCurvature
from gpclml.curvature.kronecker import Factors, KroneckerCurvature
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.curvature.structure import Curvature
from gpclml.errors import UnsupportedError

__all__ = [
    "content_of_curvature",
    "content_of_likelihood",
    "curvature_of_content",
    "likelihood_of_content",
]

_LIKELIHOODS: dict[str, Any] = {
    "softmax": SoftmaxLikelihood, "bernoulli": BernoulliLikelihood, "gaussian": GaussianLikelihood,
}  # fmt: skip


@checked
def content_of_curvature(curvature: Curvature) -> dict[str, Any]:
    """What :func:`curvature_of_content` makes the curvature of again.

    Args:
        curvature: One of ``Full``, ``BlockDiagonal``, ``Diagonal`` or ``Kronecker``.

    Raises:
        UnsupportedError: It is of another kind.
    """
    if isinstance(curvature, DiagonalCurvature):
        return {"diagonal": {name: h.detach() for name, h in curvature.diagonal.items()}}
    if isinstance(curvature, DenseCurvature):
        blocks = [
            {"shapes": {name: list(shape) for name, shape in one.shapes.items()},
             "by_samples": one.by_samples, "matrix": one.matrix.detach()}
            for one in curvature.blocks
        ]  # fmt: skip
        return {"blocks": blocks}
    if isinstance(curvature, KroneckerCurvature):
        factors = [
            {"weight": one.weight, "bias": one.bias, "gradients": one.gradients.matrix().detach(),
             "inputs": None if one.inputs is None else one.inputs.matrix().detach(),
             "count": one.count, "shape": list(one.shape)}
            for one in curvature.factors
        ]  # fmt: skip
        return {"factors": factors, "others": [content_of_curvature(o) for o in curvature.others]}
    expected = "one of Full, BlockDiagonal, Diagonal or Kronecker"
    raise UnsupportedError("curvature", type(curvature).__name__, expected)


def curvature_of_content(content: Mapping[str, Any]) -> Any:
    """The curvature that :func:`content_of_curvature` was given.

    Args:
        content: What it returned.

    Raises:
        KeyError, TypeError: It is something else.
    """
    if "diagonal" in content:
        return DiagonalCurvature(content["diagonal"])
    if "blocks" in content:
        return DenseCurvature([
            Block({name: torch.Size(shape) for name, shape in one["shapes"].items()},
                  one["by_samples"], one["matrix"])
            for one in content["blocks"]
        ])  # fmt: skip
    factors = [
        Factors(
            one["weight"], one["bias"], Products(one["gradients"]),
            None if one["inputs"] is None else Products(one["inputs"]),
            one["count"], torch.Size(one["shape"]),
        )
        for one in content["factors"]
    ]  # fmt: skip
    return KroneckerCurvature(factors, [curvature_of_content(one) for one in content["others"]])


@checked
def content_of_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """What :func:`likelihood_of_content` makes the likelihood of a network again.

    Args:
        likelihood: ``GaussianLikelihood``, ``SoftmaxLikelihood`` without mixing weights, or
            ``BernoulliLikelihood``.

    Raises:
        UnsupportedError: It is of another class.
    """
    output_likelihood(likelihood)
    kind = next(name for name, one in _LIKELIHOODS.items() if isinstance(likelihood, one))
    classes = getattr(likelihood, "num_classes", 0)
    return {"kind": kind, "classes": classes, "state": likelihood.state_dict()}


def likelihood_of_content(content: Mapping[str, Any]) -> Likelihood:
    """The likelihood that :func:`content_of_likelihood` was given.

    Args:
        content: What it returned.

    Raises:
        KeyError, TypeError, RuntimeError: It is something else.
    """
    kind, state = _LIKELIHOODS[content["kind"]], content["state"]
    options = {"num_classes": content["classes"], "mixing_weights": False}
    made = kind(**options) if kind is SoftmaxLikelihood else kind()
    made.to(next(iter(state.values()), torch.zeros(())))
    made.load_state_dict(state)
    return made
