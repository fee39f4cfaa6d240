"""Weights of a linear combination of linear models, under three ways of drawing parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.evidence.ledger.claims import (
    Claim,
    Experiment,
    best_place,
    differs,
    graded,
    less,
    rank_correlation,
    with_error,
)
from benchmarks.evidence.ledger.linear_problems import PROBLEMS, linear_models
from gpclml.evaluation import log_marginal_likelihood
from gpclml.evidence.training_speed import (
    expected_combination,
    model_predictions,
    sampled_combination,
    training_speed,
)

__all__ = ["EXPERIMENT"]

_SCHEMES = ("concurrent", "posterior", "prior")
_SETTINGS = {  # points and passes over them, as in the authors' scripts
    "variance": (50, 2),
    "features": (60, 12),
    "features, one prior": (60, 12),
}
_LEARNING_RATE = 0.005
_SOURCE = "Lyle et al. 2020, Section 4.1 and Figure 3"


def _cells() -> list[dict[str, Any]]:
    return [
        {
            "experiment": "model-combination", "problem": problem, "seed": seed,
            "num_points": points, "passes": passes,
        }
        for problem, (points, passes) in _SETTINGS.items()
        for seed in range(20)
    ]  # fmt: skip


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Weights that descent learns from draws of all models' predictions.

    Weights start at 1 / M; the learning rate is .005, as in the authors' scripts. Their steps at a
    point follow one another, those here are a pass over the points apart.

    Args:
        cell: ``problem``, ``seed`` and ``num_points`` of
            :func:`~benchmarks.evidence.ledger.linear_problems.linear_models`; ``passes``.

    Returns:
        Over ``setting``, what the models differ in: ``lml`` and ``expected``, L, in total nats;
        ``fit``, the mean squared error on the training points under the posterior; for each
        scheme, its weights of one run and, with ``_mean``, their expectation.
    """
    models = linear_models(cell["problem"], cell["seed"], cell["num_points"])
    several = list(models.values())
    order = torch.arange(cell["num_points"]).unsqueeze(0)
    options = {"learning_rate": _LEARNING_RATE, "passes": cell["passes"]}
    result: dict[str, Any] = {
        "setting": list(models),
        "lml": [float(log_marginal_likelihood(one).detach()) for one in several],
        "expected": [
            training_speed(one, 2, orderings=order, repeats=1).expected.value for one in several
        ],
    }
    for scheme in _SCHEMES:
        predictions = model_predictions(several, scheme)
        drawn = sampled_combination(predictions, seed=100 + cell["seed"], **options)
        result[scheme] = drawn.weights[0].tolist()
        result[f"{scheme}_mean"] = expected_combination(predictions, **options).weights.tolist()
        if scheme == "posterior":
            errors = predictions.means - predictions.target.unsqueeze(-1)
            result["fit"] = (errors.square() + predictions.variances).mean(0).tolist()
    return result


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    parts = _parts(cells)
    return [_concurrent(parts), _compared(parts), _flexible(parts), _prior(parts)]


def _parts(cells: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    named = {name: cells[cells["problem"] == name] for name in _SETTINGS}
    return {name: some for name, some in named.items() if len(some)}


def _correlations(cells: pandas.DataFrame, scheme: str, score: str = "lml") -> list[float]:
    return [rank_correlation(*both) for both in zip(cells[score], cells[scheme], strict=True)]


def _concurrent(parts: Mapping[str, pandas.DataFrame]) -> Claim:
    found, holds = [], []
    for name, cells in parts.items():
        ranks = _correlations(cells, "concurrent")
        pairs = zip(cells["lml"], cells["concurrent_mean"], strict=True)
        wins = sum(best_place(lml) == best_place(weights) for lml, weights in pairs)
        found.append(
            f"{name} {with_error(ranks, 2)} (expected weights "
            f"{with_error(_correlations(cells, 'concurrent_mean'), 2)}, with L instead "
            f"{with_error(_correlations(cells, 'concurrent_mean', 'expected'), 2)}; the same model "
            f"first on {wins} of {len(cells)} data sets)"
        )
        holds.append(differs(ranks, 1))
    return Claim(
        _SOURCE,
        "Weights learned from draws that are concurrent with the data follow the LML.",
        "the largest weight at the model of most evidence",
        "rank correlation with the LML: " + "; ".join(found),
        graded(*holds),
    )


def _compared(parts: Mapping[str, pandas.DataFrame]) -> Claim:
    found, holds = [], []
    for name, cells in parts.items():
        concurrent = _correlations(cells, "concurrent")
        for scheme in ("posterior", "prior"):
            other = _correlations(cells, scheme)
            gain = less(concurrent, other)
            found.append(f"{name}, {scheme} draws {with_error(gain, 2)}")
            holds.append(differs(gain, 1))
    return Claim(
        _SOURCE,
        "Concurrent draws follow the LML more closely than draws from the posterior or the prior.",
        "only concurrent draws do",
        "gain in rank correlation over " + "; ".join(found),
        graded(*holds),
    )


def _flexible(parts: Mapping[str, pandas.DataFrame]) -> Claim:
    found, holds = [], []
    for name, cells in parts.items():
        gains = {scheme: _gains(cells, name, scheme) for scheme in ("posterior", "concurrent")}
        fits = [
            rank_correlation([-error for error in fit], weights)
            for fit, weights in zip(cells["fit"], cells["posterior_mean"], strict=True)
        ]
        found.append(
            f"{name} {with_error(gains['posterior'])} with posterior, "
            f"{with_error(gains['concurrent'])} with concurrent draws (rank correlation of "
            f"posterior weights with the fit {with_error(fits, 2)})"
        )
        holds.append(differs(gains["posterior"], 1))
    return Claim(
        _SOURCE,
        "Draws from the posterior give the most flexible model more weight than that of most "
        "evidence.",
        "weight rises with flexibility",
        "expected weight of the most flexible model less that of the model of most evidence: "
        + "; ".join(found),
        graded(*holds),
    )


def _gains(cells: pandas.DataFrame, problem: str, scheme: str) -> list[float]:
    flexible = 0 if problem == "variance" else -1  # the widest prior, or all features
    return [
        weights[flexible] - weights[best_place(lml)]
        for weights, lml in zip(cells[f"{scheme}_mean"], cells["lml"], strict=True)
    ]


def _prior(parts: Mapping[str, pandas.DataFrame]) -> Claim:
    ranks = {name: _correlations(cells, "prior") for name, cells in parts.items()}
    expected = {name: _correlations(cells, "prior_mean") for name, cells in parts.items()}
    return Claim(
        _SOURCE,
        "Weights learned from draws of the prior say nothing of the evidence.",
        "no relation",
        "rank correlation with the LML: "
        + "; ".join(
            f"{name} {with_error(ranks[name], 2)} (expected weights "
            f"{with_error(expected[name], 2)})"
            for name in parts
        ),
        graded(*(not differs(values, sign) for values in ranks.values() for sign in (1, -1))),
        "Weights under the prior decay towards zero, the faster the larger the variance of a "
        "model's predictions: they have an order, though one that knows no target.",
    )


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    parts = _parts(cells)
    for axes, (name, some) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts.items()):  # noqa: B905
        _draw_problem(axes, some, name)
    figure.axes[0].set_ylabel("weight")
    figure.axes[0].legend(fontsize=7)


def _draw_problem(axes: Axes, cells: pandas.DataFrame, problem: str) -> None:
    setting = cells["setting"].iloc[0]
    for scheme in _SCHEMES:
        weights = np.array(cells[scheme].tolist())
        mean, deviation = weights.mean(0), weights.std(0)
        (line,) = axes.plot(setting, mean, marker=".", label=f"{scheme} draws")
        axes.fill_between(
            setting, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.15
        )
    axes.set_xlabel(PROBLEMS[problem] + (", one prior" if "one" in problem else ""))
    if problem == "variance":
        axes.set_xscale("log", base=4)
    right = axes.twinx()
    right.plot(setting, np.array(cells["lml"].tolist()).mean(0), "k:", marker=".")
    right.set_ylabel("LML, nats (dotted)")


EXPERIMENT = Experiment(
    "model-combination", "Weights of a combination of linear models", _cells, run_cell, _claims,
    _draw, size=(13.0, 3.2), modules=("benchmarks.evidence.ledger.linear_problems",),
)  # fmt: skip
"""Lyle et al. (2020), Section 4.1 and Figure 3."""
