"""Ways to predict classes and counts, those of others used as their documentation does first.

A method maps a :class:`Task`, whose inputs are standardized, to probabilities of class 1, ``(m,)``,
or to densities of counts, which have ``mean``, ``log_prob(y)`` and ``cdf(y)`` of the test rows.
Where it predicts the mean of counts alone they are negative binomial, with the size that fits
out-of-fold predictions (five random folds).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.stats import nbinom
from sklearn import model_selection
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import LogisticRegressionCV, PoissonRegressor

from benchmarks.tables.large_methods import VariationalGP
from benchmarks.tables.peers import Peer
from benchmarks.tables.scores import Array

__all__ = [
    "AVERAGE", "CLASS_METHODS", "CLASS_PEERS", "COUNT_METHODS", "COUNT_PEERS", "MEMBERS",
    "NegativeBinomials", "Task", "fit_size",
]  # fmt: skip

AVERAGE = "average"
MEMBERS = ("matern", "rbf", "rbf-iso", "rq", "rbf+linear")
"""What the average is of."""

_POISSON = 1e7  # a size of negative binomials that is as good as infinite
_ADAM_STEPS, _ADAM_RATE, _MOST_POINTS = 300, 0.05, 200
_FOLDS = 5


class Task(NamedTuple):
    """What a method is given: training rows, inputs of test rows, exposures of both, a seed."""

    x: Array
    y: Array
    test_x: Array
    exposure: Array
    test_exposure: Array
    seed: int


class NegativeBinomials:
    """Of these means, ``(m,)``, and of variances mean + mean² / size."""

    def __init__(self, mean: Array, size: float) -> None:
        self.mean = np.maximum(mean, 1e-10)
        self._law = nbinom(size, size / (size + self.mean))

    def log_prob(self, y: ArrayLike) -> Array:
        """Log probabilities of a count for each row."""
        return self._law.logpmf(y)

    def cdf(self, y: ArrayLike) -> Array:
        """Probabilities of at most that count."""
        return self._law.cdf(y)


def fit_size(y: Array, means: Array) -> float:
    """The size of negative binomials of these means that makes the counts most likely."""

    def loss(log_size: float) -> float:
        return -float(NegativeBinomials(means, math.exp(log_size)).log_prob(y).sum())

    return math.exp(minimize_scalar(loss, bounds=(-5, math.log(_POISSON)), method="bounded").x)


def _base_rate(task: Task) -> Array:
    return np.full(len(task.test_x), task.y.mean())


def _classifier(make: Callable[[Task], Any]) -> Callable[[Task], Array]:
    def predict(task: Task) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # parameters at their bounds
            return make(task).fit(task.x, task.y).predict_proba(task.test_x)[:, 1]

    return predict


def _logistic(task: Task) -> Any:
    return LogisticRegressionCV(
        scoring="neg_log_loss", max_iter=1000, l1_ratios=(0,), use_legacy_attributes=False
    )


def _boosted(task: Task) -> Any:
    return HistGradientBoostingClassifier(random_state=task.seed)


def _catboost(task: Task) -> Any:
    from catboost import CatBoostClassifier

    return CatBoostClassifier(
        random_seed=task.seed, thread_count=1, verbose=False, allow_writing_files=False
    )


def _sklearn_gp(task: Task) -> Any:
    kernel = ConstantKernel() * RBF(np.ones(task.x.shape[1]))
    return GaussianProcessClassifier(kernel, random_state=task.seed)


def _forest(task: Task) -> Array:
    forest = RandomForestClassifier(random_state=task.seed).fit(task.x, task.y)
    # No tree's vote for a class is no proof that it cannot be.
    count = len(forest.estimators_)
    return (count * forest.predict_proba(task.test_x)[:, 1] + 1) / (count + 2)


def _fit_variational(
    inputs: Array, y: Array, likelihood: Any, seed: int, start: tuple[float, float]
) -> Any:
    """GPyTorch's SVGP, its mean and the scale of its kernel started there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x, targets = torch.tensor(inputs), torch.tensor(y)
        model = VariationalGP(x[torch.randperm(len(x))[:_MOST_POINTS]], None, None).double()
        model.mean_module.constant, model.covar_module.outputscale = start
        mll = gpytorch.mlls.VariationalELBO(likelihood.double(), model, num_data=len(x))
        optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], _ADAM_RATE)
        for _ in range(_ADAM_STEPS):
            optimizer.zero_grad()
            (-mll(model(x), targets)).backward()
            optimizer.step()
    return model.eval()


def _variational_classes(task: Task) -> Array:
    likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    model = _fit_variational(task.x, task.y, likelihood, task.seed, (0.0, 1.0))
    with torch.no_grad():
        return likelihood(model(torch.tensor(task.test_x))).mean.numpy()


def _base_counts(task: Task) -> NegativeBinomials:
    rate = task.y.sum() / task.exposure.sum()
    return NegativeBinomials(rate * task.test_exposure, fit_size(task.y, rate * task.exposure))


def _regressor(
    make: Callable[[Task], Any], is_dispersed: bool = True
) -> Callable[[Task], NegativeBinomials]:
    def predict(task: Task) -> NegativeBinomials:
        rates, size = task.y / task.exposure, _POISSON
        weights = {"sample_weight": task.exposure / task.exposure.mean()}
        if is_dispersed:
            folds = model_selection.KFold(_FOLDS, shuffle=True, random_state=task.seed)
            # The spread about the means of training rows would be far too small.
            held_out = model_selection.cross_val_predict(
                make(task), task.x, rates, cv=folds, params=weights
            )
            size = fit_size(task.y, held_out * task.exposure)
        fitted = make(task).fit(task.x, rates, **weights)
        return NegativeBinomials(fitted.predict(task.test_x) * task.test_exposure, size)

    return predict


def _poisson(task: Task) -> Any:
    return model_selection.GridSearchCV(
        PoissonRegressor(max_iter=1000), {"alpha": np.logspace(-4, 1, 6)},
        scoring="neg_mean_poisson_deviance",
    )  # fmt: skip


def _boosted_counts(task: Task) -> Any:
    return HistGradientBoostingRegressor(loss="poisson", random_state=task.seed)


def _negative_binomial(task: Task) -> NegativeBinomials:
    import statsmodels.api as sm
    from statsmodels.tools import sm_exceptions

    model = sm.NegativeBinomial(task.y, sm.add_constant(task.x), exposure=task.exposure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sm_exceptions.ConvergenceWarning)  # scored where it ended
        # Indicators of all levels add to a constant: there is no Hessian to invert.
        fitted = model.fit(method="bfgs", maxiter=1000, disp=False, skip_hessian=True)
    inputs = sm.add_constant(task.test_x, has_constant="add")
    means = fitted.predict(inputs, exposure=task.test_exposure)
    return NegativeBinomials(means, 1 / max(fitted.params[-1], 1 / _POISSON))


CLASS_PEERS: Mapping[str, Peer] = {
    "logistic": Peer("scikit-learn's LogisticRegressionCV, by log loss", _classifier(_logistic)),
    "forest": Peer("scikit-learn's RandomForestClassifier, a vote added to each class", _forest),
    "hist-gb": Peer("scikit-learn's HistGradientBoostingClassifier", _classifier(_boosted)),
    "catboost": Peer("CatBoostClassifier", _classifier(_catboost), "catboost"),
    "sklearn-gp": Peer(
        "scikit-learn's GaussianProcessClassifier, RBF with ARD", _classifier(_sklearn_gp)
    ),
    "gpytorch": Peer(
        f"GPyTorch's SVGP, Matern with ARD, at most {_MOST_POINTS} inducing points, "
        f"{_ADAM_STEPS} steps of Adam at {_ADAM_RATE:g}",
        _variational_classes,
    ),
    "base": Peer("share of class 1 in the training rows", _base_rate),
}
"""Of classes, by name."""

COUNT_PEERS: Mapping[str, Peer] = {
    "poisson": Peer(
        "scikit-learn's PoissonRegressor, penalty by cross-validation", _regressor(_poisson, False)
    ),
    "poisson-nb": Peer("the same means, negative binomial", _regressor(_poisson)),
    "negative-binomial": Peer(
        "statsmodels' NegativeBinomial regression", _negative_binomial, "statsmodels"
    ),
    "hist-gb": Peer(
        "scikit-learn's HistGradientBoostingRegressor, loss of Poisson",
        _regressor(_boosted_counts),
    ),
    "base": Peer("a negative binomial fitted to the training counts", _base_counts),
}
"""Of counts, by name."""

CLASS_METHODS, COUNT_METHODS = CLASS_PEERS, COUNT_PEERS
