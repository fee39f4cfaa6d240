"""Ways to predict classes and counts, those of others used as their documentation does first.

A method maps a :class:`Task`, whose inputs are standardized, to probabilities of class 1, ``(m,)``
or one for all rows; of more classes to those of each, ``(m, classes)``; or to densities of counts,
which have ``mean``, ``log_prob(y)`` and ``cdf(y)`` of the test rows. Where it predicts the mean of
counts alone they are negative binomial, with the size that fits out-of-fold predictions (five
random folds).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import LinearKernel
from gpytorch.priors import LogNormalPrior
from numpy.typing import ArrayLike
from scipy.stats import nbinom
from sklearn import ensemble, gaussian_process, linear_model, model_selection
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from benchmarks.tables.large_methods import VariationalGP
from benchmarks.tables.peers import Peer, make_catboost, take_adam_steps
from benchmarks.tables.scores import Array
from gpclml import (
    Classifier,
    ConditionalMarginalLogLikelihood,
    KFold,
    LastPoints,
    Regressor,
    fit_mll,
)
from gpclml.conditioning import Conditioning
from gpclml.likelihoods import (
    LogisticLikelihood,
    LogPoissonLikelihood,
    TargetMixture,
    TargetPrediction,
)
from gpclml.models import GPClassification, GPCounts, LatentGP
from gpclml.tables.methods import fitted_size

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


def _classifier(make: Callable[[Task], Any]) -> Callable[[Task], Array]:
    def predict(task: Task) -> Array:
        # Of parameters at their bounds.
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
            fitted = make(task).fit(task.x, task.y)
        return _class_columns(fitted.classes_, fitted.predict_proba(task.test_x))

    return predict


def _class_columns(labels: ArrayLike, probabilities: Array) -> Array:
    """Those of class 1 of two; else of each, 0 for one that no training row has."""
    columns = np.asarray(labels).astype(int)
    every = np.zeros((len(probabilities), columns.max() + 1))
    every[:, columns] = probabilities
    return every[:, 1] if every.shape[1] == 2 else every


def _sklearn_gp(task: Task) -> Any:
    kernel = ConstantKernel() * RBF(np.ones(task.x.shape[1]))
    return gaussian_process.GaussianProcessClassifier(kernel, random_state=task.seed)


def _shares(task: Task) -> Array:
    shares = np.bincount(task.y.astype(int)) / len(task.y)
    return _class_columns(range(len(shares)), np.tile(shares, (len(task.test_x), 1)))


def _forest(task: Task) -> Array:
    forest = ensemble.RandomForestClassifier(random_state=task.seed).fit(task.x, task.y)
    # No tree's vote for a class is no proof that it cannot be.
    votes = len(forest.estimators_) * forest.predict_proba(task.test_x) + 1
    return _class_columns(forest.classes_, votes / votes.sum(1, keepdims=True))


def fit_variational(
    inputs: Array, y: Array, likelihood: Any, seed: int, start: Any = (0.0, 1.0), classes: int = 0
) -> Any:
    """GPyTorch's SVGP, its mean and the scale of its kernel started there."""
    torch.manual_seed(seed)
    x = torch.tensor(inputs)
    points = x[torch.randperm(len(x))[:_MOST_POINTS]]
    model = VariationalGP(points, classes=classes).double()
    model.mean_module.constant, model.covar_module.outputscale = start
    mll = gpytorch.mlls.VariationalELBO(likelihood.double(), model, num_data=len(x))
    take_adam_steps(mll, x, torch.tensor(y), _ADAM_STEPS, _ADAM_RATE)
    return model.eval()


def _variational_classes(task: Task) -> Array:
    labels, y = np.unique(task.y, return_inverse=True)
    samples = gpytorch.settings.num_likelihood_samples(100)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), samples:
        if task.y.max() > 1:
            count = len(labels)
            likelihood = gpytorch.likelihoods.SoftmaxLikelihood(count, count, mixing_weights=False)
            model = fit_variational(task.x, y, likelihood, task.seed, classes=count)
            probabilities = likelihood(model(torch.tensor(task.test_x))).probs.mean(0)
            return _class_columns(labels, probabilities.numpy())
        likelihood = gpytorch.likelihoods.BernoulliLikelihood()
        model = fit_variational(task.x, task.y, likelihood, task.seed)
        return likelihood(model(torch.tensor(task.test_x))).mean.numpy()


def _exposure_columns(task: Task) -> tuple[Array, Array]:
    """Inputs of training and test rows, the logarithms of exposures the last of them."""
    logs = [np.log(e / task.exposure.mean()) for e in (task.exposure, task.test_exposure)]
    x, test_x = (np.column_stack(pair) for pair in zip((task.x, task.test_x), logs, strict=True))
    return x, test_x


def _count_regressor(task: Task) -> Any:
    has_exposure = np.ptp(task.exposure) > 0  # of which it has none
    x, test_x = _exposure_columns(task) if has_exposure else (task.x, task.test_x)
    regressor = Regressor(counts=True, random_state=task.seed).fit(x, task.y)
    return regressor.predict_distribution(test_x)


def _variational_counts(task: Task) -> TargetPrediction:
    likelihood = gpytorch.likelihoods.NegativeBinomialLikelihood()
    # It has no exposure, which becomes an input; its mean is softplus of the function.
    x, test_x = _exposure_columns(task)
    start = float(task.y.mean()), float(task.y.var())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = fit_variational(x, task.y, likelihood, task.seed, start)
        latent = model(torch.tensor(test_x))
    return TargetPrediction(likelihood, latent.mean, latent.variance)


def _base_counts(task: Task) -> NegativeBinomials:
    rate = task.y.sum() / task.exposure.sum()
    return NegativeBinomials(rate * task.test_exposure, fitted_size(task.y, rate * task.exposure))


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
            size = fitted_size(task.y, held_out * task.exposure)
        fitted = make(task).fit(task.x, rates, **weights)
        return NegativeBinomials(fitted.predict(task.test_x) * task.test_exposure, size)

    return predict


def _poisson(task: Task) -> Any:
    return model_selection.GridSearchCV(
        linear_model.PoissonRegressor(max_iter=1000), {"alpha": np.logspace(-4, 1, 6)},
        scoring="neg_mean_poisson_deviance",
    )  # fmt: skip


def _negative_binomial(task: Task) -> NegativeBinomials:
    import statsmodels.api as sm

    model = sm.NegativeBinomial(task.y, sm.add_constant(task.x), exposure=task.exposure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps too far, and of ends before a maximum
        # Indicators of all levels add to a constant: there is no Hessian to invert.
        fitted = model.fit(method="bfgs", maxiter=1000, disp=False, skip_hessian=True)
    inputs = sm.add_constant(task.test_x, has_constant="add")
    means = fitted.predict(inputs, exposure=task.test_exposure)
    return NegativeBinomials(means, 1 / max(fitted.params[-1], 1 / _POISSON))


def _classes(task: Task, kernel: Any, likelihood: Any, ard: bool) -> LatentGP:
    return GPClassification(task.x, task.y, kernel, likelihood=likelihood, ard=ard)


def _counts(task: Task, kernel: Any, likelihood: Any, ard: bool) -> LatentGP:
    offset = np.log(task.exposure)
    return GPCounts(task.x, task.y, kernel, likelihood=likelihood, ard=ard, offset=offset)


def _gp(
    make: Callable[..., LatentGP],
    kernel: str,
    likelihood: Callable[[], Any] = lambda: None,
    *,
    ard: bool = True,
    is_linear: bool = False,
    has_priors: bool = True,
    held_out: Conditioning | None = None,
    objective: Literal["laplace", "ep"] = "laplace",
) -> Callable[[Task], Any]:
    """This library's model, fitted by the evidence, or the CLML of these held-out points."""

    def predict(task: Task) -> Any:
        model = make(task, kernel, likelihood(), ard)
        if is_linear:
            linear = LinearKernel(variance_prior=LogNormalPrior(0.0, 1.5)).double()
            model.covar_module = model.covar_module + linear
        if not has_priors:
            for module in model.modules():
                getattr(module, "_priors", {}).clear()
        conditioning = LastPoints(m=0) if held_out is None else held_out
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
        posterior, model.approximation = model.approximation, objective
        fit_mll(mll, progress=False)
        model.approximation = posterior
        if make is _classes:
            return model.predict(task.test_x).probabilities.numpy()
        return model.predict(task.test_x, offset=np.log(task.test_exposure))

    return predict


def _ours(make: Callable[..., LatentGP]) -> dict[str, Peer]:
    """This library's methods; the first of them are the members of the average."""
    return {
        "matern": Peer("Matern with ARD, by Laplace's evidence", _gp(make, "matern")),
        "rbf": Peer("RBF with ARD", _gp(make, "rbf")),
        "rbf-iso": Peer("RBF, one lengthscale", _gp(make, "rbf", ard=False)),
        "rq": Peer("rational quadratic with ARD", _gp(make, "rq")),
        "rbf+linear": Peer("RBF with ARD plus linear", _gp(make, "rbf", is_linear=True)),
        AVERAGE: Peer(
            "plain average of the five above",
            TargetMixture if make is _counts else lambda members: np.mean(members, 0),
        ),
        "matern-free": Peer("matern without priors", _gp(make, "matern", has_priors=False)),
        "matern-clml": Peer("matern by ten folds", _gp(make, "matern", held_out=KFold(10))),
    }


CLASS_PEERS: Mapping[str, Peer] = {
    "logistic": Peer(
        "scikit-learn's LogisticRegressionCV, by log loss",
        _classifier(
            lambda _: linear_model.LogisticRegressionCV(
                scoring="neg_log_loss", max_iter=1000, l1_ratios=(0,), use_legacy_attributes=False
            )
        ),
    ),
    "forest": Peer("scikit-learn's RandomForestClassifier, a vote added to each class", _forest),
    "hist-gb": Peer(
        "scikit-learn's HistGradientBoostingClassifier",
        _classifier(lambda t: ensemble.HistGradientBoostingClassifier(random_state=t.seed)),
    ),
    "catboost": Peer(
        "CatBoostClassifier",
        _classifier(lambda task: make_catboost("Classifier", task.seed)),
        "catboost",
    ),
    "sklearn-gp": Peer(
        "scikit-learn's GaussianProcessClassifier, RBF with ARD", _classifier(_sklearn_gp)
    ),
    "gpytorch": Peer(
        f"GPyTorch's SVGP, Matern with ARD, at most {_MOST_POINTS} inducing points, "
        f"{_ADAM_STEPS} steps of Adam at {_ADAM_RATE:g}",
        _variational_classes,
    ),
    "base": Peer("shares of the classes in the training rows", _shares),
}
"""Methods of other packages for classes, by name."""

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
        _regressor(
            lambda t: ensemble.HistGradientBoostingRegressor(loss="poisson", random_state=t.seed)
        ),
    ),
    "gpytorch": Peer(
        "GPyTorch's SVGP as for classes, its NegativeBinomialLikelihood", _variational_counts
    ),
    "base": Peer("a negative binomial fitted to the training counts", _base_counts),
}
"""The same for counts."""

CLASS_METHODS: Mapping[str, Peer] = {
    **_ours(_classes),
    "matern-logit": Peer("matern, logistic", _gp(_classes, "matern", LogisticLikelihood)),
    "matern-ep": Peer(
        "matern by the evidence of expectation propagation", _gp(_classes, "matern", objective="ep")
    ),
    "classifier": Peer("gpclml.Classifier", _classifier(lambda t: Classifier(random_state=t.seed))),
    **CLASS_PEERS,
}
"""This library's methods for classes, then those."""

MULTICLASS_METHODS = {name: CLASS_METHODS[name] for name in ("classifier", *CLASS_PEERS)}
"""Those of them for more than two classes."""

COUNT_METHODS: Mapping[str, Peer] = {
    **_ours(_counts),
    "matern-poisson": Peer("matern, Poisson", _gp(_counts, "matern", LogPoissonLikelihood)),
    "regressor": Peer("gpclml.Regressor(counts=True)", _count_regressor),
    **COUNT_PEERS,
}
"""The same for counts."""
