"""Small tensors, models and networks that examples are made of."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood
from torch import Tensor

from gpclml.curvature import Full
from gpclml.kernels.networks import MLP
from gpclml.meta import DeepKernelTransfer, PeriodicTasks
from gpclml.mlls import ConditionalMarginalLogLikelihood, LaplaceMarginalLogLikelihood
from gpclml.models import BayesianLinearModel, GPRegression, LinearizedNetwork

__all__ = [
    "classes",
    "classifier",
    "covariance",
    "generator",
    "gp",
    "inputs",
    "labels",
    "linear_model",
    "mlp",
    "normal",
    "objective",
    "positive",
    "regressor",
    "targets",
    "tasks",
    "train",
    "transfer",
]

N, D = 8, 2


def generator(seed: int = 0) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in double precision."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def positive(*shape: int, seed: int = 0) -> Tensor:
    """Numbers between one and two."""
    return torch.rand(*shape, generator=generator(seed), dtype=torch.float64) + 1


def inputs(n: int = N, d: int = D, seed: int = 1) -> Tensor:
    """Points, ``(n, d)``."""
    return normal(n, d, seed=seed)


def targets(n: int = N) -> Tensor:
    """Targets of :func:`inputs`, ``(n,)``."""
    return inputs(n)[:, 0].sin() + 0.1 * normal(n, seed=2)


def labels(n: int = N, ways: int = 3) -> Tensor:
    """Classes, every one of them there, ``(n,)``."""
    return torch.arange(n) % ways


def covariance(n: int = N) -> Tensor:
    """A covariance matrix, ``(n, n)``."""
    root = normal(n, n)
    return root @ root.mT + torch.eye(n, dtype=torch.float64)


def gp(kernel: str = "rbf", **options: object) -> GPRegression:
    """A GP of :func:`inputs` and :func:`targets`."""
    options = {"warm_start": False, "hidden": (3,)} | options
    return GPRegression(inputs(), targets(), kernel, **options)  # type: ignore[arg-type]


def objective(model: GPRegression | None = None) -> ConditionalMarginalLogLikelihood:
    """The default objective of a GP."""
    model = model or gp()
    return ConditionalMarginalLogLikelihood(model.likelihood, model)


def linear_model() -> BayesianLinearModel:
    """A linear model of :func:`inputs` and :func:`targets`."""
    return BayesianLinearModel(inputs(), targets())


def mlp(outputs: int = 1) -> MLP:
    """A network of :func:`inputs`."""
    return MLP([D, 3, outputs], torch.nn.Tanh, generator=generator(), dtype=torch.float64)


def regressor() -> LaplaceMarginalLogLikelihood:
    """The Laplace evidence of a network of one output."""
    likelihood = GaussianLikelihood().double()
    return LaplaceMarginalLogLikelihood(likelihood, LinearizedNetwork(mlp()), N, Full())


def classes() -> gpytorch.likelihoods.Likelihood:
    """A likelihood of three classes."""
    return SoftmaxLikelihood(num_classes=3, mixing_weights=False)


def classifier() -> LaplaceMarginalLogLikelihood:
    """The Laplace evidence of a network of three classes."""
    return LaplaceMarginalLogLikelihood(classes(), LinearizedNetwork(mlp(3)), N, Full())


def transfer() -> DeepKernelTransfer:
    """Deep kernel transfer of points with one column."""
    network = MLP([1, 3, 2], torch.nn.Tanh, generator=generator())
    return DeepKernelTransfer(network, "rbf")


def tasks() -> PeriodicTasks:
    """Regression tasks of few points."""
    return PeriodicTasks(3, 4)


def train(**others: Any) -> dict[str, Any]:
    """Points and targets as arguments, beside others."""
    return {"train_x": inputs(), "train_y": targets()} | others
