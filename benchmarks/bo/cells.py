"""One cell: one optimization of a test function."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.bo.surrogates import Problem, feature_share, fitted, initial_points, make_problem
from benchmarks.uci.training import noting_failed_fits

_RESTARTS, _RAW_SAMPLES = 4, 64  # of the acquisition function's optimization
_OPTIONS = {"maxiter": 20, "sample_around_best": True}
_RECORDS = 5  # evaluations from one record of the inference regret to the next
_ANEW = 5  # evaluations from one fit of hyperparameters from their start to the next

Metrics = dict[str, float | list[float]]


def run_cell(cell: Mapping[str, Any]) -> Metrics:
    """Maximizes a test function, one evaluation at a time, by ``LogExpectedImprovement``.

    Args:
        cell: Its configuration: ``function``, ``surrogate``, ``objective``, ``seed`` (of initial
            points, network, held-out points and acquisition), ``iterations`` (evaluations after
            the initial ones) and ``steps`` (of Adam at each fit; None without a network).

    Returns:
        - ``simple_regret_at``: the largest value less the best one seen, after 0, 1, ...
          evaluations beside the initial ones; ``simple_regret``: at the end;
        - ``inference_regret_at``: the regret of the point with the highest posterior mean, among
          the points seen and one found by optimization over the cube, after ``inference_at``
          evaluations; ``inference_regret``: at the end;
        - ``feature_share``: see :func:`benchmarks.bo.surrogates.feature_share`, at the end;
        - ``failed_fits``: number of fits that stopped early and kept what they had;
        - ``fit_seconds``, ``acquisition_seconds``: wall time of all fits, and of choosing points.
    """
    problem = make_problem(cell["function"])
    # BoTorch's optimizers draw from the global generator, which is given back as it was.
    with noting_failed_fits() as failed, torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell["seed"])  # BoTorch draws starts of its optimizers from it
        metrics = _Run(problem, cell).metrics()
    return metrics | {"failed_fits": float(len(failed))}


class _Run:
    """An optimization with its surrogate and its clocks."""

    def __init__(self, problem: Problem, cell: Mapping[str, Any]) -> None:
        self.problem = problem
        self.cell = cell
        self.x = initial_points(problem.dim, cell["seed"])
        self.y = problem.values(self.x)
        self.model: Any = None
        self.fit_seconds = self.acquisition_seconds = 0.0

    def metrics(self) -> Metrics:
        initial, iterations = len(self.x), self.cell["iterations"]
        places, inferred = [], []
        for done in range(iterations + 1):
            # Every fifth fit starts anew, so that no local optimum is kept for good.
            self._fit(anew=done % _ANEW == 0)
            if done % _RECORDS == 0 or done == iterations:
                places.append(float(done))
                inferred.append(float(self.problem.regrets(self._best_predicted())))
            if done < iterations:
                self._evaluate(self._next_point())
        # The best so far; the initial points together count as evaluation zero.
        regrets = self.problem.regrets(self.x).cummin(0).values[initial - 1 :]
        return {
            "simple_regret": float(regrets[-1]), "inference_regret": inferred[-1],
            "simple_regret_at": regrets.tolist(), "inference_at": places,
            "inference_regret_at": inferred, "feature_share": feature_share(self.model),
            "fit_seconds": self.fit_seconds, "acquisition_seconds": self.acquisition_seconds,
        }  # fmt: skip

    def _fit(self, anew: bool) -> None:
        start = time.perf_counter()
        self.model = fitted(
            self.cell["surrogate"], self.cell["objective"], self.x, self.y,
            steps=self.cell["steps"], seed=self.cell["seed"], before=self.model,
            anew=anew,
        )  # fmt: skip
        self.fit_seconds += time.perf_counter() - start

    def _next_point(self) -> Tensor:
        from botorch.acquisition import LogExpectedImprovement

        start = time.perf_counter()
        point = self._optimized(LogExpectedImprovement(self.model, best_f=self.y.max()))
        self.acquisition_seconds += time.perf_counter() - start
        return point

    def _best_predicted(self) -> Tensor:
        from botorch.acquisition import PosteriorMean

        points = torch.cat([self.x, self._optimized(PosteriorMean(self.model))])
        with torch.no_grad():
            best = self.model.posterior(points).mean[:, 0].argmax()
        return points[best : best + 1]

    def _optimized(self, function: Any) -> Tensor:
        from botorch.exceptions import BadInitialCandidatesWarning, OptimizationWarning
        from botorch.optim import optimize_acqf

        bounds = torch.tensor([[0.0], [1.0]]).expand(2, self.problem.dim).to(self.x)
        with warnings.catch_warnings():  # the best point so far will do
            warnings.simplefilter("ignore", OptimizationWarning)
            warnings.simplefilter("ignore", BadInitialCandidatesWarning)
            return optimize_acqf(
                function, bounds, 1, _RESTARTS, _RAW_SAMPLES, options=_OPTIONS,
                retry_on_optimization_warning=False,
            )[0]  # fmt: skip

    def _evaluate(self, point: Tensor) -> None:
        self.x = torch.cat([self.x, point])
        self.y = torch.cat([self.y, self.problem.values(point)])
