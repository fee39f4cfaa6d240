"""Small tensors, models and networks of which valid arguments are made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood
from torch import Tensor, nn

from gpclml.curvature import Full
from gpclml.kernels.networks import MLP
from gpclml.laplace import Laplace
from gpclml.meta import DeepKernelTransfer, Episodes, ImageTasks, PeriodicTasks
from gpclml.mlls import ConditionalMarginalLogLikelihood, LaplaceMarginalLogLikelihood
from gpclml.models import BayesianLinearModel, GPClassification, GPRegression, LinearizedNetwork
from gpclml.tables import StackedGP

Arguments = dict[str, Any]
N, D = 8, 2
T = TypeVar("T", Tensor, nn.Module)

_PLACE: ContextVar[tuple[torch.device, torch.dtype]] = ContextVar(
    "place", default=(torch.device("cpu"), torch.float64)
)


@contextlib.contextmanager
def placed(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Has everything below made on a device and of a floating-point type.

    Numbers are drawn on the CPU in double precision all the same, and then moved.
    """
    before = _PLACE.set((device, dtype))
    try:
        yield
    finally:
        _PLACE.reset(before)


def here(value: T) -> T:
    """A tensor or a module, moved to where everything is made; integers stay integers."""
    # A context variable: makers need no argument that says where.
    device, dtype = _PLACE.get()
    if isinstance(value, Tensor) and not value.is_floating_point():
        return value.to(device)
    return value.to(device=device, dtype=dtype)


def generator(seed: int = 0) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return here(torch.randn(*shape, generator=generator(seed), dtype=torch.float64))


def positive(*shape: int) -> Tensor:
    """Numbers between one and two."""
    return here(torch.rand(*shape, generator=generator(), dtype=torch.float64) + 1)


def inputs(n: int = N, d: int = D) -> Tensor:
    """Points, ``(n, d)``."""
    return normal(n, d, seed=1)


def targets() -> Tensor:
    """Targets of :func:`inputs`, ``(n,)``."""
    return inputs()[:, 0].sin() + 0.1 * normal(N, seed=2)


def train(**others: Any) -> Arguments:
    """Points and targets as arguments, beside others."""
    return {"train_x": inputs(), "train_y": targets()} | others


def labels(n: int = N, ways: int = 3) -> Tensor:
    """Classes, every one of them there, ``(n,)``."""
    return here(torch.arange(n) % ways)


def images(*shape: int) -> Tensor:
    """Empty images."""
    return here(torch.zeros(shape, dtype=torch.uint8))


def orders() -> Tensor:
    """Two orders of the points."""
    return here(torch.stack([torch.arange(N), torch.arange(N).flip(0)]))


def gp(kernel: str | Kernel = "rbf") -> GPRegression:
    """A GP of :func:`inputs` and :func:`targets`."""
    return GPRegression(inputs(), targets(), kernel, warm_start=False, hidden=(3,))


def classifier() -> GPClassification:
    """A GP of :func:`inputs` and two classes."""
    return GPClassification(inputs(), labels(ways=2), "rbf")


def stack() -> StackedGP:
    """A stack of one linear model."""
    return StackedGP(("linear",)).fit(inputs(), targets(), progress=False)


def objective(model: Any = None) -> ConditionalMarginalLogLikelihood:
    """The default objective of a model."""
    model = model or gp()
    return ConditionalMarginalLogLikelihood(model.likelihood, model)


def linear_model() -> BayesianLinearModel:
    """A linear model of :func:`inputs` and :func:`targets`."""
    return BayesianLinearModel(inputs(), targets())


def mlp(outputs: int = 1) -> MLP:
    """A network of :func:`inputs`."""
    network = MLP([D, 3, outputs], torch.nn.Tanh, generator=generator(), dtype=torch.float64)
    return here(network)


def classes() -> SoftmaxLikelihood:
    """A likelihood of three classes."""
    return here(SoftmaxLikelihood(num_classes=3, mixing_weights=False))


def laplace(outputs: int = 1) -> LaplaceMarginalLogLikelihood:
    """The Laplace evidence of a network of one output, or of three classes."""
    likelihood = here(GaussianLikelihood()) if outputs == 1 else classes()
    return LaplaceMarginalLogLikelihood(likelihood, LinearizedNetwork(mlp(outputs)), N, Full())


def posterior() -> Laplace:
    """The Laplace posterior of a network of three classes."""
    return Laplace(mlp(3), classes()).fit((inputs(), labels()), progress=False)


def draws() -> dict[str, Tensor]:
    """Twice the weights of a network of three classes."""
    named = mlp(3).named_parameters()
    return {name: p.detach().unsqueeze(0).repeat(2, *[1] * p.ndim) for name, p in named}


def transfer() -> DeepKernelTransfer:
    """Deep kernel transfer of points with one column."""
    network = MLP([1, 3, 2], torch.nn.Tanh, generator=generator())
    return DeepKernelTransfer(network, "rbf").to(_PLACE.get()[0])


def tasks() -> PeriodicTasks:
    """Regression tasks of few points."""
    return PeriodicTasks(3, 4)


def class_tasks() -> tuple[DeepKernelTransfer, ImageTasks]:
    """Classification tasks of small images, and deep kernel transfer of them."""
    network = torch.nn.Sequential(torch.nn.Flatten(), MLP([4, 3, 2], generator=generator()))
    model = DeepKernelTransfer(network, "rbf").to(_PLACE.get()[0])
    images = torch.rand(12, 1, 2, 2, generator=generator())
    labels = torch.arange(3).repeat_interleave(4)
    return model, ImageTasks(images, labels, ways=2, shots=1, queries=2)


def episodes() -> Episodes:
    """Two of :func:`tasks`."""
    return tasks().draw(range(2)).to(_PLACE.get()[0])


def compared() -> Arguments:
    """Two models to be compared."""
    return {"models": {"a": gp(), "b": gp("matern")}, "m": 4, "orderings": orders()}
