"""This library's models of a table, the criteria to choose one by, and mixtures of them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from benchmarks.tables.scores import attempt, normal
from gpclml.conditioning import RandomOrderings
from gpclml.evaluation import (
    conditional_log_marginal_likelihood,
    leave_one_out,
    log_marginal_likelihood,
    marginal_log_predictive,
    stacking_weights,
)
from gpclml.models import find_networks
from gpclml.tables import StackedPrediction
from gpclml.tables.fitting import Recipe

CANDIDATES = ("linear", "rbf", "matern", "rq", "deep")
"""Recipes of ``gpclml fit``, fitted by LML."""

STACKED = "loo-stack"
"""The plain stack: the candidates' mixture with the best leave-one-out predictions."""

FOLDS = "by-folds"
"""The candidate with the best predictions of five folds, each refitted without the fold."""

ABOUT: Mapping[str, str] = {
    "linear": "Bayesian linear model, LML",
    "rbf": "GPRegression, RBF with ARD, LML",
    "matern": "GPRegression, Matern-5/2 with ARD, LML",
    "rq": "GPRegression, rational quadratic with ARD, from the fitted rbf, LML",
    "deep": "GPRegression, RBF and learned features where held-out rows support them",
    STACKED: "the five candidates mixed by weights that maximize the leave-one-out log score",
    FOLDS: "the one of the five with the best log score of five folds, refitted without the fold",
}
"""What each method is, for the report."""

CRITERIA: Mapping[str, str] = {
    "lml": "log marginal likelihood",
    "bic": "LML less half a log(n) for each hyperparameter, weights of networks not counted",
    "clml_50": "CLML given .5 n, 50 random orderings",
    "clml_80": "CLML given .8 n, 50 random orderings",
    "clml_90": "CLML given .9 n, 50 random orderings",
    "loo": "leave-one-out log score, hyperparameters of all rows",
}
"""What a single model is chosen by, the larger the better."""

_SHARES = {"clml_50": 0.5, "clml_80": 0.8, "clml_90": 0.9}
_ORDERINGS = 50
_NUM_FOLDS = 5


@dataclass(frozen=True)
class TableRows:
    """Rows of a table, float64 on the CPU.

    Args:
        x: Training inputs, ``(n, d)``.
        y: Training targets, ``(n,)``.
        test_x: Test inputs, ``(m, d)``.
        test_y: Test targets, ``(m,)``.
        unit: Standard deviation of the training targets, 1 where they are equal.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    unit: float


@dataclass(frozen=True)
class _Fit:
    """A fitted candidate: what it predicts, and what is known of it."""

    model: Any
    mean: Tensor
    deviation: Tensor
    problem: str
    seconds: float


class Candidates:
    """The candidates of a training set, each fitted when it is first asked for, and once.

    Args:
        rows: The rows.
        seed: Seed of networks, orderings and folds.
    """

    def __init__(self, rows: TableRows, seed: int) -> None:
        self._rows, self._seed = rows, seed
        # An error is kept too: a candidate that cannot be fitted fails once.
        self._attempt = functools.cache(functools.partial(attempt, self._fitted))

    def predict(self, name: str) -> tuple[StackedPrediction, dict[str, Any]]:
        """What a candidate predicts of the test rows, or their stack, or the one chosen by folds.

        Returns:
            The densities, and metrics: ``seconds`` of fits and predictions; of a candidate also
            ``problem``, what its fit says is wrong, and the criteria.
        """
        if name == STACKED:
            return self._stacked()
        if name == FOLDS:
            return self._chosen_by_folds()
        fit = self._attempt(name)
        if isinstance(fit, Exception):
            raise fit
        about = {"problem": fit.problem, "seconds": fit.seconds}
        return _mixture([fit]), about | self._criteria(fit)

    def _fitted(self, name: str) -> _Fit:
        rows, start = self._rows, time.perf_counter()
        fit = Recipe(name, seed=self._seed).fit(rows.x, rows.y, progress=False)
        with torch.no_grad():
            results = fit.model.predict(rows.test_x, marginal=True)
        seconds = time.perf_counter() - start
        return _Fit(fit.model, results.mean, results.variance.sqrt(), fit.problem, seconds)

    def _all_fits(self) -> dict[str, _Fit]:
        """The candidates that could be fitted; if none could, the error of the first."""
        fits = {name: self._attempt(name) for name in CANDIDATES}
        whole = {name: fit for name, fit in fits.items() if isinstance(fit, _Fit)}
        if not whole:
            raise next(fit for fit in fits.values() if isinstance(fit, Exception))
        return whole

    def _chosen_by_folds(self) -> tuple[StackedPrediction, dict[str, Any]]:
        whole, start = self._all_fits(), time.perf_counter()
        scores = {name: attempt(self._refitted, name) for name in whole}
        known = {name: score for name, score in scores.items() if isinstance(score, float)}
        chosen = max(known or whole, key=lambda name: known.get(name, 0.0))
        seconds = time.perf_counter() - start + sum(fit.seconds for fit in whole.values())
        return _mixture([whole[chosen]]), {"seconds": seconds, "chosen": chosen}

    def _stacked(self) -> tuple[StackedPrediction, dict[str, Any]]:
        # Mixed from the candidates that could be fitted.
        whole, start = list(self._all_fits().values()), time.perf_counter()
        weights = stacking_weights(torch.stack([leave_one_out(fit.model) for fit in whole]))
        prediction = _mixture(whole, weights.numpy())
        seconds = time.perf_counter() - start
        return prediction, {"seconds": seconds + sum(fit.seconds for fit in whole)}

    def _criteria(self, fit: _Fit) -> dict[str, float]:
        """The criteria in nats; one that cannot be computed is left out."""
        model, n = fit.model, len(self._rows.y)
        # Counted as hyperparameters, a network's weights would rule it out under BIC.
        weights = {id(p) for network in find_networks(model) for p in network.parameters()}
        count = sum(p.numel() for p in model.parameters() if id(p) not in weights)

        def conditional(share: float) -> Tensor:
            # The same orderings for all candidates, so that differences are paired.
            orderings = RandomOrderings(k=_ORDERINGS, m=round(share * n))
            return conditional_log_marginal_likelihood(model, orderings, seed=self._seed).mean()

        values = {"lml": attempt(log_marginal_likelihood, model)}
        values["loo"] = attempt(lambda: leave_one_out(model).sum())
        values |= {name: attempt(conditional, share) for name, share in _SHARES.items()}
        results = {name: float(v) for name, v in values.items() if not isinstance(v, Exception)}
        if "lml" in results:
            results["bic"] = results["lml"] - 0.5 * count * math.log(n)
        return results

    def _refitted(self, name: str) -> float:
        """The log score of each fold under a model fitted to the others."""
        x, y = self._rows.x, self._rows.y
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(self._seed))
        total = 0.0
        for fold in range(_NUM_FOLDS):
            out = order[fold::_NUM_FOLDS]
            kept = torch.ones(len(y), dtype=torch.bool)
            kept[out] = False
            fit = Recipe(name, seed=self._seed).fit(x[kept], y[kept], progress=False)
            total += float(marginal_log_predictive(fit.model, x[out], y[out]).sum())
        return total


def _mixture(fits: list[_Fit], weights: ArrayLike = 1.0) -> StackedPrediction:
    means, deviations = [fit.mean for fit in fits], [fit.deviation for fit in fits]
    return normal(np.stack(means), np.stack(deviations), weights)
