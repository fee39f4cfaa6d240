"""The shape of a rational quadratic kernel where the noise is over-estimated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
from gpytorch.kernels import RQKernel, ScaleKernel
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
from gpclml.conditioning import RandomOrderings
from gpclml.evaluation import (
    conditional_log_marginal_likelihood,
    joint_log_predictive,
    learning_curve,
    log_marginal_likelihood,
)
from gpclml.models import GPRegression

__all__ = ["EXPERIMENT"]

_OUTPUTSCALE, _LENGTHSCALE, _TRUE_ALPHA = math.log(2), 0.3, 0.05
_TRUE_NOISE, _OVERESTIMATED = 0.01, 0.04
_NUM_TRAIN, _NUM_ALL, _NUM_CONDITIONED = 50, 200, 45
_PAPER_SEED = 22
_SHAPES = (0.001, 0.01, 0.1, 0.3)
_SOURCE = "Lotfi et al. 2022, Figures 8b and 23, Appendix H"
_claim = partial(Claim, _SOURCE)


def _cells() -> list[dict[str, Any]]:
    return [
        {
            "seed": seed, "paper": paper, "noise": noise,
            "alphas": 300 if paper else 60, "orders": 1000, "curves": 100,
        }
        for noise in (_OVERESTIMATED, _TRUE_NOISE)
        for seed, paper in [(_PAPER_SEED, True), *((seed, False) for seed in range(30))]
    ]  # fmt: skip


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    r"""Scores of kernels :math:`s (1 + r^2 / (2 \alpha l^2))^{-\alpha}` over :math:`\alpha`.

    The data are 50 of 200 even points in [0, 1] of a function drawn from that kernel, with s =
    log 2, l = .3 and shape .05, plus noise of variance .01; the other 150 are for testing. The
    models know s and l (Appendix H).

    Args:
        cell: ``seed`` of the data; ``paper``, whether they are those of the authors; ``noise``
            variance of the models, number of ``alphas`` between .001 and .3 as in the paper,
            ``orders`` of the CLML and ``curves``, those of the learning curves.

    Returns:
        Over ``alpha``: ``lml``, ``clml`` (m = 45, the mean over orders), ``test``, the joint log
        density of the test points, all in nats, and ``rmse`` to the function there. ``shapes``,
        for four shapes the LML of the first n of all 200 points, the mean over orders, and
        ``leads`` with ``leads_error``, that of the smallest shape less the others.
    """
    x, y, function = _data_of_paper() if cell["paper"] else _data(cell["seed"])
    alphas = torch.linspace(0.001, 0.3, cell["alphas"], dtype=x.dtype)
    train, test = slice(_NUM_TRAIN), slice(_NUM_TRAIN, None)
    model = _models(x[train], y[train], alphas, cell["noise"])
    orders = RandomOrderings(cell["orders"], _NUM_CONDITIONED, seed=0)
    every_x, every_y = (values.expand(len(alphas), *values.shape) for values in (x[test], y[test]))
    with torch.no_grad():
        error = model.predict(every_x, marginal=True).mean - function[test]
    shapes = torch.tensor(_SHAPES, dtype=x.dtype)
    curves = learning_curve(_models(x, y, shapes, cell["noise"]), cell["curves"]).cumsum(-1)
    # Shapes share each order, so that differences have small errors.
    leads = curves[:1] - curves[1:]
    return {
        "alpha": alphas.tolist(),
        "lml": log_marginal_likelihood(model).tolist(),
        "clml": conditional_log_marginal_likelihood(model, orders).mean(-1).tolist(),
        "test": joint_log_predictive(model, every_x, every_y).tolist(),
        "rmse": error.square().mean(-1).sqrt().tolist(),
        "shapes": curves.mean(-2).tolist(),
        "leads": leads.mean(-2).tolist(),
        "leads_error": (leads.std(-2) / math.sqrt(cell["curves"])).tolist(),
    }


def _data_of_paper() -> tuple[Tensor, Tensor, Tensor]:
    """The authors' draw, in float32 from global generators, to within .002."""
    places = np.linspace(0.0, 1.0, _NUM_ALL)
    np.random.RandomState(_PAPER_SEED).shuffle(places)
    x = torch.from_numpy(places).float().unsqueeze(-1)
    squared = (x - x.mT).square() / (2 * _TRUE_ALPHA * _LENGTHSCALE**2)
    covariance = _OUTPUTSCALE * (1 + squared) ** -_TRUE_ALPHA
    # Float32 and the authors' jitter: without them the draw is another.
    root = torch.linalg.cholesky(covariance + 1e-5 * torch.eye(_NUM_ALL))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_PAPER_SEED)
        function = (root @ torch.randn(_NUM_ALL, 1)).squeeze(-1)
        y = function + math.sqrt(_TRUE_NOISE) * torch.randn(_NUM_ALL)
    return x.double(), y.double(), function.double()


def _data(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 1, _NUM_ALL, dtype=torch.float64)
    x = x[torch.randperm(_NUM_ALL, generator=generator)].unsqueeze(-1)
    squared = (x - x.mT).square() / (2 * _TRUE_ALPHA * _LENGTHSCALE**2)
    covariance = _OUTPUTSCALE * (1 + squared) ** -_TRUE_ALPHA
    root = torch.linalg.cholesky(covariance + 1e-10 * torch.eye(_NUM_ALL, dtype=x.dtype))
    # The function and its noise.
    draws = torch.randn(2, _NUM_ALL, dtype=x.dtype, generator=generator)
    function = root @ draws[0]
    return x, function + math.sqrt(_TRUE_NOISE) * draws[1], function


def _models(x: Tensor, y: Tensor, alphas: Tensor, noise: float) -> GPRegression:
    """A batch of models, one for each alpha."""
    batch = alphas.shape
    kernel = ScaleKernel(RQKernel(batch_shape=batch), batch_shape=batch)
    x, y = x.expand(*batch, *x.shape), y.expand(*batch, *y.shape)
    model = GPRegression(x, y, kernel=kernel, mean="zero", standardize=False)
    kernel.outputscale = _OUTPUTSCALE
    kernel.base_kernel.lengthscale = _LENGTHSCALE
    kernel.base_kernel.alpha = alphas.unsqueeze(-1)
    model.likelihood.noise = noise
    return model


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    claims = []
    over = cells[cells["noise"] == _OVERESTIMATED]
    paper_cells, others = (over[over["paper"] == paper] for paper in (True, False))
    if len(paper_cells):
        claims += [_on_paper_data(paper_cells), _shapes(paper_cells)]
    if len(others):
        claims += [_correlations(others), _choices(others)]
    exact = cells[(cells["noise"] == _TRUE_NOISE) & cells["paper"].ne(True)]
    if len(exact):
        claims.append(_adequate(exact))
    return claims


def _on_paper_data(cells: pandas.DataFrame) -> Claim:
    lml, clml = (float(_correlation(cells, name)[0]) for name in ("lml", "clml"))
    row = cells.iloc[0]
    chosen = {name: row["alpha"][int(np.argmax(row[name]))] for name in ("lml", "clml", "test")}
    rmse = {name: values[0] for name, values in _chosen(cells, "rmse").items()}
    first = row["lml"][0]
    return _claim(
        "On the data of the figure, with over-estimated noise, the LML falls where the test "
        "density rises, over shapes, and the CLML follows the test density.",
        "LML 16.17 at .001, where it is largest; the CLML at .19, the test density at .11; "
        "correlation with the test density -.71 and +.93; RMSE to the function .1233 by the LML's "
        "choice, .0785 by the CLML's",
        f"LML {first:.2f} at .001; largest at {chosen['lml']:.3f}, {chosen['clml']:.3f} and "
        f"{chosen['test']:.3f}; correlation {lml:.2f} and {clml:+.2f}; RMSE {rmse['lml']:.4f} and "
        f"{rmse['clml']:.4f}",
        graded(
            abs(first - 16.17) < 0.01, chosen["lml"] < 0.002, abs(chosen["clml"] - 0.19) < 0.05,
            lml < -0.5, clml > 0.5, abs(rmse["lml"] - 0.1233) < 0.002,
            abs(rmse["clml"] - 0.0785) < 0.002,
        ),
        "The CLML here is a mean over 1000 orders, the published one over 20: its maximum is "
        "flat from .1 to .3, so its correlation depends on the orders.",
        rule="LML within .01; choices within .002 and .05; correlations beyond -.5 and +.5; RMSE "
        "within .002",
        doubt="Ours: orders of the CLML.",
    )  # fmt: skip


def _shapes(cells: pandas.DataFrame) -> Claim:
    row = cells.iloc[0]
    curves, leads = np.array(row["shapes"]), np.array(row["leads"])
    # In standard errors over orders.
    clear = leads / np.array(row["leads_error"]).clip(1e-9)
    # The first number of points after which .001 never leads again.
    overtaken = int(np.flatnonzero((leads > 0).all(0)).max(initial=-1)) + 2
    ends = ", ".join(
        f"{shape:g} {curve[9]:.2f} and {curve[-1]:.1f}"
        for shape, curve in zip(_SHAPES, curves, strict=True)
    )
    return Claim(
        "Lotfi et al. 2022, Figure 23c",
        "Learning curves by shape: the smallest shape has the largest LML of few points and the "
        "smallest of many.",
        "curves of .001 and .01 ahead at first, .001 last at the end: 1.10, .54, -.75, -1.20 after "
        "10 points, 78.8, 85.5, 85.4, 84.3 after 200",
        f"LML after 10 and 200 points by shape: {ends}; .001 is overtaken at n = {overtaken}",
        graded(
            bool((clear[:, 4:25] > 4).all()), bool((clear[0, 99:] < -4).all()),
            int(curves[:, -1].argmin()) == 0,
        ),
        rule=".001 ahead of all others from 5 to 25 points and behind .01 from 100, by four "
        "standard errors over orders; last of the four at 200",
        doubt="Ours: where the curves cross depends on the order of the points.",
    )  # fmt: skip


def _correlations(cells: pandas.DataFrame) -> Claim:
    lml, clml = (_correlation(cells, name) for name in ("lml", "clml"))
    ranks = {name: rank_correlations(cells[name], cells["test"]) for name in ("lml", "clml")}
    return _claim(
        "The same on draws of other seeds: the LML falls where the test density rises, and the "
        "CLML follows it.",
        "correlation with the test density -.71 of the LML, +.93 of the CLML (one data set)",
        f"{with_error(lml, 2)} of the LML, {with_error(clml, 2)} of the CLML; difference "
        f"{with_error(clml - lml, 2)}; that of the LML is negative on {sum(lml < 0)} of "
        f"{len(cells)} data sets; of ranks {with_error(ranks['lml'], 2)} and "
        f"{with_error(ranks['clml'], 2)}",
        graded(differs(lml, -1), differs(clml, 1), differs(clml - lml, 1)),
        rule="mean correlation of the LML negative, of the CLML and of the difference positive, by "
        "two standard errors",
        doubt="The paper's data set is unusual. On most draws of the same kernel and noise all "
        "scores, the LML included, fall steeply below a shape of .01, and the LML's correlation "
        "with the test density is positive. Tried with the authors' own draw, where their "
        "figure is reproduced, and with 30 others.",
    )


def _choices(cells: pandas.DataFrame) -> Claim:
    rmse, test, alpha = (_chosen(cells, name) for name in ("rmse", "test", "alpha"))
    gain, density = rmse["lml"] - rmse["clml"], test["clml"] - test["lml"]
    return _claim(
        "On draws of other seeds the shape that the CLML chooses predicts better than that which "
        "the LML chooses.",
        "shape .001 by the LML, .19 by the CLML; RMSE to the function .1233 against .0785",
        f"shape {with_error(alpha['lml'])} against {with_error(alpha['clml'])}; RMSE "
        f"{with_error(rmse['lml'], 4)} against {with_error(rmse['clml'], 4)}, gain "
        f"{with_error(gain, 4)}; gain in joint test density {with_error(density, 2)} nats",
        graded(differs(gain, 1), differs(density, 1)),
        rule="both gains positive by two standard errors",
        doubt="Ours: the gain is small beside its spread over data sets.",
    )


def _adequate(cells: pandas.DataFrame) -> Claim:
    lml, clml = (_correlation(cells, name) for name in ("lml", "clml"))
    test, best = _chosen(cells, "test"), array(cells["test"]).max(1)
    return _claim(
        "With the true noise both are adequate.",
        "both correlate with the test density, and choose a shape that is nearly the best",
        f"correlation {with_error(lml, 2)} of the LML, {with_error(clml, 2)} of the CLML; joint "
        f"test density below that of the best shape by {with_error(best - test['lml'], 2)} and "
        f"{with_error(best - test['clml'], 2)} nats of 150 points",
        graded(differs(lml, 1), differs(clml, 1)),
        rule="adequate: both correlations positive by two standard errors",
    )


def _correlation(cells: pandas.DataFrame, name: str) -> NDArray[np.float64]:
    """Correlation of a score with the test density over shapes, for each data set."""
    pairs = zip(cells[name], cells["test"], strict=True)
    return np.array([np.corrcoef(*pair)[0, 1] for pair in pairs])


def _chosen(cells: pandas.DataFrame, name: str) -> dict[str, NDArray[np.float64]]:
    """A curve at the shape that the LML and that the CLML chooses, for each data set."""
    values, sets = array(cells[name]), range(len(cells))
    return {score: values[sets, array(cells[score]).argmax(1)] for score in ("lml", "clml")}


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    kinds = [(True, _OVERESTIMATED), (False, _OVERESTIMATED), (False, _TRUE_NOISE)]
    several = figure.subplots(1, len(kinds) + 1)
    for axes, (paper, noise) in zip(several, kinds, strict=False):
        some = cells[(cells["noise"] == noise) & (cells["paper"] == paper)]
        for name, label in (("lml", "LML"), ("clml", "CLML"), ("test", "test, joint")):
            values = array(some[name])
            # Scores of data sets differ by constants, which say nothing of shapes.
            below = np.median(values - values.max(1, keepdims=True), axis=0)
            axes.plot(some["alpha"].iloc[0], below, label=label)
        axes.axvline(_TRUE_ALPHA, color="gray", linewidth=0.8)
        whose = "the authors' data" if paper else "other data"
        axes.set(xlabel="shape alpha", title=f"{whose}, noise {noise:g}", ylim=(-4, 0.2))
    several[0].set_ylabel("below the best, median, nats")
    several[0].legend(fontsize=7)
    _draw_shapes(several[-1], cells[cells["paper"].eq(True)].iloc[0])


def _draw_shapes(axes: Axes, row: pandas.Series) -> None:
    curves = np.array(row["shapes"])
    for shape, curve in zip(_SHAPES, curves, strict=True):
        axes.plot(range(1, _NUM_ALL + 1), curve - curves.mean(0), label=f"{shape:g}")
    axes.set(xlabel="points n", ylabel="LML less the mean of four shapes, nats")
    axes.legend(fontsize=7)


EXPERIMENT = Experiment(
    "rational-quadratic", "Rational quadratic kernel: the evidence corrects for wrong noise",
    _cells, run_cell, _claims, _draw, size=(13.0, 3.0),
)  # fmt: skip
