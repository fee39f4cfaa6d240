"""Plain averages of Gaussian processes with several kernels: of classes, and of counts."""

from __future__ import annotations

import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from joblib import Parallel, delayed, effective_n_jobs
from torch import Tensor

from gpclml._utils.arguments import callers_level
from gpclml._utils.environment import progress_bar
from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml.errors import ArgumentError, DataError, NonFiniteError
from gpclml.fit import FitWarning, fit_mll
from gpclml.likelihoods import TargetMixture, TargetPrediction
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import GPCounts, LatentGP
from gpclml.tables.class_kernels import class_kernel
from gpclml.tables.missing import averaged_values, unknown_inputs, within_reach

_REACH = 2.0  # ranges of a column that new values may be away from those of the training rows
_LEAST_VARIANCE = 1e-12  # of latent values, whose moments are rounded


@dataclass(eq=False, repr=False)
class ModelAverage(ABC):
    """Models of the targets of a table by kernel, fitted each by itself.

    Attributes:
        x: Inputs of the training rows, ``(n, d)``.
        targets: Their targets, ``(n,)``.
        categories: For each category the columns that are its levels.
        seed: Of the fits and of draws for missing values.
        models: For each kernel that was fitted its models, one or more.
        failures: For each kernel that was left out the error.
    """

    kind: ClassVar[str]

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
        self._restore({name: states[name] for name in names if name not in errors})

    def averaged(self, values: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Values that models give at points ``(m, d)``, averaged over what is missing there."""
        x = within_reach(x, self.x, _REACH)
        return averaged_values(values, x, self.x, self.categories, self.seed)

    def unknown_inputs(self, x: Tensor) -> Tensor:
        """Which inputs of points are missing or of a level that no training row has, ``(m, d)``."""
        return unknown_inputs(x, self.x, self.categories)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the models to one file, without pickled objects."""
        write_checkpoint(path, self.kind, {"models": self.__getstate__()})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads models that :meth:`save` wrote."""
        content = read_checkpoint(path, cls.kind, "cpu", {"models": dict})
        return cls.restored(content["models"], path)

    @classmethod
    def restored(cls, state: dict[str, Any], path: str | os.PathLike[str]) -> Self:
        """The models of a state that was read from a file."""
        made = object.__new__(cls)
        try:
            made.__setstate__(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"path: {path} cannot be restored ({type(error).__name__}: {error}). Restore a "
                "copy of it, or save the estimator again."
            ) from error
        return made

    def __getstate__(self) -> dict[str, Any]:
        # GPyTorch's priors and constraints hold functions that other processes cannot be sent.
        states = {
            name: [dict(model.state_dict()) for model in models]
            for name, models in self.models.items()
        }
        return {**vars(self), "models": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**{**state, "models": {}})
        self._restore(state["models"])

    def _restore(self, states: Mapping[str, list[dict[str, Tensor]]]) -> None:
        for name, of_classes in states.items():
            self.models[name] = [
                self.untrained(name, self.x, y).eval() for y in self.targets_of_models()
            ]
            for model, state in zip(self.models[name], of_classes, strict=True):
                model.load_state_dict(state)


@dataclass(eq=False, repr=False)
class CountModels(ModelAverage):
    """Models of counts, negative binomial around the exponential of a function, by kernel."""

    kind = "gpclml.CountModels"

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
