"""The evidence as a sum over points: its first terms decide it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.evidence.ledger.claims import Claim, Experiment, array, differs, graded, with_error
from gpclml.evaluation import learning_curve
from gpclml.kernels import FourierFeatures
from gpclml.models import BayesianLinearModel

__all__ = ["EXPERIMENT"]

_MODELS = {
    "true": "the prior of the data", "vague": "a vague prior", "small": "three frequencies",
}  # fmt: skip
_FREQUENCIES, _SMALL = 9, 3
_NOISE = 0.5
_VAGUE = 1e4
_SOURCE = "Lotfi et al. 2022, Eq. 5, and the argument of Figure 4"


def _cells() -> list[dict[str, Any]]:
    common = {"experiment": "learning-curves", "points": 2000, "orders": 100}
    return [common | {"seed": seed} for seed in range(20)]


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Learning curves of three Fourier models of the same data.

    The data are a sum of sines and cosines of nine frequencies, weights drawn with deviation
    1 / d² at frequency d, at uniform points in [0, 10] with noise of deviation .5. The models: that
    prior; a vague one, of variance 1e4 for every weight; and a small model, of three frequencies
    and prior variance one.

    Args:
        cell: ``seed`` of the data, number of ``points`` and of ``orders``.

    Returns:
        For each model M: ``M``, the means over orders of log p(y_i | y_<i), in nats, and
        ``M_rmse`` of its prediction from all points to the function at even points.
    """
    x, y, even, function = _data(cell["seed"], cell["points"])
    result: dict[str, Any] = {}
    for name in _MODELS:
        model = _model(name, x, y)
        result[name] = learning_curve(model, cell["orders"]).mean(0).tolist()
        with torch.no_grad():
            error = model.predict(even, marginal=True).mean - function
        result[f"{name}_rmse"] = float(error.square().mean().sqrt())
    return result


def _data(seed: int, points: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = FourierFeatures(_FREQUENCIES)
    deviations = _true_variance().sqrt()
    weights = deviations * torch.randn(len(deviations), dtype=torch.float64, generator=generator)
    x = 10 * torch.rand(points, dtype=torch.float64, generator=generator)
    noise = _NOISE * torch.randn(points, dtype=torch.float64, generator=generator)
    even = torch.linspace(0, 10, 1000, dtype=torch.float64)
    y = features(x.unsqueeze(-1)) @ weights + noise
    return x, y, even, features(even.unsqueeze(-1)) @ weights


def _true_variance() -> Tensor:
    d = torch.arange(1, _FREQUENCIES + 1, dtype=torch.float64)
    return (1 / d**4).repeat(2)


def _model(name: str, x: Tensor, y: Tensor) -> BayesianLinearModel:
    variance = {"true": _true_variance(), "vague": _VAGUE, "small": 1.0}[name]
    features = FourierFeatures(_SMALL if name == "small" else _FREQUENCIES)
    return BayesianLinearModel(x, y, features, prior_variance=variance, noise=_NOISE**2)


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    return [_first_terms(cells), _reversed(cells)]


def _first_terms(cells: pandas.DataFrame) -> Claim:
    lml, early, late = (
        _gains(cells, "true", "vague", span_name) for span_name in ("all", "first", "last")
    )
    share, rmse = early / lml, cells["vague_rmse"] / cells["true_rmse"] - 1
    last = len(cells["true"].iloc[0]) // 10
    return Claim(
        _SOURCE,
        "What a vague prior loses in evidence it loses on the first points; later terms, which "
        "matter for predictions, hardly differ.",
        "the LML of a vague prior is far lower, its predictions are the same",
        f"true minus vague prior: LML {with_error(lml, 1)} nats, of which the first tenth of the "
        f"points has {with_error(100 * share, 1)} %, and the last tenth "
        f"{with_error(late, 3)} nats ({last} points); RMSE of the vague prior larger by "
        f"{with_error(100 * rmse, 1)} %",
        graded(
            differs(lml, 1), min(share) > 0.9, np.abs(late).max() < 0.01 * min(lml)
        ),
        rule="LML lower by two standard errors; on each data set more than 90 % of it in the first "
        "tenth and less than 1 % in the last",
        doubt="Ours: models and data are our own.",
        full_size=False,
    )  # fmt: skip


def _reversed(cells: pandas.DataFrame) -> Claim:
    lml, late = (_gains(cells, "vague", "small", span_name) for span_name in ("all", "last"))
    rmse = cells["vague_rmse"] - cells["small_rmse"]
    wrong = int(((lml < 0) & (late > 0)).sum())
    n = len(cells["true"].iloc[0])
    return Claim(
        _SOURCE,
        "The LML can prefer a worse model because of its first terms, whatever the later ones say.",
        "at n = 100 for Fourier models",
        f"with {n} points, vague prior minus too small a model: LML {with_error(lml, 1)} nats, "
        f"last tenth of the terms {with_error(late, 2)} nats, RMSE {with_error(rmse)}; so on "
        f"{wrong} of {len(cells)} data sets",
        graded(differs(lml, -1), differs(late, 1), differs(rmse, -1)),
        rule="LML lower, last terms higher and RMSE lower, by two standard errors",
        doubt="Ours: models and data are our own.",
        full_size=False,
    )


def _gains(cells: pandas.DataFrame, first: str, second: str, span_name: str) -> NDArray[np.float64]:
    """Sum of the differences of terms, over all points, the first or the last tenth."""
    terms = array(cells[first]) - array(cells[second])
    tenth = terms.shape[1] // 10
    span = {"all": slice(None), "first": slice(tenth), "last": slice(-tenth, None)}[span_name]
    return terms[:, span].sum(1)


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    terms, sums = figure.subplots(1, 2)
    means = {name: array(cells[name]).mean(0) for name in _MODELS}
    n = np.arange(1, len(means["true"]) + 1)
    for name, label in _MODELS.items():
        terms.semilogx(n, means[name], label=label)
    terms.set(xlabel="points seen", ylabel="log p(y | seen), nats")
    terms.legend()
    for name in ("vague", "small"):
        color = f"C{list(_MODELS).index(name)}"
        lost = (means[name] - means["true"]).cumsum()
        sums.semilogx(n, lost, color=color, label=_MODELS[name])
    sums.axhline(0, color="gray", linewidth=0.8)
    sums.set(xlabel="n", ylabel="LML minus that of the true prior")


EXPERIMENT = Experiment(
    "learning-curves", "The first points decide the evidence", _cells, run_cell, _claims, _draw
)
