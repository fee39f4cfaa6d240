"""The models that a stack is made of: how each is made, and fitted to its targets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gpytorch.kernels import AdditiveKernel, LinearKernel
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from gpclml.conditioning import LastPoints
from gpclml.errors import UnknownNameError
from gpclml.estimators.warps import Warp, choose_warp
from gpclml.fit import FitWarning, fit_mll, fit_networks
from gpclml.kernels import FeatureKernel, IdentityFeatures
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = [
    "CANDIDATES",
    "DEFAULT_CANDIDATES",
    "Candidate",
    "fit_candidate",
    "ordered_by_cost",
]

# Location and deviation of logarithms, in standardized units. A likelihood alone takes a few dozen
# rows for a function without noise, which costs 11 nats a row on 23 public tables with n = 50. Some
# of them are such functions, though, and their candidates have no priors.
_NOISE = (-1.5, 1.0)
_SCALE = (0.0, 1.0)
_BROAD = (math.sqrt(2), math.sqrt(3))  # BoTorch's (Hvarfner et al. 2024)
_LONG = (1.5, 1.0)
_LINEAR_START = 0.1  # variance of a standardized input's slope, beside a fitted kernel
_NETWORK_STEPS = 300


@dataclass(frozen=True)
class Candidate:
    """A kind of model that a stack may contain, and how it is made.

    Attributes:
        description: What it is, for people who do not know Gaussian processes.
        make: Makes the model of inputs ``(n, d)`` and targets ``(n,)``, at its start; the integer
            is a seed.
        start: Name of the candidate from whose fit it starts, where that is a part of it.
        warped: Whether its targets are transformed, as their likelihood under the fitted candidate
            ``start`` says.
    """

    description: str
    make: Callable[[Tensor, Tensor, int], GPRegression]
    start: str | None = None
    warped: bool = False


def _linear(x: Tensor, y: Tensor, seed: int) -> GPRegression:
    return _with_priors(GPRegression(x, y, FeatureKernel(IdentityFeatures(intercept=True)), "zero"))


def _matern(x: Tensor, y: Tensor, seed: int) -> GPRegression:
    return _with_priors(GPRegression(x, y, "matern"), _LONG)


def _rbf(x: Tensor, y: Tensor, seed: int) -> GPRegression:
    return _with_priors(GPRegression(x, y, "rbf"), _BROAD)


def _rq(x: Tensor, y: Tensor, seed: int) -> GPRegression:
    return GPRegression(x, y, "rq")


def _matern_linear(x: Tensor, y: Tensor, seed: int) -> GPRegression:
    linear = LinearKernel()
    linear.variance = _LINEAR_START
    matern = _with_priors(GPRegression(x, y, "matern"), _BROAD)
    return _with_priors(matern.with_kernel(AdditiveKernel(cast(Any, matern.covar_module), linear)))


def _matern_linear_free(x: Tensor, y: Tensor, seed: int) -> GPRegression:
    linear = LinearKernel()
    matern = GPRegression(x, y, "matern")
    return matern.with_kernel(AdditiveKernel(cast(Any, matern.covar_module), linear))


def _deep(x: Tensor, y: Tensor, seed: int) -> GPRegression:
    return GPRegression(x, y, "deep", seed=seed)  # its training has held-out rows of its own


def _with_priors(
    model: GPRegression, lengthscale: tuple[float, float] | None = None
) -> GPRegression:
    """Gives a model weak priors, beside which those of some hundred rows count.

    Args:
        model: A model of standardized inputs and targets.
        lengthscale: Location and deviation of the logarithm of each lengthscale, in units of the
            root of the number of inputs; then the scale of a named kernel has a prior too.
    """
    like = cast(Any, model.train_inputs)[0]
    noise = cast(Any, model.likelihood).noise_covar
    noise.register_prior("noise_prior", LogNormalPrior(*_NOISE).to(like), "noise")
    if lengthscale is not None:
        scale = cast(Any, model.covar_module)
        location, deviation = lengthscale
        location += 0.5 * math.log(like.shape[-1])
        prior = LogNormalPrior(location, deviation).to(like)
        scale.base_kernel.register_prior("lengthscale_prior", prior, "lengthscale")
        prior = LogNormalPrior(*_SCALE).to(like)
        scale.register_prior("outputscale_prior", prior, "outputscale")
    return model


CANDIDATES: Mapping[str, Candidate] = {
    "linear": Candidate("a linear function of the inputs", _linear),
    "matern": Candidate(
        "a rough function, each input with a length scale of its own, expected to be long", _matern
    ),
    "rbf": Candidate("a smooth function, each input with a length scale of its own", _rbf),
    "rq": Candidate("as rbf, on several length scales at once, without priors", _rq, "rbf"),
    "matern_warped": Candidate(
        "as matern, of transformed targets, where a transform makes them more likely",
        _matern, "matern", warped=True,
    ),
    "matern_linear": Candidate("a linear function and what matern adds", _matern_linear, "matern"),
    "matern_linear_free": Candidate(
        "as matern_linear without priors, for targets with hardly any noise",
        _matern_linear_free, "matern_linear",
    ),
    "deep": Candidate(
        "rbf and features that a network learns, where held-out rows support them", _deep
    ),
}  # fmt: skip
"""All candidates by name, from the cheapest to the most expensive."""

DEFAULT_CANDIDATES = tuple(name for name in CANDIDATES if name != "deep")
"""Those of a stack that is not told which: all but ``"deep"``, which takes far longer."""


def ordered_by_cost(names: Sequence[str]) -> tuple[str, ...]:
    """Candidates from the cheapest to the most expensive; one comes after the one it starts from.

    Raises:
        UnknownNameError: There is no such candidate.
    """
    for name in names:
        if name not in CANDIDATES:
            raise UnknownNameError("candidates", name, CANDIDATES)
    return tuple(name for name in CANDIDATES if name in names)


def fit_candidate(
    name: str,
    x: Tensor,
    y: Tensor,
    fitted: Mapping[str, GPRegression],
    *,
    rows: Tensor | None = None,
    seed: int = 0,
    restarts: int = 0,
    progress: bool | None = None,
) -> tuple[GPRegression, str, Warp | None] | None:
    """Fits a candidate by its marginal likelihood and its priors.

    Args:
        name: Name of the candidate.
        x: Inputs, ``(n, d)``.
        y: Targets, ``(n,)``.
        fitted: The candidates that are fitted already, to the same data.
        rows: Rows by which the hyperparameters are fitted; all if None.
        seed: Seed of restarts and networks.
        restarts: Further starts, of which the best is kept.
        progress: Whether to show a progress bar.

    Returns:
        The model of all rows; a sentence on the fit, empty if nothing is wrong with it; and the
        transform of its targets, if they have one. None for a candidate of transformed targets if
        no transform makes them more likely.

    Raises:
        NonFiniteError, NotPSDError: The likelihood cannot be evaluated at the start.
    """
    kind = CANDIDATES[name]
    warp = None
    if kind.warped:
        assert kind.start is not None
        if kind.start not in fitted:
            made = fit_candidate(kind.start, x, y, {}, rows=rows, seed=seed)
            assert made is not None
            fitted = {kind.start: made[0]}
        warp = choose_warp(fitted[kind.start], y)
        if warp is None:
            return None
        y = warp.forward(y)
    whole = kind.make(x, y, seed)
    model = whole
    if rows is not None:  # of the rows' targets in the units of all
        model = kind.make(x[rows], y[rows], seed)
        for part in ("input_standardizer", "target_standardizer"):
            model.get_submodule(part).load_state_dict(whole.get_submodule(part).state_dict())
        model.set_train_data(targets=cast(Tensor, whole.train_targets)[rows], strict=False)
    if kind.start is not None:
        _start_from(model, fitted.get(kind.start))
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)  # the result has the message
        if name == "deep":
            message = fit_networks(mll, steps=_NETWORK_STEPS, seed=seed, progress=progress).message
        else:
            message = fit_mll(mll, restarts=restarts, seed=seed, progress=progress).message
    if rows is not None:
        whole.load_state_dict(model.state_dict())
    return whole.eval(), message, warp


def _start_from(model: GPRegression, fitted: GPRegression | None) -> None:
    """Starts a model from a fitted part of it, if that was fitted; else where it was made."""
    if fitted is None:
        return
    own, state = model.state_dict(), fitted.state_dict()
    prefix = "covar_module."
    if isinstance(model.covar_module, AdditiveKernel) and not isinstance(
        fitted.covar_module, AdditiveKernel
    ):
        state = {
            key.replace(prefix, f"{prefix}kernels.0.", 1) if key.startswith(prefix) else key: value
            for key, value in state.items()
        }
    shared = {  # of transformed targets the units are others
        key: value for key, value in state.items()
        if key in own and "prior" not in key and "standardizer" not in key
    }  # fmt: skip
    model.load_state_dict(shared, strict=False)
