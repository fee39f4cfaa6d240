"""Averages of Gaussian processes with several kernels: of classes, and of counts."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, cast

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.priors import LogNormalPrior
from joblib import Parallel, delayed, effective_n_jobs
from scipy.optimize import minimize_scalar
from torch import Tensor

from gpclml._utils.arguments import callers_level
from gpclml._utils.environment import progress_bar
from gpclml.errors import ArgumentError, NonFiniteError
from gpclml.fit import FitWarning, fit_mll
from gpclml.inference import training_observations
from gpclml.inference.laplace import LatentCovariance
from gpclml.likelihoods import LogisticLikelihood, TargetMixture, TargetPrediction
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import GPClassification, GPCounts, LatentGP
from gpclml.models.latent import add_latent_priors
from gpclml.tables.missing import averaged_values, unknown_inputs, within_reach
from gpclml.tables.saving import Saved

_LEAST_LENGTHSCALE = 1e-3  # in deviations of a column, as named kernels have it
# Lengthscales of columns differ by a factor of about 1.6 from their common one.
_SPREAD = 0.5
# Of the additive kernel each lengthscale is that of one column: around 4 deviations.
_LOG_COLUMN_LENGTHSCALE, _COLUMN_SPREAD = math.sqrt(2), 1.0

assert issubclass(Kernel, torch.nn.Module)


class AdditiveMatern(Kernel):
    """A mean of Matern kernels of 3/2, one for each column, with a lengthscale for each.

    Its functions are sums of functions of single columns (Duvenaud et al. 2011). A matrix takes
    memory for two of its size, whatever the number of columns.

    Args:
        ard_num_dims: Number of columns.
        **options: As of ``gpytorch.kernels.Kernel``.
    """

    has_lengthscale = True

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor:
        """The covariances of rows ``(*batch, n, d)`` and ``(*batch, m, d)``, or a diagonal."""
        scale = math.sqrt(3) / cast(Tensor, self.lengthscale)
        x1, x2 = x1 * scale, x2 * scale
        if diag:
            return _matern32(x1, x2).mean(-1)
        return cast(Tensor, _MaternSum.apply(x1, x2)) / x1.shape[-1]


def _matern32(x1: Tensor, x2: Tensor) -> Tensor:
    distance = (x1 - x2).abs()
    return (1 + distance) * (-distance).exp()


class _MaternSum(torch.autograd.Function):
    """The sum over columns of their kernels, one after the other.

    Its gradient computes the matrices of columns again, which would fill the memory.
    """

    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor) -> Tensor:
        ctx.save_for_backward(x1, x2)
        total: Any = 0.0
        for first, second in _pairs(x1, x2):
            total = total + _matern32(first, second)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = ctx.saved_tensors
        rows, columns = [], []
        for first, second in _pairs(x1, x2):
            away = first - second
            terms = gradients[0] * away * (-away.abs()).exp()
            rows.append(-terms.sum(-1))
            columns.append(terms.sum(-2))
        both = torch.stack(rows, -1), torch.stack(columns, -1)
        return both[0].sum_to_size(x1.shape), both[1].sum_to_size(x2.shape)


def _pairs(x1: Tensor, x2: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each column, what to subtract for the differences of all rows."""
    for first, second in zip(x1.unbind(-1), x2.unbind(-1), strict=True):
        yield first.unsqueeze(-1), second.unsqueeze(-2)


_STATIONARY: Mapping[str, Callable[..., Kernel]] = {
    "additive": AdditiveMatern,
    "matern12": partial(MaternKernel, 0.5),
    "matern32": partial(MaternKernel, 1.5),
    "matern52": partial(MaternKernel, 2.5),
    "rbf": RBFKernel,
}
KERNELS = ("linear", *_STATIONARY)
"""Kernels of the models of classes or counts that may be averaged, by name."""

AVERAGED = ("linear", "additive", "matern12")
"""Those that it averages if none are named."""


def class_kernel(name: str, x: Tensor, scale: float = 4.0) -> Kernel:
    """A kernel of standardized inputs with weak priors of its scale and lengthscales.

    Lengthscales of the stationary kernels are shrunk towards a common one, which is free: each has
    a log-normal prior around that, with the deviation .5 of the logarithm.

    Args:
        name: One of :data:`KERNELS`.
        x: The inputs, ``(n, d)``.
        scale: Of latent values, around which its prior is.
    """
    d = x.shape[-1]
    if name == "linear":
        linear = LinearKernel()
        linear.variance = 1 / d  # so that the scale is that of latent values, and has its prior
        linear.raw_variance.requires_grad_(False)
        kernel = ScaleKernel(linear).to(x)
        add_latent_priors(kernel, x, scale)
        return kernel
    bound = GreaterThan(_LEAST_LENGTHSCALE)
    base = _STATIONARY[name](ard_num_dims=d, lengthscale_constraint=bound)
    is_additive = name == "additive"
    base.initialize(lengthscale=2.0 if is_additive else math.sqrt(d))
    kernel = ScaleKernel(base).to(x)
    add_latent_priors(kernel, x, scale, _SPREAD)
    if is_additive:
        prior = LogNormalPrior(_LOG_COLUMN_LENGTHSCALE, _COLUMN_SPREAD).to(x)
        base.register_prior("lengthscale_prior", prior, "lengthscale")
    return kernel


_REACH = 2.0  # ranges of a column that new values may be away from those of the training rows
_POWER_DEVIATION = 0.3  # of the logarithm of the power of odds, around 0
_EQUAL_ROWS = 10.0  # that the prior of weights, Dirichlet's around equal ones, counts as
_WEIGHT_STEPS = 100
_LEAST_VARIANCE = 1e-12  # of latent values, whose moments are rounded


@dataclass(eq=False, repr=False)
class ModelAverage(Saved, ABC):
    """Models of the targets of a table by kernel, fitted each by itself.

    Attributes:
        x: Inputs of the training rows, ``(n, d)``.
        targets: Their targets, ``(n,)``.
        categories: For each category the columns that are its levels.
        seed: Of the fits and of draws for missing values.
        models: For each kernel that was fitted its models, one or more.
        failures: For each kernel that was left out the error.
    """

    x: Tensor
    targets: Tensor
    categories: list[list[int]]
    seed: int
    models: dict[str, list[Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def targets_of_models(self) -> list[Tensor]:
        """The targets of each model of a kernel, ``(n,)`` each."""
        return [self.targets]

    @staticmethod
    @abstractmethod
    def untrained(name: str, x: Tensor, y: Tensor) -> LatentGP:
        """A model with the kernel of that name."""

    def fit(self, names: Sequence[str], n_jobs: int | None, progress: bool | None) -> None:
        """Fits the models of these kernels; a warning says which are left out.

        Raises:
            Exception: That of the first fit, if no kernel could be fitted.
        """
        jobs = [(name, y) for name in names for y in self.targets_of_models()]
        workers = effective_n_jobs(n_jobs or 1)
        # Threads of several processes on the same cores would wait for each other.
        threads = max(1, torch.get_num_threads() // min(workers, len(jobs)))
        fits = Parallel(n_jobs=workers, return_as="generator")(
            delayed(_fitted_state)(self.untrained, name, self.x, y, self.seed, threads)
            for name, y in jobs
        )
        bar = progress_bar(fits, progress=progress, desc="models", total=len(jobs))
        states, errors = {}, {}
        for (name, _), fit in zip(jobs, bar, strict=True):
            if isinstance(fit, Exception):
                errors.setdefault(name, fit)
            else:
                states.setdefault(name, []).append(fit)
        if len(errors) == len(names):
            raise errors[names[0]]
        self.failures = {name: f"{type(e).__name__}: {e}" for name, e in errors.items()}
        if errors:
            said = "; ".join(f"{name} ({reason})" for name, reason in self.failures.items())
            message = f"Left out of the average: {said}."
            warnings.warn(message, FitWarning, stacklevel=callers_level())
        self._set_models({name: states[name] for name in names if name not in errors})

    def averaged(self, values: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Values that models give at points ``(m, d)``, averaged over what is missing there."""
        x = within_reach(x, self.x, _REACH)
        return averaged_values(values, x, self.x, self.categories, self.seed)

    def unknown_inputs(self, x: Tensor) -> Tensor:
        """Which inputs of points are missing or of a level that no training row has, ``(m, d)``."""
        return unknown_inputs(x, self.x, self.categories)

    def _state(self) -> dict[str, Any]:
        # GPyTorch's priors and constraints hold functions that other processes cannot be sent.
        states = {
            name: [dict(model.state_dict()) for model in models]
            for name, models in self.models.items()
        }
        return {**vars(self), "models": states}

    def _restore(self, state: Mapping[str, Any]) -> None:
        names = {each.name for each in fields(self)}
        self.__init__(**{**{name: state[name] for name in names}, "models": {}})
        self._set_models(state["models"])

    __getstate__, __setstate__ = _state, _restore

    def _set_models(self, states: Mapping[str, list[dict[str, Tensor]]]) -> None:
        for name, class_states in states.items():
            self.models[name] = [
                self.untrained(name, self.x, y).eval() for y in self.targets_of_models()
            ]
            for model, state in zip(self.models[name], class_states, strict=True):
                model.load_state_dict(state)


@dataclass(eq=False, repr=False)
class ClassModels(ModelAverage):
    """Models of two classes by kernel, or for more classes one for each against the others.

    Targets are numbers of classes, from 0 on. The models of a kernel are in the order of the
    classes; of two classes there is one model, of class 1.

    Attributes:
        power: Of the odds.
        weights: Of the kernels in the average, ``(kernels,)``; equal ones for two classes.
    """

    power: float = 1.0
    weights: Tensor = field(default_factory=lambda: torch.ones(1))

    def fit(self, names: Sequence[str], n_jobs: int | None, progress: bool | None) -> None:
        """Fits the models of these kernels; a warning says which are left out."""
        super().fit(names, n_jobs, progress)
        self._fit_average()

    def probabilities(self, x: Tensor) -> Tensor:
        """Of each class at points ``(m, d)``, NaN where missing: ``(classes, m)``."""
        return self.averaged(self._average, x)

    def targets_of_models(self) -> list[Tensor]:
        """For each model the class of each training row, 0 or 1."""
        count = int(self.targets.max()) + 1
        labels = range(count) if count > 2 else [1]
        return [(self.targets == label).to(self.x) for label in labels]

    @staticmethod
    def untrained(name: str, x: Tensor, y: Tensor) -> GPClassification:
        """A model of two classes with the kernel of that name."""
        return GPClassification(x, y, class_kernel(name, x), likelihood=LogisticLikelihood())

    def _average(self, x: Tensor) -> Tensor:
        predict = partial(GPClassification.predict, x=x, progress=False)
        each = (self.power * self._log_odds(predict)).softmax(1)
        return (self.weights.view(-1, 1, 1) * each).sum(0)

    def _log_odds(self, predict: Callable[[GPClassification], TargetPrediction]) -> Tensor:
        """Logarithms of numbers in proportion to probabilities, ``(kernels, classes, m)``."""

        def single_log_odds(model: GPClassification) -> Tensor:
            prediction = predict(model)
            zeros = torch.zeros_like(prediction.latent_mean)
            # Both by quadrature: 1 - p of a probability p near 1 has no digits.
            return prediction.log_prob(zeros + 1) - prediction.log_prob(zeros)

        every = [torch.stack([*map(single_log_odds, models)]) for models in self.models.values()]
        log_odds = torch.stack(every)
        # Of two classes each model says the odds of one to the other.
        return log_odds if log_odds.shape[1] > 1 else torch.cat([-log_odds, log_odds], 1) / 2

    def _fit_average(self) -> None:
        """Power and weights under which each training row is predicted best from the others.

        Of many classes with few rows each kernels differ by up to a nat a row; of two classes
        weights gain nothing, and are equal.
        """
        log_odds, rows = self._log_odds(_left_out), torch.arange(len(self.targets))
        equal = torch.full_like(log_odds[:, 0, 0], 1 / len(log_odds))
        steps = _WEIGHT_STEPS if log_odds.shape[1] > 2 else 0

        def weighted(power: float) -> tuple[Tensor, float]:
            """The weights for a power, and the loss, with the priors of both."""
            logs = (power * log_odds).log_softmax(1)[:, self.targets, rows]
            weights = equal
            for _ in range(steps):  # of expectation maximization
                shares = (logs + weights.log().unsqueeze(-1)).softmax(0).sum(-1)
                weights = (shares + _EQUAL_ROWS * equal) / (len(rows) + _EQUAL_ROWS)
            fit = (logs + weights.log().unsqueeze(-1)).logsumexp(0).sum()
            prior = _EQUAL_ROWS * (equal * weights.log()).sum()
            # Rows that are all predicted right would have the power grow without end.
            penalty = 0.5 * (math.log(power) / _POWER_DEVIATION) ** 2
            return weights, penalty - float(fit + prior)

        def loss(log_power: float) -> float:
            return weighted(math.exp(log_power))[1]

        optimum: Any = minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded")
        self.power = math.exp(optimum.x)
        self.weights = weighted(self.power)[0]


@torch.no_grad()
def _left_out(model: GPClassification) -> TargetPrediction:
    """Predictions of the training rows, each given the others: the cavities of the sites."""
    sites: Any = cast(LatentCovariance, training_observations(model).covariance).approximated
    return TargetPrediction(model.likelihood, sites.cavity_mean, sites.cavity_variance)


@dataclass(eq=False, repr=False)
class CountModels(ModelAverage):
    """Models of counts, negative binomial around the exponential of a function, by kernel."""

    @staticmethod
    def untrained(name: str, x: Tensor, y: Tensor) -> GPCounts:
        """A model of counts with the kernel of that name."""
        return GPCounts(x, y, class_kernel(name, x, scale=1.0))

    def predict(self, x: Tensor) -> TargetMixture:
        """The distributions of counts at points ``(m, d)``, NaN where missing.

        Where an input is missing, or of a level that no training row has, means and variances of
        the rates are those of the average over what it may be.
        """
        models = [model for [model] in self.models.values()]

        def moments(x: Tensor) -> Tensor:
            """Means of rates and of their squares, ``(2K, p)``."""
            latent = [model.predict(x, progress=False) for model in models]
            mean = torch.stack([prediction.latent_mean for prediction in latent])
            variance = torch.stack([prediction.latent_variance for prediction in latent])
            return torch.cat([mean + 0.5 * variance, 2 * (mean + variance)]).exp()

        first, second = self.averaged(moments, x).log().chunk(2)
        variances = (second - 2 * first).clamp_min(_LEAST_VARIANCE)
        means = first - 0.5 * variances
        return TargetMixture(
            [
                TargetPrediction(model.likelihood, mean, variance)
                for model, mean, variance in zip(models, means, variances, strict=True)
            ]
        )


def check_whole(argument: str, targets: Tensor, suggestion: str) -> None:
    """Refuses targets that are no counts; NaN passes."""
    bad = (targets < 0) | (targets != targets.round()) & ~targets.isnan()
    if bool(bad.any()):
        got, expected = f"{float(targets[bad][0]):g} among them", "whole numbers from 0 on"
        raise ArgumentError(argument, got, expected, suggestion)


def _fitted_state(
    untrained: Callable[[str, Tensor, Tensor], LatentGP],
    name: str,
    x: Tensor,
    y: Tensor,
    seed: int,
    threads: int,
) -> dict[str, Tensor] | Exception:
    """The fitted parameters of a model, or why there are none; the model itself has no pickle."""
    torch.set_num_threads(threads)
    try:
        model = untrained(name, x, y)
        mll = LaplaceMarginalLogLikelihood(model.likelihood, model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FitWarning)
            objective = fit_mll(mll, seed=seed, progress=False).objective
        if not math.isfinite(objective):
            raise NonFiniteError("objective", objective, "a finite one", f"Leave out {name!r}.")
    except Exception as error:  # whatever it is, the others are worth having
        return error
    return dict(model.state_dict())
