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


def content_of_curvature(curvature: Curvature) -> dict[str, Any]:
    """What :func:`curvature_of_content` makes the curvature of again."""
    if isinstance(curvature, DiagonalCurvature):
        return {"diagonal": {name: h.detach() for name, h in curvature.diagonal.items()}}
    if isinstance(curvature, DenseCurvature):
        blocks = [
            {"shapes": {name: list(shape) for name, shape in block.shapes.items()},
             "by_samples": block.by_samples, "matrix": block.matrix.detach()}
            for block in curvature.blocks
        ]  # fmt: skip
        return {"blocks": blocks}
    if isinstance(curvature, KroneckerCurvature):
        factors = [
            {**vars(layer), "gradients": layer.gradients.matrix().detach(),
             "inputs": None if layer.inputs is None else layer.inputs.matrix().detach(),
             "shape": list(layer.shape)}
            for layer in curvature.factors
        ]  # fmt: skip
        for layer in factors:
            layer.pop("eigenvalues", None)  # they follow from the factors
        return {"factors": factors, "others": [content_of_curvature(o) for o in curvature.others]}
    expected = "one of Full, BlockDiagonal, Diagonal or Kronecker"
    raise UnsupportedError("curvature", type(curvature).__name__, expected)


def curvature_of_content(content: Mapping[str, Any]) -> Any:
    """The curvature that :func:`content_of_curvature` was given, or a KeyError."""
    if "diagonal" in content:
        return DiagonalCurvature(content["diagonal"])
    if "blocks" in content:
        return DenseCurvature([
            Block({name: torch.Size(shape) for name, shape in block["shapes"].items()},
                  block["by_samples"], block["matrix"])
            for block in content["blocks"]
        ])  # fmt: skip
    factors = [
        Factors(**layer | {
            "gradients": Products(layer["gradients"]), "shape": torch.Size(layer["shape"]),
            "inputs": None if layer["inputs"] is None else Products(layer["inputs"]),
        })
        for layer in content["factors"]
    ]  # fmt: skip
    return KroneckerCurvature(factors, [curvature_of_content(o) for o in content["others"]])


def content_of_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """What :func:`likelihood_of_content` makes the likelihood of a network again."""
    output_likelihood(likelihood)  # refuses other classes
    kind = next(name for name, cls in _LIKELIHOODS.items() if isinstance(likelihood, cls))
    classes = getattr(likelihood, "num_classes", 0)
    return {"kind": kind, "classes": classes, "state": likelihood.state_dict()}


def likelihood_of_content(content: Mapping[str, Any]) -> Likelihood:
    """The likelihood that :func:`content_of_likelihood` was given, or a KeyError."""
    kind, state = _LIKELIHOODS[content["kind"]], content["state"]
    options = {"num_classes": content["classes"], "mixing_weights": False}
    likelihood = kind(**options) if kind is SoftmaxLikelihood else kind()
    likelihood.to(next(iter(state.values()), torch.zeros(())))
    likelihood.load_state_dict(state)
    return likelihood
