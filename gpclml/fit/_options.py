"""What the ways of fitting have in common: optimizers by name, frozen parameters, checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from gpytorch.mlls import MarginalLogLikelihood

from gpclml._optimize import OptimizerFactory
from gpclml._utils.arguments import check_learning_rate
from gpclml.errors import ArgumentError, UnknownNameError, UnsupportedError

__all__ = ["STEPS", "check_step_options", "frozen", "optimizer_factory"]

STEPS = 300
"""Steps of a torch optimizer that are taken if no number is given."""


@contextmanager
def frozen(mll: MarginalLogLikelihood, names: Iterable[str]) -> Iterator[None]:
    """Within the block the parameters of these names or prefixes are not trained."""
    named = dict(mll.named_parameters())
    frozen = []
    for name in names:
        matches = [p for key, p in named.items() if key == name or key.startswith(f"{name}.")]
        if not matches:
            raise UnknownNameError("freeze", name, named)
        frozen += [p for p in matches if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def optimizer_factory(optimizer: str | OptimizerFactory) -> OptimizerFactory | None:
    """The factory; None for the line search."""
    if isinstance(optimizer, type) and not issubclass(optimizer, torch.optim.Optimizer):
        raise UnsupportedError("optimizer", optimizer.__name__, "a class of torch.optim")
    if callable(optimizer):
        return partial(_make_optimizer, optimizer)
    factories = {"lbfgs": None, "adam": torch.optim.Adam}
    if optimizer not in factories:
        raise UnknownNameError("optimizer", optimizer, factories)
    return factories[optimizer]


def _make_optimizer(factory: OptimizerFactory, parameters: Any, lr: float) -> torch.optim.Optimizer:
    name = getattr(factory, "__name__", type(factory).__name__)
    expected = "a class of torch.optim, or a function of parameters and lr that makes one"
    try:
        made = factory(parameters, lr=lr)
    except TypeError as error:
        raise UnsupportedError("optimizer", f"{name} ({error})", expected) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UnsupportedError("optimizer", f"{name}, which made no optimizer", expected)
    return made


def check_step_options(steps: int | None, lr: float) -> None:
    """Raises an ArgumentError if a number of steps or a learning rate is out of range."""
    if steps is not None and steps < 1:
        raise ArgumentError("steps", steps, "at least 1")
    check_learning_rate(lr)
