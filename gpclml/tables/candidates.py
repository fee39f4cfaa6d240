"""The models that a stack is made of: how each is made, fitted and calibrated."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from gpclml._utils.arguments import seeded
from gpclml._utils.environment import progress_bar
from gpclml.conditioning import LastPoints, NearestNeighbors
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.fit import FitWarning, fit_mll, fit_networks
from gpclml.inference.neighbours import count_neighbors
from gpclml.kernels import MLP, DeepKernel, FeatureKernel, PolynomialFeatures
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression, find_networks
from gpclml.tables.components import (
    Calibration,
    Component,
    calibrate,
    leave_one_out_predictions,
    num_hyperparameters,
)
from gpclml.tables.warps import Warp, choose_warp

# Location and deviation of logarithms, in standardized units. A likelihood alone takes a few dozen
# rows for a function without noise, which costs 11 nats a row on 23 public tables with n = 50. Some
# of them are such functions, though, and their candidates have no priors.
_NOISE = (-1.5, 1.0)
_SCALE = (0.0, 1.0)
_BROAD = (math.sqrt(2), math.sqrt(3))  # BoTorch's (Hvarfner et al. 2024)
_LONG = (1.5, 1.0)
_CATEGORY = (0.5, 1.0)  # of a category: two of its levels are correlated by exp(-1 / lengthscale²)
_LINEAR_START = 0.1  # variance of a standardized input's slope, beside a fitted kernel
_NETWORK_STEPS = 300

# Of candidates that are trained given neighbours.
_MOST_NEIGHBORS = 256  # twice as many take predictions eight times as long
_MANY_STEPS, _MANY_NETWORK_STEPS = 300, 1300
_RATE, _NETWORK_RATE, _FINAL_RATE = 0.1, 2e-3, 1e-3
_WIDTHS = (256, 256)
_MOST_FEATURES = 16
_FEATURES_START = 0.4  # variance of a function of features, where that of the inputs has one
_PRECISION = 1e-5  # deviations of a column, up to which float32 may round its values

Groups = Sequence[Sequence[int]]
"""For each category the columns that are its levels."""


@dataclass(frozen=True)
class Candidate:
    """A kind of model that a stack may contain, and how it is made.

    Attributes:
        description: What it is, for people who do not know Gaussian processes.
        make: Makes the untrained model from inputs ``(n, d)``, targets ``(n,)``, a seed, and for
            each category the columns that are its levels.
        start: Name of the candidate from whose fit it starts, if any.
        warped: Whether its targets are transformed, if that makes them more likely under the fitted
            candidate ``start``.
        needs_categories: Whether it is only for tables with categories.
    """

    description: str
    make: Callable[[Tensor, Tensor, int, Groups], GPRegression]
    start: str | None = None
    warped: bool = False
    needs_categories: bool = False


def _linear(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    return _add_priors(GPRegression(x, y, FeatureKernel(PolynomialFeatures(1)), "zero"))


def _matern(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    return _add_priors(GPRegression(x, y, "matern"), _LONG)


def _matern_linear(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    linear = LinearKernel()
    linear.variance = _LINEAR_START
    matern = _add_priors(GPRegression(x, y, "matern"), _BROAD)
    return _add_priors(matern.with_kernel(AdditiveKernel(cast(Any, matern.covar_module), linear)))


def _matern_linear_free(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    matern = GPRegression(x, y, "matern")
    return matern.with_kernel(AdditiveKernel(cast(Any, matern.covar_module), LinearKernel()))


def _categories(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    grouped = {column for group in groups for column in group}
    numbers = [column for column in range(x.shape[-1]) if column not in grouped]
    kernels = [
        _add_lengthscale_prior(RBFKernel(active_dims=tuple(group)), *_CATEGORY) for group in groups
    ]
    if numbers:
        matern = MaternKernel(2.5, ard_num_dims=len(numbers), active_dims=tuple(numbers))
        location = _LONG[0] + 0.5 * math.log(len(numbers))
        kernels.append(_add_lengthscale_prior(matern, location, _LONG[1]))
    scale = ScaleKernel(ProductKernel(*kernels) if len(kernels) > 1 else kernels[0])
    scale.register_prior("outputscale_prior", LogNormalPrior(*_SCALE), "outputscale")
    model = _add_priors(GPRegression(x, y, scale))
    # The levels of a category are all as far from each other, whatever number of rows they have.
    model.input_standardizer.scale[..., sorted(grouped)] = 1.0
    return model


def _many(x: Tensor, y: Tensor, seed: int, groups: Groups, kernel: str) -> GPRegression:
    num_features = min(x.shape[-1], _MOST_FEATURES)
    return GPRegression(x, y, kernel, hidden=_WIDTHS, num_features=num_features, seed=seed)


def _many_deep(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    # The kernel "deep" of few rows starts from a fitted plain one, with features near zero. These
    # rows are enough to learn both together: on pol a nat more, of a row held out.
    d, q = x.shape[-1], min(x.shape[-1], _MOST_FEATURES)
    network = MLP([d, *_WIDTHS, q], torch.nn.SiLU, generator=seeded(seed))
    inputs = MaternKernel(2.5, ard_num_dims=d, active_dims=tuple(range(d)))
    inputs.lengthscale = torch.tensor(math.sqrt(d))
    features = ScaleKernel(RQKernel(active_dims=tuple(range(d, d + q))))
    features.outputscale = _FEATURES_START
    kernel = DeepKernel(network, AdditiveKernel(inputs, features), residual=True)
    return GPRegression(x, y, ScaleKernel(kernel))


def _add_lengthscale_prior(kernel: Kernel, location: float, deviation: float) -> Kernel:
    """Starts lengthscales at the median of their prior."""
    prior = LogNormalPrior(location, deviation)
    kernel.register_prior("lengthscale_prior", prior, "lengthscale")
    cast(Any, kernel).lengthscale = math.exp(location)
    return kernel


def _add_priors(
    model: GPRegression, lengthscale: tuple[float, float] | None = None
) -> GPRegression:
    """Gives a model weak priors, beside which those of some hundred rows count.

    ``lengthscale`` has location and deviation of the logarithm of each lengthscale, in units of the
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
    "rbf": Candidate(
        "a smooth function, each input with a length scale of its own",
        lambda x, y, seed, groups: _add_priors(GPRegression(x, y, "rbf"), _BROAD),
    ),
    "rq": Candidate(
        "as rbf, on several length scales at once, without priors",
        lambda x, y, seed, groups: GPRegression(x, y, "rq"), "rbf",
    ),
    "matern_warped": Candidate(
        "as matern, of transformed targets, where a transform makes them more likely",
        _matern, "matern", warped=True,
    ),
    "matern_linear": Candidate("a linear function and what matern adds", _matern_linear, "matern"),
    "matern_linear_free": Candidate(
        "as matern_linear without priors, for targets with hardly any noise",
        _matern_linear_free, "matern_linear",
    ),
    "categories": Candidate(
        "as matern of the numbers, times how like two levels of each category are", _categories,
        needs_categories=True,
    ),
    "deep": Candidate(  # its training has held-out rows of its own, and no priors
        "rbf and features that a network learns, where held-out rows support them",
        lambda x, y, seed, groups: GPRegression(x, y, "deep", seed=seed),
    ),
}  # fmt: skip
"""All candidates by name, from the cheapest to the most expensive."""

DEFAULT_CANDIDATES = tuple(name for name in CANDIDATES if name != "deep")
"""Those of a stack of few rows that is not told which: all but ``"deep"``. Tables without
categories have no ``"categories"``."""

DEEP_ROWS = 1000
"""Rows from which on ``"deep"`` is one of them.

On four public tables it changed the negative log density of the mixture by at most .004 nats a row
with 500 rows, and by -.60 (kin40k), -.01, .00 and .00 with 1000.
"""


MANY_ROWS_CANDIDATES: Mapping[str, Candidate] = {
    "matern": Candidate(
        "a rough function, each input with a length scale of its own",
        partial(_many, kernel="matern"),
    ),
    "rq": Candidate(
        "a smooth function, on several length scales at once", partial(_many, kernel="rq")
    ),
    "matern_linear_free": Candidate("a linear function and what matern adds", _matern_linear_free),
    "deep_joint": Candidate(
        "matern of the inputs and of features that a network learns, together",
        partial(_many, kernel="deep_joint"),
    ),
    "deep": Candidate(
        "matern of the inputs, and a function of features that a network learns", _many_deep
    ),
}
"""Candidates of a stack of many rows by name, trained and predicted from nearest neighbours; from
the cheapest to the most expensive."""

DEFAULT_MANY_ROWS_CANDIDATES = ("matern", "deep_joint", "deep")
"""Those of a stack of many rows that is not told which."""


def ordered_by_cost(names: Sequence[str]) -> tuple[str, ...]:
    """Candidates from the cheapest to the most expensive; one comes after the one it starts from.

    Raises:
        UnknownNameError: There is no such candidate.
        ArgumentError: The names are not in a list.
    """
    known = {**CANDIDATES, **MANY_ROWS_CANDIDATES}
    for name in (names,) if isinstance(names, str) else names:
        if name not in known:
            raise UnknownNameError("candidates", name, known)
    if isinstance(names, str):
        raise ArgumentError("candidates", repr(names), f"names in a list: [{names!r}]")
    return tuple(name for name in known if name in names)


@dataclass(frozen=True)
class FitOptions:
    """How candidates are fitted.

    ``rows`` are those by which hyperparameters are fitted, all if None. ``held_out`` are those by
    which candidates of many rows are calibrated and weighted; None for few rows, where each row is
    predicted from all others. After so many ``seconds``, at the clock time ``deadline``, no further
    candidate is begun but the ``first``. ``calibrated`` says whether scales and tails are fitted.
    """

    rows: Tensor | None = None
    held_out: Tensor | None = None
    seed: int = 0
    restarts: int = 0
    seconds: float | None = None
    deadline: float = float("inf")
    first: str = ""
    categories: tuple[tuple[int, ...], ...] = ()
    calibrated: bool = True


def _fit_candidate(
    name: str, x: Tensor, y: Tensor, fitted: Mapping[str, GPRegression], options: FitOptions
) -> Component | None:
    """Fits a candidate by its marginal likelihood and its priors, and calibrates it; weight 0.

    It may start from one of ``fitted``, the candidates that are fitted already, to the same data.
    None for a candidate of transformed targets if no transform makes them more likely, and for one
    of categories if there are none.
    """
    if options.held_out is not None:
        return _fit_given_neighbors(name, x, y, options.held_out, options)
    start, candidate = time.perf_counter(), CANDIDATES[name]
    rows, seed, targets, warp = options.rows, options.seed, y, None
    if candidate.needs_categories and not options.categories:
        return None
    if candidate.warped:
        assert candidate.start is not None
        if candidate.start not in fitted:
            first = _fit_candidate(candidate.start, x, y, {}, replace(options, restarts=0))
            assert first is not None
            fitted = {candidate.start: first.model}
        warp = choose_warp(fitted[candidate.start], y)
        if warp is None:
            return None
        targets = _warped(y, warp)
    # Of many rows some have the hyperparameters fitted to them, and all are predicted from.
    whole, model = _models(candidate, x, targets, rows, options)
    if candidate.start is not None and candidate.start in fitted:
        _start_from(model, fitted[candidate.start])
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)  # the result has the message
        if name == "deep":
            note = fit_networks(mll, steps=_NETWORK_STEPS, seed=seed, progress=False).message
        else:
            note = fit_mll(mll, restarts=options.restarts, seed=seed, progress=False).message
    if rows is not None:
        whole.load_state_dict(model.state_dict())
    seconds = time.perf_counter() - start
    calibration, logs, uncalibrated = calibrate(
        leave_one_out_predictions(whole.eval()), y, warp, fitted=options.calibrated,
        hyperparameters=num_hyperparameters(whole),
    )  # fmt: skip
    return Component(name, whole, 0.0, calibration, logs, uncalibrated, note, seconds, warp)


def _models(
    candidate: Candidate, x: Tensor, y: Tensor, rows: Tensor | None, options: FitOptions
) -> tuple[GPRegression, GPRegression]:
    """A model of all rows, and one of these rows in the same units, or the same one."""
    whole = candidate.make(x, y, options.seed, options.categories)
    if rows is None:
        return whole, whole
    model = candidate.make(x[rows], y[rows], options.seed, options.categories)
    for units in ("input_standardizer", "target_standardizer"):
        model.get_submodule(units).load_state_dict(whole.get_submodule(units).state_dict())
    model.set_train_data(targets=cast(Tensor, whole.train_targets)[rows], strict=False)
    return whole, model


def _fit_given_neighbors(
    name: str, x: Tensor, y: Tensor, held_out: Tensor, options: FitOptions
) -> Component:
    """Fits a candidate by densities given neighbours, and calibrates it; weight 0.

    Scale and tails are fitted to rows held out: a network predicts the rows too well that it
    learned its features from. Predictions are conditioned on these rows too.
    """
    start, x, y = time.perf_counter(), *_in_single_precision(x, y)
    if name not in MANY_ROWS_CANDIDATES:
        got = f"{name} of {len(y)} rows"
        raise ArgumentError("candidates", got, f"one of {', '.join(MANY_ROWS_CANDIDATES)}")
    kept = torch.ones(len(y), dtype=torch.bool, device=x.device)
    kept[held_out] = False
    rows = kept.nonzero()[:, 0]
    whole, model = _models(MANY_ROWS_CANDIDATES[name], x, y, rows, options)
    mll = ConditionalMarginalLogLikelihood(
        model.likelihood, model, NearestNeighbors(), seed=options.seed
    )
    steps = _MANY_NETWORK_STEPS if find_networks(model) else _MANY_STEPS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)  # the result has the message
        fit = fit_mll(
            mll, "adam", steps=steps, lr=_RATE, final_lr=_FINAL_RATE, network_lr=_NETWORK_RATE,
            progress=False,
        )  # fmt: skip
    whole.load_state_dict(model.state_dict())
    seconds = time.perf_counter() - start
    neighbors = min(_MOST_NEIGHBORS, count_neighbors(model, "auto", options.seed))
    with torch.no_grad():
        normal = model.predict(x[held_out], neighbors=neighbors)
        predicted = normal.mean, normal.stddev
    calibrated = calibrate(predicted, y[held_out], fitted=options.calibrated)
    return Component(
        name, whole.eval(), 0.0, *calibrated, fit.message, seconds, neighbors=neighbors
    )


def _in_single_precision(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Data in float32, in which networks take half the time, where it tells inputs apart."""
    rounded = x.float()
    error = (x - rounded).abs().amax(0)
    return (rounded, y.float()) if bool((error <= _PRECISION * x.std(0)).all()) else (x, y)


def _warped(y: Tensor, warp: Warp) -> Tensor:
    return torch.from_numpy(warp.forward(y.cpu().double().numpy())).to(y)


def _start_from(model: GPRegression, fitted: GPRegression) -> None:
    """Starts a model where a fitted one ended that it contains."""
    state, prefix = fitted.state_dict(), "covar_module."
    if isinstance(model.covar_module, AdditiveKernel) and not isinstance(
        fitted.covar_module, AdditiveKernel
    ):
        first = f"{prefix}kernels.0."
        state = {
            first + key.removeprefix(prefix) if key.startswith(prefix) else key: value
            for key, value in state.items()
        }
    # Priors and units are those of the model itself.
    known = model.state_dict()
    shared = {  # of transformed targets the units are others
        key: value for key, value in state.items()
        if key in known and "prior" not in key and "standardizer" not in key
    }  # fmt: skip
    model.load_state_dict(shared, strict=False)


_Fits = tuple[dict[str, Component], dict[str, str]]


def fit_candidates(
    names: Sequence[str],
    x: Tensor,
    y: Tensor,
    options: FitOptions,
    *,
    n_jobs: int | None = None,
    progress: bool | None = None,
) -> _Fits:
    """Fits candidates in the order of their names; ``n_jobs`` is as joblib takes it.

    Returns:
        The fitted candidates by name, and why others failed. In neither is a candidate of
        transformed targets if no transform makes them more likely, nor one of categories if there
        are none.
    """
    if options.seconds is not None:
        deadline = time.time() + options.seconds
        options = replace(options, deadline=deadline, first=names[0])
    if n_jobs in (None, 1):
        return _fit_in_turn(names, x, y, options, progress)
    from joblib import Parallel, delayed, effective_n_jobs

    # Each comes into the list of the one that it starts from.
    chains: list[list[str]] = []
    for name in names:
        start = CANDIDATES[name].start if options.held_out is None else None
        chain = next((chain for chain in chains if start in chain), [])
        chains += [] if chain else [chain]
        chain.append(name)
    # Threads of several processes on the same cores would wait for each other.
    threads = max(1, torch.get_num_threads() // min(effective_n_jobs(n_jobs), len(chains)))
    runs: Any = Parallel(n_jobs=n_jobs)(
        delayed(_fit_in_turn)(chain, x, y, options, False, threads) for chain in chains
    )
    components = {name: component for fits, _ in runs for name, component in fits.items()}
    failures = {name: reason for _, failed in runs for name, reason in failed.items()}
    in_order = {name: components[name] for name in names if name in components}
    return in_order, {name: failures[name] for name in names if name in failures}


def _fit_in_turn(
    names: Sequence[str],
    x: Tensor,
    y: Tensor,
    options: FitOptions,
    progress: bool | None,
    threads: int | None = None,
) -> _Fits:
    """Fits candidates one after the other, in another process with so many ``threads``."""
    if threads is not None:
        torch.set_num_threads(threads)
    components: dict[str, Component] = {}
    failures: dict[str, str] = {}
    with progress_bar(names, progress=progress, desc="stack") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            if time.time() >= options.deadline and name != options.first:
                failures[name] = f"the time budget of {options.seconds:g} seconds was spent"
                continue
            models = {other: component.model for other, component in components.items()}
            try:
                component = _fit_candidate(name, x, y, models, options)
            except Exception as error:  # whatever it is, the others are worth having
                failures[name] = f"{type(error).__name__}: {error}"
                continue
            if component is not None:
                components[name] = component
    return components, failures


def stored_component(component: Component) -> dict[str, Any]:
    """A component in tensors and primitives, without its training data."""
    warp = component.warp
    # Its log densities are stored too, so that its scores are what they were.
    return {
        **vars(component), "model": dict(component.model.state_dict()),
        "calibration": list(astuple(component.calibration)),
        "warp": None if warp is None else list(astuple(warp)),
    }  # fmt: skip


def restored_component(
    stored: Mapping[str, Any], x: Tensor, y: Tensor, seed: int, groups: Groups
) -> Component:
    """The component that :func:`stored_component` stored, with its training data."""
    warp = None if stored["warp"] is None else Warp(*stored["warp"])
    targets = y if warp is None else _warped(y, warp)
    candidates = CANDIDATES
    if stored["neighbors"] is not None:
        candidates, (x, targets) = MANY_ROWS_CANDIDATES, _in_single_precision(x, targets)
    # A model with the structure of the candidate, in which all that was trained is replaced.
    model = candidates[stored["name"]].make(x, targets, seed, groups)
    model.load_state_dict(stored["model"])
    model.set_train_data(targets=model.target_standardizer.transform(targets), strict=False)
    calibration = Calibration(*stored["calibration"])
    return Component(**{**stored, "model": model.eval(), "calibration": calibration, "warp": warp})
