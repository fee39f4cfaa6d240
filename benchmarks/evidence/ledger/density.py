"""The mean of a normal: a prior variance that the evidence prefers and predictions do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from torch.distributions import Normal

from benchmarks.evidence.ledger.claims import Claim, Experiment, graded
from gpclml.evaluation import log_marginal_likelihood
from gpclml.kernels import PolynomialFeatures
from gpclml.models import BayesianLinearModel

__all__ = ["EXPERIMENT"]

_NUM_TRAIN, _NUM_ALL = 40, 1000


def _cells() -> list[dict[str, Any]]:
    return [{"experiment": "density", "seed": 2}]


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    r"""Evidence and predictions of :math:`x_i \sim N(u, 1), u \sim N(0, \sigma^2)`.

    Args:
        cell: ``seed`` of the 1000 draws of N(1, 1), of which 40 are seen.

    Returns:
        Over prior variances .1 to 1000: ``lml`` of the 40 draws and ``test``, the mean log
        density of the others under the posterior predictive, in nats; ``lml_at_one``,
        ``mean_at_one`` and ``variance_at_one`` of the predictive at variance one.
    """
    draws = torch.tensor(np.random.RandomState(cell["seed"]).randn(_NUM_ALL) + 1)
    train, test = draws[:_NUM_TRAIN], draws[_NUM_TRAIN:]
    place = torch.zeros(_NUM_TRAIN, 1, dtype=torch.float64)

    def scores(variance: float) -> tuple[float, float, Normal]:
        model = BayesianLinearModel(
            place, train, PolynomialFeatures(0), prior_variance=variance, noise=1.0
        )
        predicted = model.predict(place[:1], marginal=True)
        normal = Normal(predicted.mean, predicted.stddev)
        lml = float(log_marginal_likelihood(model))
        return lml, float(normal.log_prob(test).mean()), normal

    with torch.no_grad():
        variances = np.logspace(-1, 3, 81).tolist()
        curves = [scores(variance)[:2] for variance in variances]
        lml, _, normal = scores(1.0)
    return {
        "variances": variances, "lml": [one for one, _ in curves],
        "test": [one for _, one in curves], "lml_at_one": lml, "mean_at_one": float(normal.mean),
        "variance_at_one": float(normal.variance),
    }  # fmt: skip


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    row = cells.iloc[0]
    best = np.argmax(row["lml"])
    variance = row["variances"][best]
    falls = bool((np.diff(row["lml"][best:]) < 0).all())
    rises = bool((np.diff(row["test"]) > 0).all())
    source = "Lotfi et al. 2022, Figures 4a-c and 11"
    return [
        Claim(
            source,
            "A wider prior has less evidence and predicts as well or better.",
            "LML largest near variance .6, then falling; test log density rising",
            f"LML largest at variance {variance:.2f}, then {'falling' if falls else 'not falling'}"
            f"; test log density {'rises throughout' if rises else 'does not rise throughout'}",
            graded(falls, rises, 0.4 < variance < 0.9),
        ),
        Claim(
            source,
            "At prior N(0, 1): evidence, and predictive mean and variance.",
            "-60.350350; .771763826; 1.024390244",
            f"{row['lml_at_one']:.6f}; {row['mean_at_one']:.9f}; {row['variance_at_one']:.9f}",
            graded(
                abs(row["lml_at_one"] + 60.350350) < 1e-6,
                abs(row["mean_at_one"] - 0.771763826) < 1e-9,
                abs(row["variance_at_one"] - 1.024390244) < 1e-9,
            ),
        ),
    ]


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    row = cells.iloc[0]
    axes = figure.subplots(1, 2)
    for one, name, label in zip(
        axes, ("lml", "test"), ("LML, nats", "test log density, nats a point"), strict=True
    ):
        one.semilogx(row["variances"], row[name])
        one.set_xlabel("prior variance")
        one.set_ylabel(label)


EXPERIMENT = Experiment(
    "density", "Density estimation: a prior that is too narrow wins", _cells, run_cell, _claims,
    _draw,
)  # fmt: skip
"""Lotfi et al. (2022), Figures 4a-c and 11."""
