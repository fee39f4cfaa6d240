"""Architectures against the number of points: who learns fast, and who ends best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.evidence.data import images
from benchmarks.evidence.networks import network
from benchmarks.evidence.training import (
    CLASSES,
    evidence_of_all,
    objective,
    outputs_at,
    predictive_scores,
    trained,
)
from gpclml.fit import fit_hyperparameters

__all__ = ["SIX", "run_size"]

SIX = ("mlp-8x1", "mlp-128x1", "mlp-32x3", "cnn-4x1", "cnn-16x2", "resnet-8x1")
"""The architectures that are compared."""


def run_size(cell: Mapping[str, Any]) -> dict[str, float]:
    """A network trained on the first n points, and how it predicts the next n.

    The log densities of the next points, added up over n = 25, 50, 100, ..., are the training
    speed in the sense of Lyle et al. (2020): what a log marginal likelihood is for an exact
    Bayesian, block by block.

    Args:
        cell: ``data``, ``architecture``, ``precision``, ``num_train`` (n), ``num_pool`` (of
            which these are the first), ``steps`` (of 100 points at most), ``seed``, ``device``.

    Returns:
        In nats a point: ``next_log_density`` of points n to 2 n where there are such, ``lml``
        with precisions fitted to it; accuracy, log density and calibration error at test points.
    """
    data = images(cell["data"], cell["num_pool"], cell["seed"], cell["device"])
    n = cell["num_train"]
    x, y = data.train_x[:n], data.train_y[:n]
    start = network(cell["architecture"], *x.shape[1:3], CLASSES, cell["seed"])
    start = start.to(cell["device"])
    epochs = max(1, cell["steps"] * 100 // max(n, 100))
    mll = trained(start, x, y, cell["precision"], epochs, cell["seed"])
    ahead = slice(n, 2 * n)
    next_x, next_y = data.train_x[ahead], data.train_y[ahead]
    following = {}
    if len(next_y) == n:
        at_next = outputs_at(start, next_x).unsqueeze(0)
        found = predictive_scores(mll, at_next, next_y, "next")
        following = {"next_log_density": found["log_density_next"]}
    fitted = objective(start, n, cell["precision"], "layer")
    outputs = outputs_at(start, data.test_x).unsqueeze(0)
    return {
        **following,
        "lml_fixed": float(evidence_of_all(mll, x, y)().detach()),
        "lml": fit_hyperparameters(fitted, x, y, batch_size=500).objective,
        **predictive_scores(mll, outputs, data.test_y, "map"),
    }
