"""How models of a table are made and fitted: as functions, and as a Python file that repeats it."""

from __future__ import annotations

import importlib
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.conditioning import Conditioning, KFold, LastPoints, LeaveOneOut
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.fit import FitWarning, NetworksFitResult, fit_mll, fit_networks
from gpclml.kernels import FeatureKernel, IdentityFeatures, initialize_spectral_mixture
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = [
    "DESCRIPTIONS",
    "MODELS",
    "OBJECTIVES",
    "FittedModel",
    "Recipe",
    "RecipeFit",
    "kernel_object",
    "package_versions",
    "script_of",
]

DESCRIPTIONS = {
    "linear": "a linear function of the inputs",
    "rbf": "a smooth function, each input with a length scale of its own",
    "rq": "as rbf, on several length scales at once",
    "matern": "a rougher function than rbf",
    "sm": "a mixture of four patterns that may repeat along the inputs (spectral mixture)",
    "deep": "rbf and features that a network learns, where held-out rows support them",
}
"""What each model is, for people who do not know Gaussian processes."""

MODELS = tuple(DESCRIPTIONS)
"""Names of models, from the cheapest to the most expensive."""

OBJECTIVES = ("lml", "clml", "loo")
"""Names of the objectives that a fit can maximize."""

_NAMED_KERNELS = {
    "rbf": "rbf", "rq": "rq", "matern": "matern", "sm": "spectral_mixture", "deep": "deep",
}  # fmt: skip
_STEPS = {"sm": 50, "deep": 300}  # the others have no limit
_CONDITIONING: dict[str, tuple[Callable[..., Conditioning], dict[str, int]]] = {
    "lml": (LastPoints, {"m": 0}),
    "clml": (KFold, {"n_splits": 10}),
    "loo": (LeaveOneOut, {}),
}


class RecipeFit(NamedTuple):
    """The result of a recipe.

    Attributes:
        model: The fitted model.
        note: Sentences on the fit, or empty.
        problem: Why the fit failed, or empty. A fit that reached its largest number of steps has
            not failed.
    """

    model: GPRegression
    note: str
    problem: str


@checked
@dataclass(frozen=True)
class Recipe:
    """A model of a table, and how it is fitted.

    - ``"linear"``: a Bayesian linear model of the standardized inputs and a constant;
    - ``"rbf"``, ``"rq"``, ``"matern"``: a GP with that kernel and a lengthscale for each input;
      ``"rq"`` contains ``"rbf"`` and starts from its fit, since from elsewhere it may end far
      below;
    - ``"sm"``: a GP with a spectral mixture kernel of four components, whose start treats the
      inputs as points on a grid;
    - ``"deep"``: a GP with an RBF kernel, plus a kernel on learned features if held-out folds
      support it, trained by :func:`gpclml.fit.fit_networks`.

    All but the last are fitted by L-BFGS. The objective ``"clml"`` holds out each of ten fixed
    folds given the others; for ``"deep"`` it holds out a new random tenth at each step.

    Attributes:
        model: Name of the model.
        objective: The objective that is maximized: ``"lml"``, ``"clml"`` or ``"loo"``.
        seed: Seed of networks, starts and folds.
        steps: Largest number of steps. If None: 50 for ``"sm"``, 300 for ``"deep"``, and no limit
            for the others.
        restarts: Number of further fits from other starts, of which the best is kept; ``"deep"``
            has none.

    Raises:
        UnknownNameError: There is no such model or objective.
        ArgumentError: A number is out of range.
    """

    model: str
    objective: str = "lml"
    seed: int = 0
    steps: int | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UnknownNameError("model", self.model, MODELS)
        if self.objective not in OBJECTIVES:
            raise UnknownNameError("objective", self.objective, OBJECTIVES)
        if self.steps is not None and self.steps < 1:
            raise ArgumentError("steps", self.steps, "at least 1")
        if self.restarts < 0:
            raise ArgumentError("restarts", self.restarts, "0 or more")

    def fit(self, x: Tensor, y: Tensor, progress: bool = True) -> RecipeFit:
        """Fits the model to data.

        Args:
            x: Inputs, ``(n, d)``.
            y: Targets, ``(n,)``.
            progress: Whether to show progress bars on standard error.

        Raises:
            NonFiniteError, NotPSDError: The objective cannot be evaluated at the start of the fit.
        """
        model = GPRegression(x, y, seed=self.seed, **self._parts())
        make, options = _CONDITIONING[self.objective]
        conditioning = None if self._redraws() else make(**options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FitWarning)  # the result has the problem
            if self.model == "sm":
                _start_on_grid(model, x, self.seed)
            elif self.model == "rq":
                rbf = model.with_kernel("rbf")
                mll = ConditionalMarginalLogLikelihood(rbf.likelihood, rbf, conditioning)
                fit_mll(mll, steps=self._most_steps(), progress=progress)
                model.load_state_dict(rbf.state_dict(), strict=False)
            mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
            if self.model == "deep":
                steps = self.steps or _STEPS["deep"]
                result = fit_networks(mll, steps=steps, seed=self.seed, progress=progress)
                return RecipeFit(model, _said_of_networks(result), result.message)
            fitted = fit_mll(
                mll, steps=self._most_steps(), restarts=self.restarts, seed=self.seed,
                progress=progress,
            )  # fmt: skip
        failed = fitted.problem not in ("", "limit")  # the limit of steps was asked for
        return RecipeFit(model, fitted.message, fitted.message if failed else "")

    def lines(self) -> list[str]:
        """Lines of Python that do the same as :meth:`fit`, from ``x`` and ``y`` to ``model``."""
        make, options = _CONDITIONING[self.objective]
        arguments = ", ".join(f"{name}={value}" for name, value in options.items())
        conditioning = "None" if self._redraws() else f"{make.__name__}({arguments})"
        if self.model == "linear":
            parts = 'kernel=FeatureKernel(IdentityFeatures(intercept=True)), mean="zero"'
        else:
            parts = f'kernel="{_NAMED_KERNELS[self.model]}"'
        steps = "" if self._most_steps() is None else f"steps={self._most_steps()}, "
        if self.model == "deep":
            fit = f"fit_networks(mll, steps={self.steps or _STEPS['deep']}, seed={self.seed})"
        else:
            fit = f"fit_mll(mll, {steps}restarts={self.restarts}, seed={self.seed})"
        return [
            f"model = GPRegression(x, y, {parts}, seed={self.seed})",
            f"conditioning = {conditioning}",
            *(_grid_lines(self.seed) if self.model == "sm" else ()),
            *(_rbf_lines(steps.rstrip(", ")) if self.model == "rq" else ()),
            "mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)",
            fit,
        ]

    def _parts(self) -> dict[str, Any]:
        kernel = kernel_object(self.model)
        if kernel is not None:
            return {"kernel": kernel, "mean": "zero"}
        return {"kernel": _NAMED_KERNELS[self.model]}

    def _most_steps(self) -> int | None:
        return self.steps or _STEPS.get(self.model)

    def _redraws(self) -> bool:
        return self.model == "deep" and self.objective == "clml"


def kernel_object(model: str) -> Kernel | None:
    """The kernel object of a model; None for models whose kernel is given by name.

    Args:
        model: Name of the model.
    """
    return FeatureKernel(IdentityFeatures(intercept=True)) if model == "linear" else None


def _start_on_grid(model: GPRegression, x: Tensor, seed: int) -> None:
    """Starts the spectral mixture as if the inputs were on a grid.

    Random inputs have some gaps far below their typical spacing. A start at frequencies up to the
    smallest gap would have frequencies that the points cannot resolve.
    """
    start = torch.Generator().manual_seed(seed)
    inputs = model.input_standardizer.transform(x)
    targets = cast(Tensor, model.train_targets)
    initialize_spectral_mixture(cast(Kernel, model.covar_module), inputs, targets, start, "grid")


def _rbf_lines(steps: str) -> list[str]:
    return [
        'rbf = model.with_kernel("rbf")  # rq contains it, and starts from its fit',
        "mll = ConditionalMarginalLogLikelihood(rbf.likelihood, rbf, conditioning)",
        f"fit_mll(mll{', ' if steps else ''}{steps})",
        "model.load_state_dict(rbf.state_dict(), strict=False)",
    ]


def _grid_lines(seed: int) -> list[str]:
    return [
        f"start = torch.Generator().manual_seed({seed})",
        "inputs = model.input_standardizer.transform(x)",
        "targets = model.train_targets",
        'initialize_spectral_mixture(model.covar_module, inputs, targets, start, spacing="grid")',
    ]


def _said_of_networks(result: NetworksFitResult) -> str:
    if result.message:
        return f"Training on all rows failed, so the model is the RBF GP: {result.message}"
    if result.chosen == 0:
        return (
            "Held-out folds support no learned features, so the model is the RBF GP, fitted by LML."
        )
    gain, error = result.gains[result.chosen], result.standard_errors[result.chosen]
    steps = result.steps[result.chosen]
    trained = f"trained for {steps} steps" if steps else "fitted by line searches"
    return (
        f"Held-out folds support a second kernel on learned features, {trained}: {gain:.3f} ± "
        f"{error:.3f} nats per row better than the RBF GP."
    )


@dataclass(frozen=True)
class FittedModel:
    """How a model of a report was fitted.

    Attributes:
        recipe: The model and how it was fitted.
        seconds: Wall time of the fit.
        note: Sentences on the fit, or empty.
        problem: Why the fit failed, or empty.
    """

    recipe: Recipe
    seconds: float
    note: str = ""
    problem: str = ""


_IMPORTS = {
    "gpclml.conditioning": ("KFold", "LastPoints", "LeaveOneOut"),
    "gpclml.fit": ("fit_mll", "fit_networks"),
    "gpclml.kernels": ("FeatureKernel", "IdentityFeatures", "initialize_spectral_mixture"),
    "gpclml.mlls": ("ConditionalMarginalLogLikelihood",),
    "gpclml.models": ("GPRegression",),
    "gpclml.cli.report": ("predicted", "prediction_scores"),
    "gpclml.evaluation": ("leave_one_out", "log_marginal_likelihood"),
    "gpclml.cli.tables": ("TableEncoding", "read_table", "split_rows"),
}


@checked
def script_of(
    recipe: Recipe, data: Path, most_rows: int, split_seed: int, version: str, one_thread: bool
) -> str:
    """The text of a Python file that rebuilds a model of a report.

    The file reads the table, and ``table.json`` in its own folder. It takes the same rows, encodes
    and fits them in the same way, and prints LML and LOO of the training rows and the scores of the
    test rows.

    Args:
        recipe: The model and how it was fitted.
        data: The table; another path may be given when the file is run.
        most_rows: Largest number of training rows.
        split_seed: Seed of the split of the rows.
        version: Version of gpclml.
        one_thread: Whether the model was fitted on one thread. The file then uses one thread too,
            so that rounding is the same.
    """
    threads = ["torch.set_num_threads(1)  # as in the report, for the same rounding"]
    body = [
        "HERE = Path(__file__).resolve().parent",
        f"DATA = sys.argv[1] if len(sys.argv) > 1 else {str(data)!r}",
        "",
        'encoding = TableEncoding.load(HERE / "table.json")',
        "table = read_table(DATA, missing=encoding.missing)",
        f"rows = split_rows(encoding.targets(table), seed={split_seed}, most_rows={most_rows})",
        "x, y = encoding.tensors(table.iloc[rows.train])",
        "test_x, test_y = encoding.tensors(table.iloc[rows.test])",
        "",
        *(threads if one_thread else ()),
        *recipe.lines(),
        "",
        'print(f"lml {log_marginal_likelihood(model):.4f}")',
        'print(f"loo {leave_one_out(model).sum():.4f}")',
        "scores = prediction_scores(test_y, *predicted(model, test_x))",
        'print(f"test_rmse {scores.rmse:.6g}")',
        'print(f"test_nll {scores.nll:.4f}")',
        'print(f"test_coverage {scores.coverage:.3f}")',
    ]
    return "\n".join([*_head(recipe, version), *_imports("\n".join(body)), "", *body, ""])


def _head(recipe: Recipe, version: str) -> list[str]:
    return [
        f'"""Rebuilds the model {recipe.model!r} of the report in this folder (gpclml {version}).',
        "",
        "It prints the scores of the report. Give the path of the table if the table has moved.",
        '"""',
        "",
    ]


def _imports(body: str) -> list[str]:
    lines = ["import sys", "from pathlib import Path", ""]
    if "torch." in body:
        lines += ["import torch", ""]
    for module, names in _IMPORTS.items():
        used = [name for name in names if f"{name}(" in body or f"{name}." in body]
        if used:
            lines.append(f"from {module} import {', '.join(used)}")
    return lines


_PACKAGES = (
    "gpclml", "torch", "gpytorch", "linear-operator", "botorch", "numpy", "scipy", "pandas",
    "matplotlib",
)  # fmt: skip


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute the results, by name."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return str(importlib.import_module(package).__version__)
