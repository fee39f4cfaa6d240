"""How a model is trained: with a line search, or stochastically where there is a network."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.warnings import NumericalWarning

from gpclml.errors import UnknownNameError
from gpclml.fit import fit_mll, fit_networks
from gpclml.kernels import DeepKernel

__all__ = ["KERNELS", "MEANS", "has_fixed_steps", "noting_failed_fits", "optimizer_for", "train"]

_FAILED_FITS = ("The fit stopped", "The warm start failed")

_NETWORK_KERNELS = ("deep", "deep-bottleneck")
KERNELS = (*_NETWORK_KERNELS, "matern", "rbf", "rq", "spectral_mixture")
"""Kernels of the benchmark, by their names in ``GPRegression``."""

_NETWORK_MEANS = ("mlp",)
MEANS = ("constant", *_NETWORK_MEANS, "zero")
"""Means of the benchmark, by their names in ``GPRegression``."""


def optimizer_for(kernel: str, mean: str) -> str:
    """The optimizer of a model: ``"adam"`` with a network in it, ``"lbfgs"`` without one.

    Args:
        kernel: One of ``KERNELS``.
        mean: One of ``MEANS``.

    Raises:
        UnknownNameError: No such kernel or mean.
    """
    if kernel not in KERNELS:
        raise UnknownNameError("kernel", kernel, KERNELS)
    if mean not in MEANS:
        raise UnknownNameError("mean", mean, MEANS)
    return "adam" if kernel in _NETWORK_KERNELS or mean in _NETWORK_MEANS else "lbfgs"


def has_fixed_steps(kernel: str, mean: str) -> bool:
    """Whether the model is trained by the very number of Adam steps that its cell names.

    Args:
        kernel: One of ``KERNELS``; the residual deep kernel chooses its number of steps.
        mean: One of ``MEANS``.
    """
    return optimizer_for(kernel, mean) == "adam" and kernel != "deep"


def train(
    mll: ExactMarginalLogLikelihood,
    optimizer: str,
    steps: int | None,
    lr: float | None,
    seed: int = 0,
    after_step: Callable[[int], None] | None = None,
) -> tuple[int, str]:
    """Fits the model of an objective in place, without a progress bar.

    A residual deep kernel is trained as far as cross-validation supports
    (:func:`gpclml.fit.fit_networks`), anything else to the end.

    Args:
        mll: The objective; its model is in train mode.
        optimizer: ``"adam"`` or ``"lbfgs"``.
        steps: Number of Adam steps, at most; not used by L-BFGS, which stops by itself.
        lr: Learning rate of Adam; not used by L-BFGS.
        seed: Seed of the folds of cross-validation.
        after_step: Called with the number of steps done after each step of a model that
            :func:`has_fixed_steps`; it must leave the model as it is.

    Returns:
        The number of steps, and why the fit ended early, if it did.
    """
    options = {} if optimizer == "lbfgs" else {"steps": steps, "lr": lr}
    if any(isinstance(module, DeepKernel) and module.residual for module in mll.modules()):
        stopped = fit_networks(mll, seed=seed, progress=False, **options)
        return stopped.steps[stopped.chosen], stopped.message
    method = optimizer if after_step is None else _watched_adam(after_step)
    fit = fit_mll(mll, method, progress=False, **options)
    return len(fit.history), fit.message


def _watched_adam(after_step: Callable[[int], None]) -> Callable[..., torch.optim.Optimizer]:
    """Adam that tells the number of its steps after each of them."""

    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        count = itertools.count(1)
        adam = torch.optim.Adam(parameters, lr=lr)
        adam.register_step_post_hook(lambda *_: after_step(next(count)))
        return adam

    return make


@contextmanager
def noting_failed_fits() -> Iterator[list[str]]:
    """Within the block, fits that gave up are noted in the list instead of being warned of.

    Notes of jitter are dropped: a line search that tries extreme values brings hundreds.
    Other warnings are given as usual, at the end of the block.
    """
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    for warning in caught:
        text = str(warning.message)
        if text.startswith(_FAILED_FITS):
            notes.append(text)
        elif not issubclass(warning.category, NumericalWarning):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
