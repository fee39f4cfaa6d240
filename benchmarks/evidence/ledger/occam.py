"""What the evidence is for: the dimension of nested linear models and of Bayesian PCA."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from sklearn.decomposition import PCA

from benchmarks.evidence.ledger.claims import (
    Claim,
    Experiment,
    array,
    graded,
    mean_and_error,
    with_error,
)
from gpclml.evaluation import log_marginal_likelihood
from gpclml.models import BayesianLinearModel

_COLUMNS, _TRUE, _NOISE = 8, 3, 0.25
_DIMENSIONS, _INTRINSIC, _SPREAD = 10, 5, 0.1
_SIZES = (20, 50, 100, 200, 500, 1000, 2000)
_SOURCE = "Lotfi et al. 2022, Section 3"
_claim = partial(Claim, _SOURCE)


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Dimensions that the evidence chooses, of linear models and of principal components.

    The linear models have the first k of 8 standard normal columns, k = 1, ..., 8, and prior
    variance one; three columns have standard normal weights, noise .25. The points of the other
    problem lie in ten dimensions: five with deviations 5, 4, ..., 1 and noise of deviation .1 in
    all, turned at random; Minka's (2001) Laplace evidence, as scikit-learn has it, chooses.

    Args:
        cell: ``seed`` of the data, ``sizes`` n.

    Returns:
        For each n: ``lml`` of the linear models, in total nats, and ``components``, the chosen
        number of principal components.
    """
    random = np.random.RandomState(cell["seed"])
    most = max(cell["sizes"])
    x = random.randn(most, _COLUMNS)
    y = x[:, :_TRUE] @ random.randn(_TRUE) + math.sqrt(_NOISE) * random.randn(most)
    # Five directions have variance, the others noise alone.
    deviations = np.concatenate([np.arange(_INTRINSIC, 0, -1), np.zeros(_DIMENSIONS - _INTRINSIC)])
    # Axes of the data are not those of the coordinates.
    turned = np.linalg.qr(random.randn(_DIMENSIONS, _DIMENSIONS))[0]
    points = (random.randn(most, _DIMENSIONS) * deviations) @ turned
    points += _SPREAD * random.randn(most, _DIMENSIONS)
    lml = []
    for n in cell["sizes"]:
        data = torch.tensor(x[:n]), torch.tensor(y[:n])
        models = [
            BayesianLinearModel(data[0][:, :k], data[1], prior_variance=1.0, noise=_NOISE)
            for k in range(1, _COLUMNS + 1)
        ]
        lml.append([float(log_marginal_likelihood(model).detach()) for model in models])
    components = [
        int(PCA("mle", svd_solver="full").fit(points[:n]).n_components_) for n in cell["sizes"]
    ]
    return {"lml": lml, "components": components}


def _right(cells: pandas.DataFrame) -> list[np.ndarray]:
    """By size, the share of data sets with the true dimension: linear models, then PCA."""
    chosen = array(cells["lml"]).argmax(-1) + 1 == _TRUE, array(cells["components"]) == _INTRINSIC
    return [right.mean(0) for right in chosen]


def _claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    sizes, lml, shares = cells["sizes"].iloc[0], array(cells["lml"]), _right(cells)
    texts = [
        ", ".join(f"{share:.2f} (n = {n})" for n, share in zip(sizes, right, strict=True))
        for right in shares
    ]
    right, components = shares
    yield _claim(
        "Of nested linear models that can all fit the data, the evidence chooses the one whose "
        "constraints are true, the more surely the more points.",
        "the constrained model",
        f"share of {len(cells)} data sets: {texts[0]}",
        graded(right[-1] >= 0.9, right[-1] > right[0]),
        rule="at least .9 with the most points, and more than with the fewest",
        doubt="Ours: a weight that happens to be near zero is not seen by so few points.",
    )
    lost = lml[..., _TRUE - 1] - lml[..., -1]  # by all the columns that say nothing
    slopes = np.polyfit(np.log(sizes), lost.T, 1)[0] / (_COLUMNS - _TRUE)
    error = mean_and_error(slopes)[1]
    yield _claim(
        "Each parameter that is not needed costs half the logarithm of n.",
        "1/2 (Schwarz 1978)",
        f"slope in log n of the LML lost, a parameter: {with_error(slopes, 3)}",
        graded(abs(slopes.mean() - 0.5) < 4 * error + 0.01),
        rule="within four standard errors and .01",
        kind="identity",
    )
    yield Claim(
        f"{_SOURCE}, after Minka 2001",
        "The evidence of Bayesian PCA finds the dimension of the data.",
        "the true dimension",
        f"5 of 10, share of {len(cells)} data sets: {texts[1]}",
        graded(min(components[2:], default=components[-1]) >= 0.9),
        rule="at least .9 from 100 points on",
    )


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    sizes = cells["sizes"].iloc[0]
    curves, shares = figure.subplots(1, 2)
    for n, values in zip(sizes, array(cells["lml"]).mean(0), strict=True):
        curves.plot(range(1, _COLUMNS + 1), values - values.max(), marker=".", label=f"n = {n}")
    curves.axvline(_TRUE, color="gray", linewidth=0.8)
    curves.set(xlabel="columns of the model", ylabel="mean LML below the best, nats", ylim=(-25, 1))
    curves.legend(fontsize=9)
    for right, label in zip(_right(cells), ("nested linear models", "Bayesian PCA"), strict=True):
        shares.semilogx(sizes, right, "o-", label=label)
    shares.set(xlabel="points n", ylabel="share of data sets with the true dimension")
    shares.legend(fontsize=9)


EXPERIMENT = Experiment(
    "occam", "What the evidence is for: the true dimension",
    lambda: [{"seed": seed, "sizes": _SIZES} for seed in range(100)], run_cell,
    _claims, _draw,
)  # fmt: skip
