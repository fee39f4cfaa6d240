"""How a model is trained: with a line search, or stochastically where there is a network."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from linear_operator.utils.warnings import NumericalWarning

from gpclml.early_stopping import fit_networks
from gpclml.errors import UnknownNameError
from gpclml.fit import fit_mll
from gpclml.kernels import DeepKernel
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = ["KERNELS", "MEANS", "noting_failed_fits", "optimizer_for", "train"]

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


def train(
    mll: ConditionalMarginalLogLikelihood,
    optimizer: str,
    steps: int | None,
    lr: float | None,
    seed: int = 0,
) -> tuple[int, str]:
    """Fits the model of an objective in place, without a progress bar.

    A residual deep kernel is trained as far as cross-validation supports
    (:func:`gpclml.early_stopping.fit_networks`), anything else to the end.

    Args:
        mll: The objective; its model is in train mode.
        optimizer: ``"adam"`` or ``"lbfgs"``.
        steps: Number of Adam steps, at most; not used by L-BFGS, which stops by itself.
        lr: Learning rate of Adam; not used by L-BFGS.
        seed: Seed of the folds of cross-validation.

    Returns:
        The number of steps, and why the fit ended early, if it did.
    """
    options = {} if optimizer == "lbfgs" else {"steps": steps, "lr": lr}
    if any(isinstance(module, DeepKernel) and module.residual for module in mll.modules()):
        stopped = fit_networks(mll, seed=seed, progress=False, **options)
        return stopped.steps, "" if stopped.fit is None else stopped.fit.message
    fit = fit_mll(mll, optimizer, progress=False, **options)
    return len(fit.history), fit.message


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
