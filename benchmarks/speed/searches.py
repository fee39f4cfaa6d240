"""Command line: ``python -m benchmarks.speed.searches --n 100``: whole fits by a line search."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, cast

import numpy as np
import pandas as pd
import torch
import typer
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from typer import Option

from benchmarks.speed.peers import jax_log_density, missing_peers, value_and_gradient_by_jax
from benchmarks.speed.runs import Rounds, interleaved_times, ratio_table, sweep_command
from gpclml import StackedGP
from gpclml.conditioning import Conditioning, LastPoints, LeaveOneOut
from gpclml.errors import UnknownNameError
from gpclml.fit import fit_gpytorch_mll_fused, fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = ["BASE", "SEARCHES", "End", "Way", "measure_searches", "search_data"]

Data = tuple[Tensor, Tensor]
End = Callable[[], np.ndarray]
"""The fit's log marginal likelihood a point, noise and lengthscales; NaN of another objective."""
Way = Callable[[Data], Callable[[], Callable[[], End]]]
"""Of data the function that prepares a fit, such as by making a model; it gives the fit."""

BASE = "botorch fit_gpytorch_mll"
_TO_THE_END = {
    "optimizer_kwargs": {
        "options": {"ftol": 1e-14, "gtol": 1e-8, "maxiter": 20_000, "maxfun": 100_000}
    }
}


def measure_searches(
    n: Annotated[int, Option(help="Number of points; may be repeated.")],
    dimensions: Annotated[int, Option(min=1, help="Number of inputs; may be repeated.")] = 8,
    outputs: Annotated[int, Option(min=1, help="Outputs of a model; may be repeated.")] = 1,
    seeds: Annotated[int, Option(min=1, help="Data sets, one after the other.")] = 3,
    rounds: Rounds = 5,
    warm_up: Annotated[bool, Option(help="Fit once before, without counting.")] = True,
    exact: Annotated[bool, Option(help="BoTorch's search goes on to a gradient of 1e-8.")] = False,
    leave_out: Annotated[list[str], Option(help="A way to leave out; may be repeated.")] = [],  # noqa: B006
) -> pd.DataFrame:
    """Fits of BoTorch's ``SingleTaskGP`` with its default priors, on the same data from its start.

    Fits of the log marginal likelihood by BoTorch, with its own optimizer and with ours, by
    ``fit_mll`` (of GPyTorch's objective and of ours) and by a function compiled by JAX, if it is
    installed, of the hyperparameters and of their logarithms, which ``fit_mll`` searches, written
    here or by tinygp, if that is installed; of leave-one-out and of ten folds by ``fit_mll``; and
    by scikit-learn's ``GaussianProcessRegressor``, whose model is the same without the priors and
    which searches logarithms too. All search by SciPy's L-BFGS-B; of several outputs BoTorch
    searches for each on its own, evaluated together, and JAX, tinygp, scikit-learn and the stack
    are left out. Neither making a model nor compilation is counted, but of ``StackedGP`` all: its
    six models, calibration and weights.

    ``worst`` and ``best`` are the log marginal likelihood a point, priors included, above that of
    BoTorch's fit on the data sets where that is least and most; ``apart`` is the largest relative
    difference of a noise variance or a lengthscale. They say whether both found the same optimum
    where the search of BoTorch is ``exact``; by default it stops earlier.
    """
    data = [search_data(n, dimensions, seed, outputs=outputs) for seed in range(seeds)]
    for name in leave_out:
        if name not in SEARCHES or name == BASE:
            raise UnknownNameError("leave_out", name, [way for way in SEARCHES if way != BASE])
    left_out = missing_peers() + ("jax", "tinygp", "scikit-learn", "StackedGP") * (outputs > 1)
    known = {**SEARCHES, BASE: _by_botorch(**(_TO_THE_END if exact else {}))}
    ways = {
        name: make
        for name, make in known.items()
        if not name.startswith(left_out) and name not in leave_out
    }
    ends: dict[str, list[End]] = {}

    def over_seeds(name: str) -> Callable[[], None]:
        prepared = [ways[name](one) for one in data]
        stock = [[prepare() for prepare in prepared] for _ in range(rounds + warm_up)]

        def run() -> None:
            ends[name] = [fit() for fit in stock.pop()]

        return run

    times = interleaved_times({name: over_seeds(name) for name in ways}, rounds, warm_up=warm_up)
    times /= seeds
    found = {name: np.array([end() for end in of_way]) for name, of_way in ends.items()}
    gains = pd.DataFrame({name: one[:, 0] - found[BASE][:, 0] for name, one in found.items()})
    apart = {name: abs(one / found[BASE] - 1)[:, 1:].max() for name, one in found.items()}
    more = {
        "n": n, "dimensions": dimensions, "outputs": outputs, "ms": 1e3 * times.median(),
        "worst": gains.min(), "best": gains.max(), "apart": pd.Series(apart),
    }  # fmt: skip
    return ratio_table(times, BASE, ratio="ratio", name="way", more=more)


def search_data(n: int, dimensions: int, seed: int, device: str = "cpu", outputs: int = 1) -> Data:
    """Inputs on the unit cube, standardized targets ``(n, outputs)``: sums of sines and noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, dimensions, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    y = torch.stack([torch.sin(3 * x[:, :3] + k).sum(-1) for k in range(outputs)], -1) + 0.1 * noise
    return x.to(device), ((y - y.mean(0)) / y.std(0)).to(device)


def _by_botorch(**options: Any) -> Way:
    def prepare(data: Data) -> Callable[[], End]:
        model = SingleTaskGP(*data, outcome_transform=None)
        mll = ExactMarginalLogLikelihood(model.likelihood, model)

        def fit() -> End:
            fit_gpytorch_mll(mll, **options)
            return partial(_end, model)

        return fit

    return lambda data: partial(prepare, data)


def _by_fit_mll(conditioning: Conditioning | None, upstream: bool = False) -> Way:
    def prepare(data: Data) -> Callable[[], End]:
        model = SingleTaskGP(*data, outcome_transform=None)
        kind: Any = ExactMarginalLogLikelihood if upstream else ConditionalMarginalLogLikelihood
        mll = kind(model.likelihood, model, *(() if upstream else (conditioning,)))

        def fit() -> End:
            fit_mll(mll, progress=False)
            compared = upstream or isinstance(conditioning, LastPoints)
            return partial(_end, model) if compared else _no_end

        return fit

    return lambda data: partial(prepare, data)


def _end(model: SingleTaskGP) -> np.ndarray:
    """The log marginal likelihood includes the priors' share and is per point and output."""
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0)).train()
    kernel = cast(Any, model.covar_module)
    with torch.no_grad():
        value = -mll.compute_custom_loss().mean().reshape(1)
        noise, scales = model.likelihood.noise, kernel.lengthscale
        return torch.cat([value, noise.reshape(-1), scales.reshape(-1)]).cpu().numpy()


def _no_end() -> np.ndarray:
    return np.full(1, np.nan)


def _by_sklearn(data: Data) -> Callable[[], Callable[[], End]]:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, WhiteKernel

    x, y = (one.numpy() for one in data)
    kernel = RBF(np.ones(x.shape[1])) + WhiteKernel(0.1)

    def fit() -> End:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            GaussianProcessRegressor(kernel, alpha=0.0).fit(x, y[:, 0])
        return _no_end

    return lambda: fit


def _by_jax(
    data: Data, logarithms: bool = False, tinygp: bool = False
) -> Callable[[], Callable[[], End]]:
    """The model's log marginal likelihood, here or by tinygp, and priors, compiled by JAX."""
    jnp = cast(Any, importlib.import_module("jax.numpy"))
    from scipy.optimize import minimize

    log_density = jax_log_density(data[0].numpy(), data[1].numpy()[:, 0], tinygp)
    n = len(data[1])
    model = SingleTaskGP(*data, outcome_transform=None)
    priors = {name: prior.base_dist for name, _, prior, _, _ in model.named_priors()}
    ((_, of_noise), (_, of_scales)) = sorted(priors.items(), reverse=True)
    if "noise" not in sorted(priors, reverse=True)[0]:
        of_noise, of_scales = of_scales, of_noise
    numbers = [
        (float(one.loc), float(one.scale**2), float(one.scale.log()))
        for one in (of_noise, of_scales)
    ]

    def log_normal(value, loc, variance, log_scale):
        log = jnp.log(value)
        return -((log - loc) ** 2 / (2 * variance) + log + log_scale + 0.5 * np.log(2 * np.pi))

    def loss(theta):
        noise, constant, scales = theta[0], theta[1], theta[2:]
        density = log_density(noise, constant, scales)
        terms = log_normal(noise, *numbers[0]) + log_normal(scales, *numbers[1]).sum()
        return -(density + terms) / n

    def of_logarithms(theta):
        return loss(jnp.exp(theta).at[1].set(theta[1]))

    kernel = cast(Any, model.covar_module)
    start = np.concatenate([
        model.likelihood.noise.detach().numpy(), np.zeros(1),
        kernel.lengthscale.detach().numpy().ravel(),
    ])  # fmt: skip
    least = float(cast(Any, kernel).raw_lengthscale_constraint.lower_bound)
    bounds = [(1e-4, None), (None, None)] + [(least, None)] * data[0].shape[1]
    if logarithms:
        where = [0, *range(2, len(start))]
        start[where] = np.log(start[where])
        bounds = [bounds[1] if i == 1 else (np.log(low), None) for i, (low, _) in enumerate(bounds)]
    function = value_and_gradient_by_jax(of_logarithms if logarithms else loss, start)

    def fit() -> End:
        options = {"maxcor": 30} if logarithms else {}
        found = minimize(
            function, start, jac=True, bounds=bounds, method="L-BFGS-B", options=options
        )
        x = np.exp(found.x) if logarithms else found.x
        return lambda: np.concatenate([[-found.fun], np.delete(x, 1)])

    return lambda: fit


def _by_stack(data: Data) -> Callable[[], Callable[[], End]]:
    x, y = data

    def fit() -> End:
        StackedGP().fit(x, y[:, 0], progress=False)
        return _no_end

    return lambda: fit


SEARCHES: dict[str, Way] = {
    BASE: _by_botorch(),
    "botorch, fit_gpytorch_mll_fused": _by_botorch(optimizer=fit_gpytorch_mll_fused),
    "fit_mll, gpytorch LML": _by_fit_mll(None, upstream=True),
    "fit_mll, LastPoints(m=0)": _by_fit_mll(LastPoints(m=0)),
    "fit_mll, LeaveOneOut()": _by_fit_mll(LeaveOneOut()),
    "fit_mll, KFold(10)": _by_fit_mll(None),
    "StackedGP, all its models": _by_stack,
    "scikit-learn": _by_sklearn,
    "jax": _by_jax,
    "jax, logarithms": partial(_by_jax, logarithms=True),
    "tinygp, logarithms": partial(_by_jax, logarithms=True, tinygp=True),
}
"""Ways of fitting, by name."""

main = sweep_command(
    "benchmarks.speed.searches",
    measure_searches,
    {"outputs": [1], "dimensions": [8], "n": [20, 50, 100, 200, 400, 800]},
    "Whole fits by a line search: BoTorch's, ours, scikit-learn's, and those compiled by JAX.",
    digits=".3g",
)

if __name__ == "__main__":
    typer.run(main)
