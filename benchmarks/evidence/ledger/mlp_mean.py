"""A network as prior mean: overfitting that the evidence rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import torch
from gpytorch.kernels import RBFKernel
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.evidence.ledger.claims import Claim, Experiment, differs, graded, with_error
from gpclml.conditioning import LastPoints, RandomHoldout, RandomOrderings
from gpclml.evaluation import (
    conditional_log_marginal_likelihood,
    log_marginal_likelihood,
    marginal_log_predictive,
)
from gpclml.fit import fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = ["EXPERIMENT"]

_MEANS = {
    "constant": "constant mean", "lml": "network, trained by the LML",
    "clml": "network, trained by the CLML",
}  # fmt: skip
_LENGTHSCALE, _NOISE, _NUM_TRAIN = 0.75, 0.02, 50
_SOURCE = "Lotfi et al. 2022, Figure 2"
_BEYOND_PAPER = "Lotfi et al. 2022, Section 6, not tried there on the problem of Figure 2"


def _cells() -> list[dict[str, Any]]:
    common = {"experiment": "mlp-mean", "steps": 500, "orders": 200}
    return [common | {"seed": seed} for seed in range(12)]


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Three prior means of a GP on the first half of its own draw, tested on the second.

    The data are a draw of a GP with an RBF kernel of lengthscale .75 and noise variance .02 at
    100 even points in [0, 10]. Kernel and noise are known; the mean is a constant, or a network
    of two hidden layers of 50, trained by Adam on the LML or, holding out a fresh tenth at each
    step, on the CLML.

    Args:
        cell: ``seed`` of data and networks, ``steps`` of training, ``orders`` of the CLML.

    Returns:
        For each mean M: ``M_lml`` and ``M_clml`` (m = 45, the mean over orders) of the training
        points, in nats; ``M_rmse`` and ``M_nll`` in nats a point of the test points; ``M_mean``
        and ``M_sd``, the predictions at all points. ``x`` and ``y``, the data.
    """
    x, y = _data(cell["seed"])
    result: dict[str, Any] = {"x": x.squeeze(-1).tolist(), "y": y.tolist()}
    for name in _MEANS:
        model = _fitted(name, x[:_NUM_TRAIN], y[:_NUM_TRAIN], cell["seed"], cell["steps"])
        scores = _scores(model, x, y, cell["orders"])
        result |= {f"{name}_{key}": value for key, value in scores.items()}
    return result


def _data(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(0, 10, 2 * _NUM_TRAIN, dtype=torch.float64).unsqueeze(-1)
    covariance = torch.exp(-0.5 * (x - x.mT).square() / _LENGTHSCALE**2)
    root = torch.linalg.cholesky(covariance + _NOISE * torch.eye(len(x), dtype=x.dtype))
    generator = torch.Generator().manual_seed(seed)
    return x, root @ torch.randn(len(x), dtype=x.dtype, generator=generator)


def _fitted(name: str, x: Tensor, y: Tensor, seed: int, steps: int) -> GPRegression:
    mean = "constant" if name == "constant" else "mlp"
    model = GPRegression(x, y, kernel=RBFKernel(), mean=mean, seed=seed, standardize=False)
    model.covar_module.lengthscale = _LENGTHSCALE
    model.likelihood.noise = _NOISE
    conditioning = RandomHoldout(0.1) if name == "clml" else LastPoints(m=0)  # m=0: the LML
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=seed)
    frozen = ["likelihood", "model.covar_module"]
    fit_mll(mll, "adam", steps=steps, lr=0.01, freeze=frozen, progress=False)
    return model


def _scores(model: GPRegression, x: Tensor, y: Tensor, orders: int) -> dict[str, Any]:
    test = slice(_NUM_TRAIN, None)
    clml = conditional_log_marginal_likelihood(model, RandomOrderings(orders, 45, seed=0))
    with torch.no_grad():
        predicted = model.predict(x, marginal=True)
    error = predicted.mean[test] - y[test]
    return {
        "lml": float(log_marginal_likelihood(model)),
        "clml": float(clml.mean()),
        "rmse": float(error.square().mean().sqrt()),
        "nll": -float(marginal_log_predictive(model, x[test], y[test]).mean()),
        "mean": predicted.mean.tolist(),
        "sd": predicted.stddev.tolist(),
    }


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    return [_overfits(cells), _conditional_prefers(cells), _conditional_trains(cells)]


def _overfits(cells: pandas.DataFrame) -> Claim:
    lml, rmse, nll = (_gap(cells, "lml", "constant", name) for name in ("lml", "rmse", "nll"))
    return Claim(
        _SOURCE,
        "A network as mean, trained by the LML, has a far larger LML than a constant mean, and "
        "predicts far worse and overconfidently beyond the data.",
        "LML far above, test error far worse",
        f"network minus constant: LML {with_error(lml, 1)} nats, test RMSE {with_error(rmse, 2)}, "
        f"test NLL {with_error(nll, 2)} nats a point; RMSE of the constant "
        f"{with_error(cells['constant_rmse'], 2)}",
        graded(differs(lml, 1), differs(rmse, 1), differs(nll, 1)),
    )


def _conditional_prefers(cells: pandas.DataFrame) -> Claim:
    clml = _gap(cells, "lml", "constant", "clml")
    trained = _gap(cells, "clml", "constant", "clml")
    return Claim(
        _BEYOND_PAPER,
        "The CLML follows generalization: it is lower for the overfitting network.",
        "no figure",
        f"network minus constant: CLML (m = 45) {with_error(clml, 2)} nats trained by the LML, "
        f"{with_error(trained, 2)} trained by the CLML; lower on {sum(clml < 0)} of {len(cells)} "
        "data sets",
        graded(differs(clml, -1)),
        "Held-out points lie among the points trained on, test points beyond them: no split of "
        "the training points shows how a mean extrapolates.",
    )


def _conditional_trains(cells: pandas.DataFrame) -> Claim:
    nll, rmse = (_gap(cells, "clml", "lml", name) for name in ("nll", "rmse"))
    left = _gap(cells, "clml", "constant", "rmse")
    return Claim(
        _BEYOND_PAPER,
        "Training the network by the CLML lessens the overconfidence, and leaves the bias.",
        "no figure",
        f"trained by the CLML minus by the LML: test NLL {with_error(nll, 2)} nats a point "
        f"(lower on {sum(nll < 0)} of {len(cells)} data sets), RMSE {with_error(rmse, 2)}; minus "
        f"the constant mean: RMSE {with_error(left, 2)}",
        graded(differs(nll, -1), differs(left, 1)),
    )


def _gap(cells: pandas.DataFrame, first: str, second: str, score: str) -> pandas.Series:
    return cells[f"{first}_{score}"] - cells[f"{second}_{score}"]


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    row = cells.sort_values("seed").iloc[0]
    x, y = np.array(row["x"]), np.array(row["y"])
    several = figure.subplots(1, len(_MEANS), sharey=True)
    for axes, (name, label) in zip(several, _MEANS.items(), strict=True):
        mean, sd = np.array(row[f"{name}_mean"]), np.array(row[f"{name}_sd"])
        axes.fill_between(x, mean - 2 * sd, mean + 2 * sd, alpha=0.25, label="± 2 deviations")
        axes.plot(x, mean, label="prediction")
        axes.plot(x[:_NUM_TRAIN], y[:_NUM_TRAIN], "k.", markersize=3, label="seen")
        axes.plot(x[_NUM_TRAIN:], y[_NUM_TRAIN:], "r.", markersize=3, label="test")
        scores = f"LML {row[f'{name}_lml']:.1f}, test NLL {row[f'{name}_nll']:.1f} nats"
        axes.set_title(f"{label}\n{scores}", fontsize="small")
        axes.set_xlabel("x")
    several[0].set_ylabel("y")
    several[0].legend(fontsize="small")


EXPERIMENT = Experiment(
    "mlp-mean", "A network as prior mean", _cells, run_cell, _claims, _draw, size=(7.5, 2.8)
)
