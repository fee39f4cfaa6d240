"""Other ways to predict a table: Gaussian processes of other packages, trees, and plain baselines.

Each is used as its documentation does first. Inputs of Gaussian processes and of the ridge
regression are standardized by the training rows, BoTorch's scaled to the unit cube; so are the
targets. What predicts a number alone gets a density: a normal whose standard deviation is the root
mean squared error of out-of-fold predictions (five random folds of the training rows).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import gpytorch
import numpy as np
import torch
import typer
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks._options import check_known
from benchmarks.speed.steps import ExactRBF
from benchmarks.tables.scores import Array, normal
from gpclml.errors import ArgumentError
from gpclml.tables import StackedPrediction

Predict = Callable[[Array, Array, Array, int], StackedPrediction]

_FOLDS = 5
_ADAM_STEPS, _ADAM_RATE = 100, 0.1  # of the textbook GP, as in GPyTorch's first example


class Peer(NamedTuple):
    """A way to predict.

    Args:
        about: What it is, for the report.
        predict: Maps training inputs ``(n, d)``, targets ``(n,)``, test inputs ``(m, d)`` and a
            seed to densities of the test rows; of classes and counts a
            :class:`benchmarks.tables.class_methods.Task` to these; of large tables as
            :data:`benchmarks.tables.large_methods.LARGE_METHODS` says.
        package: What has to be installed beside this project's own dependencies, if anything.
    """

    about: str
    predict: Callable[..., Any]
    package: str = ""


def missing(packages: Mapping[str, str]) -> dict[str, str]:
    """Those of the packages that are not installed, by what needs them; "" needs none."""
    return {
        name: package
        for name, package in packages.items()
        if package and importlib.util.find_spec(package) is None
    }


def installed(
    packages: Mapping[str, str], named: Sequence[str] | None, quiet: bool = False
) -> list[str]:
    """Methods that were named; or all, less those whose package is missing, which is said.

    Args:
        packages: What each of all methods needs, as for :func:`missing`.
        named: The names asked for.
        quiet: Whether nothing is said.

    Raises:
        UnknownNameError: No such method.
        ArgumentError: The package of a method that was named is missing.
    """
    check_known("methods", named or (), packages)
    absent = missing({name: packages[name] for name in named or packages})
    if absent and named:
        fix = f"Install {', '.join(absent.values())} first."
        raise ArgumentError("methods", ", ".join(absent), "others", fix)
    for name, package in {} if quiet else absent.items():
        typer.echo(f"{name} is left out: install {package} to have it.", err=True)
    return [name for name in named or packages if name not in absent]


def _mean(x: Array, y: Array, test_x: Array, seed: int) -> StackedPrediction:
    return normal(np.full(len(test_x), y.mean()), y.std(ddof=1))


def _add_residuals(make: Callable[[int], Any]) -> Predict:
    """A regressor's predictions, and the spread of its errors on rows it was not trained on."""

    def predict(x: Array, y: Array, test_x: Array, seed: int) -> StackedPrediction:
        folds = KFold(_FOLDS, shuffle=True, random_state=seed)
        # Residuals of training rows would be far too small.
        out_of_fold = cross_val_predict(make(seed), x, y, cv=folds)
        mean = make(seed).fit(x, y).predict(test_x)
        return normal(mean, np.sqrt(np.mean((y - out_of_fold) ** 2)))

    return predict


def make_catboost(kind: str, seed: int, **options: Any) -> Any:
    """CatBoost's ``"Regressor"`` or ``"Classifier"``, on one thread."""
    import catboost

    quiet = {"thread_count": 1, "verbose": False, "allow_writing_files": False}
    return getattr(catboost, f"CatBoost{kind}")(random_seed=seed, **quiet, **options)


def _lightgbm(seed: int) -> Any:
    from lightgbm import LGBMRegressor

    return LGBMRegressor(random_state=seed, n_jobs=1, verbose=-1)


def _sklearn_gp(x: Array, y: Array, test_x: Array, seed: int) -> StackedPrediction:
    # As in scikit-learn's documentation, with a lengthscale for each input.
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel()
    scaler = StandardScaler().fit(x)
    gp = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    # Of parameters at their bounds.
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        gp.fit(scaler.transform(x), y)
        mean, deviation = cast(Any, gp.predict(scaler.transform(test_x), return_std=True))
    return normal(mean, deviation)


def _botorch(rbf: bool) -> Predict:
    """``SingleTaskGP`` as it comes, or with a Matern kernel under the same priors."""

    def predict(x: Array, y: Array, test_x: Array, seed: int) -> StackedPrediction:
        from botorch.exceptions.warnings import OptimizationWarning
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from botorch.models.transforms import Normalize
        from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior

        d, settings = x.shape[1], gpytorch.settings
        kernel = get_covar_module_with_dim_scaled_prior(ard_num_dims=d, use_rbf_kernel=False)
        with (
            torch.random.fork_rng(devices=[]), warnings.catch_warnings(),
            # What `import botorch` sets, unless a fit of this library came before it.
            settings.fast_computations(False, False, False), settings.cholesky_max_tries(6),
            settings.max_cholesky_size(4096), settings.max_eager_kernel_size(4096),
        ):  # fmt: skip
            torch.manual_seed(seed)  # a fit that fails is tried again from a draw of the priors
            warnings.simplefilter("ignore", OptimizationWarning)
            model = SingleTaskGP(
                torch.tensor(x), torch.tensor(y)[:, None],
                covar_module=None if rbf else kernel, input_transform=Normalize(d),
            )  # fmt: skip
            fit_gpytorch_mll(gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model))
            posterior = model.posterior(torch.tensor(test_x), observation_noise=True)
        mean, variance = posterior.mean[:, 0].detach(), posterior.variance[:, 0].detach()
        return normal(mean.numpy(), variance.sqrt().numpy())

    return predict


def _gpytorch(x: Array, y: Array, test_x: Array, seed: int) -> StackedPrediction:
    # GPyTorch's examples leave scaling to the user.
    inputs, offset, scale = StandardScaler().fit(x), y.mean(), y.std() or 1.0
    train_x, train_y = torch.tensor(inputs.transform(x)), torch.tensor((y - offset) / scale)
    model = ExactRBF(train_x, train_y).double()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    take_adam_steps(mll.train(), train_x, train_y, _ADAM_STEPS, _ADAM_RATE)
    model.eval()
    with torch.no_grad():
        predicted = cast(Any, model.likelihood(model(torch.tensor(inputs.transform(test_x)))))
        mean, deviation = predicted.mean.numpy(), predicted.variance.sqrt().numpy()
    return normal(offset + scale * mean, scale * deviation)


@torch.enable_grad()
def take_adam_steps(mll: Any, x: torch.Tensor, y: torch.Tensor, steps: int, rate: float) -> None:
    """Steps of Adam on an objective of all rows."""
    optimizer = torch.optim.Adam(mll.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        (-mll(mll.model(x), y)).backward()
        optimizer.step()


PEERS: Mapping[str, Peer] = {
    "botorch": Peer("BoTorch's SingleTaskGP, fit_gpytorch_mll", _botorch(rbf=True)),
    "botorch-matern": Peer("the same with a Matern-5/2 kernel", _botorch(rbf=False)),
    "gpytorch": Peer("GPyTorch's ExactGP, RBF with ARD, 100 steps of Adam at .1", _gpytorch),
    "sklearn-gp": Peer("scikit-learn's GP, RBF with ARD and white noise", _sklearn_gp),
    "hist-gb": Peer(
        "scikit-learn's HistGradientBoostingRegressor",
        _add_residuals(lambda seed: HistGradientBoostingRegressor(random_state=seed)),
    ),
    "forest": Peer(
        "scikit-learn's RandomForestRegressor",
        _add_residuals(lambda seed: RandomForestRegressor(random_state=seed)),
    ),
    "catboost": Peer(
        "CatBoostRegressor", _add_residuals(partial(make_catboost, "Regressor")), "catboost"
    ),
    "lightgbm": Peer("LGBMRegressor", _add_residuals(_lightgbm), "lightgbm"),
    "ridge": Peer(
        "scikit-learn's RidgeCV",
        _add_residuals(lambda _: make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13)))),
    ),
    "mean": Peer("mean and standard deviation of the training targets", _mean),
}
"""By name, trees and baselines last."""
