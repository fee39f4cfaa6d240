"""Choice among linear models by training speed: its bounds beside the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.evidence.ledger.claims import (
    Claim,
    Experiment,
    array,
    differs,
    graded,
    rank_correlations,
    with_error,
)
from benchmarks.evidence.ledger.linear_problems import PROBLEMS, image_source, linear_models
from gpclml.evaluation import learning_curve
from gpclml.evidence.training_speed import (
    posterior_divergences,
    training_speed,
    training_speed_by_descent,
)
from gpclml.linalg.gaussians import DiagonalGaussian, gaussian_kl, linear_posterior
from gpclml.models import BayesianLinearModel

__all__ = ["EXPERIMENT"]

_POINTS = {"variance": 50, "frequency": 60, "features": 60, "features, one prior": 60}
_NAMES = {
    "expected": "L", "multi_sample": "L_k", "gaussian": "L_S", "descent": "L by descent",
}  # fmt: skip
_SOURCE = "Lyle et al. 2020, Figures 1 and 2"


def _cells() -> list[dict[str, Any]]:
    return [
        {
            "experiment": "training-speed-linear", "problem": problem, "seed": seed,
            "data": image_source() if problem == "frequency" else "drawn",
            "num_points": _POINTS[problem], "repeats": 50, "steps": 100,
        }
        for problem in PROBLEMS
        for seed in range(10)
    ]  # fmt: skip


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence of models of one problem and what training speed says of it.

    The points come in the order of the data. Exact draws are 10 at a point, repeated; descent
    trains 20 draws.

    Args:
        cell: ``problem``, ``seed``, ``data`` and ``num_points`` of
            :func:`~benchmarks.evidence.ledger.linear_problems.linear_models`; ``repeats`` of the
            exact draws; ``steps`` of descent after each point.

    Returns:
        Over ``setting``, what the models differ in, in total nats: ``lml``; ``expected``, L in
        closed form; ``multi_sample`` and ``gaussian``, L_10 and L_S by exact draws, ``lower`` and
        ``descent``, L by exact draws and by descent, each with its ``_error``; ``kl``, the sum
        of divergences of consecutive posteriors of the weights. Over points, ``lml_terms`` and
        ``expected_terms`` of the model of most evidence.
    """
    models = linear_models(cell["problem"], cell["seed"], cell["num_points"], cell["data"])
    rows = [_scores(model, cell) for model in models.values()]
    result = {name: [row[name] for row in rows] for name in rows[0]}
    best = list(models.values())[np.argmax(result["lml"])]
    return {"setting": list(models), **result, **_terms(best)}


def _scores(model: BayesianLinearModel, cell: Mapping[str, Any]) -> dict[str, float]:
    x, y = _data(model)
    seed = 100 + cell["seed"]  # not that of the data
    order = torch.arange(len(y)).unsqueeze(0)
    exact = training_speed(model, 10, orderings=order, repeats=cell["repeats"], seed=seed)
    descent = training_speed_by_descent(
        model.features(x).detach(), y, model.prior_variance.detach(), model.noise.item(), 10,
        steps=cell["steps"], repeats=2, seed=seed,
    ).lower  # fmt: skip
    scores = {
        "lml": exact.log_marginal_likelihood,
        "expected": exact.expected.value,
        "kl": _divergences_of_weights(model),
    }
    for name, estimate in (
        ("lower", exact.lower), ("multi_sample", exact.multi_sample),
        ("gaussian", exact.gaussian), ("descent", descent),
    ):  # fmt: skip
        scores |= {name: estimate.value, f"{name}_error": estimate.standard_error}
    return scores


def _divergences_of_weights(model: BayesianLinearModel) -> float:
    """Sum of the divergences of each posterior of the weights from the next, prior first.

    From the Gaussians themselves, by none of the estimators' code.
    """
    x, y = _data(model)
    with torch.no_grad():
        features, prior = model.features(x), model.prior_variance
        before = DiagonalGaussian(torch.zeros_like(prior), prior)
        total = 0.0
        for i in range(1, len(y) + 1):
            after = linear_posterior(features[:i], y[:i], prior, model.noise.expand(i))
            total += float(gaussian_kl(before, after))
            before = after
    return total


def _terms(model: BayesianLinearModel) -> dict[str, list[float]]:
    order = torch.arange(len(_data(model)[1])).unsqueeze(0)
    with torch.no_grad():
        lml = learning_curve(model, order)[0]
    expected = lml - posterior_divergences(model, order)[0]
    return {"lml_terms": lml.tolist(), "expected_terms": expected.tolist()}


def _data(model: BayesianLinearModel) -> tuple[Tensor, Any]:
    assert model.train_inputs is not None
    return model.train_inputs[0], model.train_targets


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    claims = [
        _ranking(problem, some)
        for problem in ("variance", "frequency", "features")
        if len(some := cells[cells["problem"] == problem])
    ]
    claims += [_gap(cells), _order(cells), _by_descent(cells)]
    one_prior = cells[cells["problem"] == "features, one prior"]
    if len(one_prior):
        claims.insert(-2, _growth(one_prior, cells[cells["problem"] == "features"]))
    return claims


def _ranking(problem: str, cells: pandas.DataFrame) -> Claim:
    best = {name: array(cells[name]).argmax(1) for name in ("lml", *_NAMES)}
    ranks = {name: rank_correlations(cells["lml"], cells[name]) for name in _NAMES}
    wins = {name: int((best[name] == best["lml"]).sum()) for name in _NAMES}
    found = "; ".join(
        f"{label} {with_error(ranks[name], 2)}, {wins[name]} of {len(cells)}"
        for name, label in _NAMES.items()
    )
    images = f" ({' and '.join(sorted(cells['data'].unique()))})" if problem == "frequency" else ""
    return Claim(
        _SOURCE,
        f"L and the LML rank models alike: {PROBLEMS[problem]}{images}.",
        "the same ranking by the LML, by L with exact draws, and by descent",
        f"rank correlation with the LML, and how often the same model is best: {found}",
        graded(ranks["expected"].mean() >= 0.9, wins["expected"] >= 0.75 * len(cells)),
        "Alike is taken to mean a mean rank correlation of L with the LML of at least .9, and the "
        "same best model on three of four data sets.",
    )


def _gap(cells: pandas.DataFrame) -> Claim:
    lml, expected, kl = (_flat(cells, name) for name in ("lml", "expected", "kl"))
    worst = float((abs(lml - expected - kl) / kl).max())
    return Claim(
        "Lyle et al. 2020, Proposition 3.1 and Eq. 6",
        "The LML exceeds L by the sum of the divergences KL of each posterior from the next.",
        "equal",
        f"largest relative difference {worst:.1g} over {len(lml)} models and data sets",
        graded(worst < 1e-6),
        "The divergences are those of the Gaussians of the weights, by other code than L.",
    )


def _growth(cells: pandas.DataFrame, own_prior: pandas.DataFrame) -> Claim:
    gap = array(cells["lml"]) - array(cells["expected"])
    steps = np.diff(gap).T
    remark = ""
    if len(own_prior):
        other = array(own_prior["lml"]) - array(own_prior["expected"])
        remark = (
            "With the prior variance 1/k² of k features, as in the authors' script, it goes from "
            f"{with_error(other[:, 0], 1)} to {with_error(other[:, -1], 1)} nats."
        )
    return Claim(
        "Lyle et al. 2020, Figure 5",
        "The gap LML - L grows with the number of features.",
        "grows",
        f"{with_error(gap[:, 0], 1)} nats with {cells['setting'].iloc[0][0]} features, "
        f"{with_error(gap[:, -1], 1)} with {cells['setting'].iloc[0][-1]}, each step up: "
        + ", ".join(with_error(step, 1) for step in steps),
        graded(*(differs(step, 1) for step in steps)),
        remark,
    )


def _order(cells: pandas.DataFrame) -> Claim:
    names = ("lml", "expected", "multi_sample", "multi_sample_error")
    lml, expected, multi, error = (_flat(cells, name) for name in names)
    above = int(((multi - expected < -4 * error) | (lml - multi < -4 * error)).sum())
    share = (multi - expected) / (lml - expected)
    return Claim(
        "Lyle et al. 2020, Section 3.1",
        "In expectation L <= L_k <= LML, k = 10.",
        "holds for every model",
        f"violated beyond 4 standard errors by {above} of {len(lml)} models and data sets; "
        f"L_10 closes {100 * share.mean():.0f}% of the gap on average",
        graded(above == 0),
    )


def _by_descent(cells: pandas.DataFrame) -> Claim:
    names = ("expected", "descent", "descent_error")
    expected, descent, error = (_flat(cells, name) for name in names)
    near = float((abs(descent - expected) < 3 * error).mean())
    ranks = rank_correlations(cells["expected"], cells["descent"])
    return Claim(
        _SOURCE,
        "L by draws that gradient descent trains is L by exact draws.",
        "the two agree",
        f"within 3 standard errors of the closed form for {100 * near:.0f}% of {len(error)} "
        f"models and data sets; rank correlation with it {with_error(ranks)}",
        graded(near >= 0.95, ranks.mean() >= 0.95),
    )


def _flat(cells: pandas.DataFrame, name: str) -> NDArray[np.float64]:
    """Of every model and data set."""
    return np.concatenate([np.array(row) for row in cells[name]])


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    problems = [name for name in PROBLEMS if (cells["problem"] == name).any()]
    axes = figure.subplots(1, len(problems) + 1)
    for one, problem in zip(axes, problems, strict=False):
        _draw_problem(one, cells[cells["problem"] == problem], problem)
    axes[0].set_ylabel("nats a point")
    axes[0].legend(fontsize=7)
    _draw_terms(axes[-1], cells[cells["problem"] == problems[-1]])


def _draw_problem(axes: Axes, cells: pandas.DataFrame, problem: str) -> None:
    n = cells["num_points"].iloc[0]
    setting = cells["setting"].iloc[0]
    lowest = []
    for name, label in {"lml": "LML", **_NAMES}.items():
        values = array(cells[name]) / n
        style = "--" if name == "descent" else "-"
        axes.plot(setting, values.mean(0), style, marker=".", label=label)
        lowest.append(float(np.median(values.mean(0))))
    top = max(array(cells["lml"]).mean(0)) / n
    axes.set(xlabel=PROBLEMS[problem], ylim=(top - 2.5 * (top - min(lowest)) - 0.2, top + 0.2))
    if problem in ("variance", "frequency"):
        axes.set_xscale("log", base=2)
    if problem == "features, one prior":
        axes.set_xlabel("number of features, one prior")


def _draw_terms(axes: Axes, cells: pandas.DataFrame) -> None:
    for name, label in (("lml_terms", "LML"), ("expected_terms", "L")):
        mean = array(cells[name]).mean(0)
        axes.plot(range(1, len(mean) + 1), mean, label=label)
    axes.set(xlabel="point (one prior, best model)", ylabel="change by the point, nats")
    axes.legend(fontsize=7)


EXPERIMENT = Experiment(
    "training-speed-linear", "Linear models chosen by training speed", _cells, run_cell, _claims,
    _draw, size=(13.5, 3.0), modules=("benchmarks.evidence.ledger.linear_problems",),
)  # fmt: skip
"""Lyle et al. (2020), Figures 1, 2 left and 5, Proposition 3.1."""
