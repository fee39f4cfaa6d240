"""One cell: one optimization of a test function."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.bo.surrogates import feature_share, fitted, initial_points, make_problem
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
    from botorch.acquisition import LogExpectedImprovement, PosteriorMean

    problem, iterations = make_problem(cell["function"]), cell["iterations"]
    x = initial_points(problem.dim, cell["seed"])
    model: Any = None
    y, initial = problem.values(x), len(x)
    places, inferred, fit_seconds, acquisition_seconds = [], [], 0.0, 0.0
    # BoTorch's optimizers draw from the global generator, which is given back as it was.
    with noting_failed_fits() as failed, torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell["seed"])  # BoTorch draws starts of its optimizers from it
        for done in range(iterations + 1):
            start = time.perf_counter()
            model = fitted(
                cell["surrogate"], cell["objective"], x, y, steps=cell["steps"], seed=cell["seed"],
                # Every fifth fit starts anew, so that no local optimum is kept for good.
                before=model, anew=done % _ANEW == 0,
            )  # fmt: skip
            fit_seconds += time.perf_counter() - start
            if done % _RECORDS == 0 or done == iterations:
                places.append(float(done))
                points = torch.cat([x, _maximum(PosteriorMean(model), problem.dim)])
                with torch.no_grad():
                    best = model.posterior(points).mean[:, 0].argmax()
                inferred.append(float(problem.regrets(points[best : best + 1])))
            if done < iterations:
                start = time.perf_counter()
                point = _maximum(LogExpectedImprovement(model, best_f=y.max()), problem.dim)
                acquisition_seconds += time.perf_counter() - start
                x, y = torch.cat([x, point]), torch.cat([y, problem.values(point)])
    # The best so far; the initial points together count as evaluation zero.
    regrets = problem.regrets(x).cummin(0).values[initial - 1 :]
    return {
        "simple_regret": float(regrets[-1]), "inference_regret": inferred[-1],
        "simple_regret_at": regrets.tolist(), "inference_at": places,
        "inference_regret_at": inferred, "feature_share": feature_share(model),
        "fit_seconds": fit_seconds, "acquisition_seconds": acquisition_seconds,
        "failed_fits": float(len(failed)),
    }  # fmt: skip


def _maximum(function: Any, dim: int) -> Tensor:
    """The best point of the cube that is found."""
    from botorch.exceptions import BadInitialCandidatesWarning, OptimizationWarning
    from botorch.optim import optimize_acqf

    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, dim)
    with warnings.catch_warnings():  # the best point so far will do
        warnings.simplefilter("ignore", OptimizationWarning)
        warnings.simplefilter("ignore", BadInitialCandidatesWarning)
        return optimize_acqf(
            function, bounds, 1, _RESTARTS, _RAW_SAMPLES, options=_OPTIONS,
            retry_on_optimization_warning=False,
        )[0]  # fmt: skip
