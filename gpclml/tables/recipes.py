"""The models of a command, and how each is fitted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from gpytorch.kernels import Kernel
from torch import Tensor

from gpclml._utils.arguments import check_counts, checked, seeded
from gpclml.conditioning import Conditioning, KFold, LastPoints, LeaveOneOut
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.fit import FitWarning, NetworksFitResult, fit_mll, fit_networks
from gpclml.kernels import FeatureKernel, PolynomialFeatures, initialize_spectral_mixture
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression
from gpclml.tables.averages import CountModels, ModelAverage
from gpclml.tables.class_kernels import AVERAGED
from gpclml.tables.classifier import ClassModels
from gpclml.tables.stacked import StackedGP

DESCRIPTIONS = {
    "linear": "a straight line (plane): the effects of the columns add up",
    "rbf": "a Gaussian process: a smooth function, with a length scale for each column",
    "rq": "a Gaussian process like rbf, smooth on several length scales at once",
    "matern": "a Gaussian process of a rougher function than rbf",
    "sm": "a Gaussian process of four patterns that may repeat along the inputs (spectral mixture)",
    "deep": "rbf, with features that a network learns where they help on held-out rows",
}
"""What each model is, for people who do not know Gaussian processes."""

MODELS = tuple(DESCRIPTIONS)
"""Names of models, from the cheapest to the most expensive."""

STACK = "stack"
"""The calibrated mixture of GPs: a model of ``fit``, which ``compare`` shows below its own."""

OBJECTIVES: dict[str, Conditioning] = {
    "lml": LastPoints(m=0), "clml": KFold(10), "loo": LeaveOneOut(),
}  # fmt: skip
"""The objectives that a fit can maximize: by name, what they condition on."""

_STEPS = {"sm": 50, "deep": 300}  # the others have no limit


CLASSIFIER, COUNT_GPS = "classifier", "count-gps"
AVERAGES: Mapping[str, type[ModelAverage]] = {CLASSIFIER: ClassModels, COUNT_GPS: CountModels}
"""The averages of GPs of :class:`gpclml.Classifier` and of a :class:`gpclml.Regressor` of counts:
the models of a target of classes, and of counts."""


class RecipeFit(NamedTuple):
    """A fitted model; sentences on the fit; and why it failed, or empty.

    A fit that reached its largest number of steps has not failed, nor one whose noise ended at its
    bound.
    """

    model: GPRegression | StackedGP | ModelAverage
    note: str
    problem: str


@checked
@dataclass(frozen=True)
class Recipe:
    """A model of a table, and how it is fitted.

    - ``"linear"``: a Bayesian linear model of the standardized inputs and a constant;
    - ``"rbf"``, ``"rq"``, ``"matern"``: a GP with that kernel and a lengthscale for each input;
      ``"rq"`` contains ``"rbf"`` and starts from its fit, because from other starts it may end far
      below;
    - ``"sm"``: a GP with a spectral mixture kernel of four components, whose start treats the
      inputs as points on a grid;
    - ``"deep"``: a GP with an RBF kernel, plus a kernel on learned features if held-out folds
      support it, trained by :func:`gpclml.fit.fit_networks`;
    - ``"stack"``: a :class:`gpclml.tables.StackedGP`, whose GPs are fitted by the LML;
    - ``"classifier"``: the models of :class:`gpclml.Classifier`, for targets that number classes;
    - ``"count-gps"``: the models of a :class:`gpclml.Regressor` of counts.

    The first five are fitted by L-BFGS. The objective ``"clml"`` holds out each of ten fixed
    folds given the others; for ``"deep"`` it holds out a new random tenth at each step.

    Attributes:
        model: Name of the model.
        objective: The objective that is maximized: ``"lml"``, ``"clml"`` or ``"loo"``.
        seed: Seed of networks, starts and folds.
        steps: Largest number of steps. If None: 50 for ``"sm"``, 300 for ``"deep"``, and no limit
            for the others.
        restarts: Number of further fits from other starts, of which the best is kept. ``"deep"``
            has none; ``"stack"`` restarts each of its GPs.
        time_budget: Seconds after which ``"stack"`` begins no further GP; None for no limit.

    Raises:
        UnknownNameError: There is no such model or objective.
        ArgumentError: A number is out of range.
    """

    model: str
    objective: str = "lml"
    seed: int = 0
    steps: int | None = None
    restarts: int = 0
    time_budget: float | None = None

    def __post_init__(self) -> None:
        if self.model not in (*MODELS, STACK, *AVERAGES):
            raise UnknownNameError("model", self.model, (*MODELS, STACK, *AVERAGES))
        if self.objective not in OBJECTIVES:
            raise UnknownNameError("objective", self.objective, OBJECTIVES)
        check_counts(steps=self.steps)
        if self.model == STACK and (self.steps is not None or self.objective != "lml"):
            got = f"{self.objective}, {self.steps or 'no'} steps"
            expected = "lml without a limit of steps, by which the GPs of a stack are fitted"
            suggestion = "Leave both options out, or name another --model, such as matern."
            raise ArgumentError("objective", got, expected, suggestion)
        check_counts(0, restarts=self.restarts)
        options = self.objective, self.steps, self.restarts, self.time_budget
        if self.model in AVERAGES and options != ("lml", None, 0, None):
            got, expected = "options of the fit", "none for classes and counts but --seed"
            suggestion = "Leave out --objective, --steps, --restarts and --time-budget."
            raise ArgumentError("model", f"{self.model} with {got}", expected, suggestion)
        if self.model != STACK and self.time_budget is not None:
            expected, suggestion = "none for a single GP", "Leave it out, or limit --steps."
            raise ArgumentError("time_budget", self.time_budget, expected, suggestion)

    def fit(
        self,
        x: Tensor,
        y: Tensor,
        progress: bool = True,
        categories: Sequence[Sequence[int]] = (),
    ) -> RecipeFit:
        """Fits the model to inputs ``(n, d)`` and targets ``(n,)``; ``categories`` for a stack.

        Raises:
            NonFiniteError, NotPSDError: The objective cannot be evaluated at the start of the fit.
        """
        if self.model == STACK:
            stack = StackedGP(restarts=self.restarts, seed=self.seed)
            stack.fit(x, y, categories=categories, time_budget=self.time_budget, progress=progress)
            return RecipeFit(stack, "", "")
        if self.model in AVERAGES:
            targets, groups = y.long() if self.model == CLASSIFIER else y, [*map(list, categories)]
            models = AVERAGES[self.model](x, targets, groups, self.seed)
            models.fit(AVERAGED, None, progress)
            return RecipeFit(models, "", "")
        steps = self.steps or _STEPS.get(self.model)
        conditioning = OBJECTIVES[self.objective]
        if self.model == "deep" and self.objective == "clml":
            conditioning = None  # which redraws the held-out points
        kernel = kernel_object(self.model) or {"sm": "spectral_mixture"}.get(self.model, self.model)
        mean = "zero" if self.model == "linear" else "constant"
        model = GPRegression(x, y, kernel, mean, seed=self.seed)
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FitWarning)  # the result has the problem
            if self.model == "sm":
                # As if the inputs were on a grid: random inputs have gaps far below their typical
                # spacing, and frequencies up to the smallest gap cannot be resolved.
                inputs = model.input_standardizer.transform(x)
                targets = cast(Tensor, model.train_targets)
                initialize_spectral_mixture(
                    cast(Kernel, model.covar_module), inputs, targets, seeded(self.seed), "grid"
                )
            elif self.model == "rq":
                # RQ contains RBF; from other starts it may end far below.
                rbf = model.with_kernel("rbf")
                rbf_mll = ConditionalMarginalLogLikelihood(rbf.likelihood, rbf, conditioning)
                fit_mll(rbf_mll, steps=steps, progress=progress)
                model.load_state_dict(rbf.state_dict(), strict=False)
            elif self.model == "deep":
                result = fit_networks(
                    mll, steps=cast(int, steps), seed=self.seed, progress=progress
                )
                return RecipeFit(model, _networks_in_words(result), result.message)
            fitted = fit_mll(
                mll, steps=steps, restarts=self.restarts, seed=self.seed, progress=progress
            )
        # The limit of steps was asked for, and targets may be exact.
        failed = fitted.problem not in ("", "limit", "noise")
        return RecipeFit(model, fitted.message, fitted.message if failed else "")


def kernel_object(model: str) -> Kernel | None:
    """The kernel object of a model; None for models whose kernel is given by name."""
    return FeatureKernel(PolynomialFeatures(1)) if model == "linear" else None


def _networks_in_words(result: NetworksFitResult) -> str:
    """A sentence on whether learned features help."""
    if result.message:
        return f"Training on all rows failed, so the model is the RBF GP: {result.message}"
    if result.chosen == 0:
        said = "Learned features do not help on held-out rows, so the model is the RBF GP"
        return f"{said}, fitted by LML."
    gain, error = result.gains[result.chosen], result.standard_errors[result.chosen]
    steps = result.steps[result.chosen]
    trained = f"trained for {steps} steps" if steps else "fitted by line searches"
    return (
        f"Learned features help on held-out rows, so they are a second kernel, {trained}: "
        f"{gain:.3f} ± {error:.3f} nats per row better than the RBF GP."
    )
