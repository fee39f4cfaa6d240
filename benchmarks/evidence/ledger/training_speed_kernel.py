"""Training speed of the tangent-kernel GPs of a convolutional and a fully connected network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.evidence.ledger.claims import (
    Claim,
    Experiment,
    array,
    differs,
    graded,
    listed,
    with_error,
)
from benchmarks.evidence.ledger.linear_problems import image_source
from benchmarks.evidence.training import images, network
from gpclml.curvature import GaussianWeightPrior
from gpclml.evaluation import learning_curve, log_marginal_likelihood
from gpclml.evidence.training_speed import posterior_divergences
from gpclml.kernels import NeuralTangentKernel
from gpclml.models import BayesianLinearModel

__all__ = ["EXPERIMENT"]

_NAMES = {"convolutional": "cnn-32x3", "fully connected": "mlp-256x2"}
_SEEDS = {"digits": 6, "mnist-test": 4}
_NOISE = 0.1
_SCALES = tuple(2.0**power for power in range(-3, 7))
_PARTS = 4
_SOURCE = "Lyle et al. 2020, Figure 2 (right)"


def _cells() -> list[dict[str, Any]]:
    return [
        {
            "experiment": "training-speed-ntk", "data": data, "seed": seed,
            "architectures": list(_NAMES.values()), "num_train": 200, "num_test": 200,
            "orders": 20,
        }
        for data in sorted({"digits", image_source()})
        for seed in range(_SEEDS[data])
    ]  # fmt: skip


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Evidence and training speed of the GP of each network's tangent kernel.

    The points are images of digits, the targets 1 for even ones and -1 for odd ones. The tangent
    kernel is that at random weights, with the variance of each layer's weights there for prior
    variance, scaled to mean variance one; the mean is zero, as of a network less what it is at its
    start; noise .1. Nothing is fitted to the targets, but for ``fitted``.

    Args:
        cell: ``data``, ``seed`` of the choice of points, start and orders; ``architectures``, the
            convolutional one first; ``num_train`` and ``num_test`` points; ``orders`` of the
            points.

    Returns:
        Lists over architectures: ``lml`` and ``expected``, L, in total nats, and the same with
        ``_fitted`` at the scale of most evidence, ``scale``; ``terms``, the mean over orders of
        L(D_<=i) - L(D_<i) for each i; test ``accuracy``.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"])
    x = torch.cat([data.train_x, data.test_x[: cell["num_test"]]]).double()
    classes = torch.cat([data.train_y, data.test_y[: cell["num_test"]]])
    y = 1.0 - 2.0 * (classes % 2).double()
    rows = [_scores(_kernel_root(name, x, cell["seed"]), y, cell) for name in cell["architectures"]]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _kernel_root(name: str, x: Tensor, seed: int) -> Tensor:
    """Features of the points whose inner products are the scaled tangent kernel, ``(n, n)``."""
    channels, size = x.shape[1:3]
    start = network(name, channels, size, 1, seed)
    module = torch.nn.Sequential(torch.nn.Unflatten(1, (channels, size, size)), start).double()
    prior = GaussianWeightPrior(module, by="layer")
    weights = dict(module.named_parameters())
    with torch.no_grad():
        squares = [weights[f"{layer}.weight"].square().mean() for layer in prior.groups]
        prior.log_precision.copy_(-torch.stack(squares).log())
        covariance = NeuralTangentKernel(module, prior)(x.flatten(1)).to_dense()
    values, vectors = torch.linalg.eigh(covariance / covariance.diagonal().mean())
    return vectors * values.clamp_min(0.0).sqrt()


def _scores(root: Tensor, y: Tensor, cell: Mapping[str, Any]) -> dict[str, Any]:
    n = cell["num_train"]
    generator = torch.Generator().manual_seed(100 + cell["seed"])
    orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(cell["orders"])])

    def of_scale(scale: float) -> BayesianLinearModel:
        return BayesianLinearModel(root[:n], y[:n], prior_variance=scale, noise=_NOISE)

    def evidence(scale: float) -> float:
        return float(log_marginal_likelihood(of_scale(scale)))

    def terms(model: BayesianLinearModel) -> Tensor:
        return (learning_curve(model, orders) - posterior_divergences(model, orders)).mean(0)

    with torch.no_grad():
        model, best = of_scale(1.0), max(_SCALES, key=evidence)
        of_order = terms(model)
        predicted = model.predict(root[n:], marginal=True).mean
        return {
            "lml": evidence(1.0), "expected": float(of_order.sum()), "scale": best,
            "lml_fitted": evidence(best), "expected_fitted": float(terms(of_scale(best)).sum()),
            "terms": of_order.tolist(),
            "accuracy": float((predicted.sign() == y[n:]).double().mean()),
        }  # fmt: skip


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    claims = []
    for data, some in cells.groupby("data"):
        claims += [_evidence(some, str(data)), _curves(some, str(data)), _accuracy(some, str(data))]
    return claims


def _evidence(cells: pandas.DataFrame, data: str) -> Claim:
    found = []
    for ending, label in (("", "scale one"), ("_fitted", "scale fitted by the LML")):
        for name, score in (("lml", "LML"), ("expected", "L")):
            text, holds = _compared(cells, name + ending, 1)
            found.append((f"{label}, {score} {text}", holds))
    return Claim(
        _SOURCE,
        f"The GP of a convolutional network's tangent kernel has more evidence on images ({data}) "
        "than that of a fully connected one, by the LML and by L.",
        "LML and L of the convolutional one higher",
        *listed(found, f"nats of {cells['num_train'].iloc[0]:g} points: "),
        "Kernels at random weights of finite networks in place of infinite ones; noise .1. L "
        "falls without bound where the prior variance grows beside the noise, the LML hardly.",
    )


def _curves(cells: pandas.DataFrame, data: str) -> Claim:
    terms = array(cells["terms"])  # (seeds, 2, n)
    gain = terms[:, 0] - terms[:, 1]
    parts = [part.mean(1) for part in np.array_split(gain, _PARTS, axis=1)]
    share = float((gain.mean(0) > 0).mean())
    return Claim(
        _SOURCE,
        "The curve of L(D_<=i) - L(D_<i), whose area is L, lies above for the convolutional one "
        f"({data}).",
        "above for nearly all points",
        f"scale one; mean gain in nats a point over {_PARTS} successive parts of the points: "
        + ", ".join(with_error(part, 2) for part in parts)
        + f"; above at {100 * share:.0f}% of the points",
        graded(*(differs(part, 1) for part in parts)),
    )


def _accuracy(cells: pandas.DataFrame, data: str) -> Claim:
    text, holds = _compared(cells, "accuracy", 3)
    return Claim(
        _SOURCE,
        f"The convolutional one predicts better ({data}).",
        "convolutional networks generalize better on images",
        f"test accuracy of the posterior mean's sign {text}",
        graded(holds),
    )


def _compared(cells: pandas.DataFrame, name: str, digits: int) -> tuple[str, bool]:
    """A score of the convolutional and the fully connected GP as text, and whether it gains."""
    first, second = array(cells[name]).T
    one, two, gain = (with_error(one, digits) for one in (first, second, first - second))
    return f"{one} against {two}, gain {gain}", differs(first - second, 1)


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    names = list(cells["data"].unique())
    for axes, data in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        terms = array(cells[cells["data"] == data]["terms"]).mean(0)
        n = range(1, terms.shape[-1] + 1)
        low = max(float(terms[:, 2:].min()), -12.0)
        for place, name in enumerate(_NAMES):
            axes.fill_between(n, terms[place], low, color=f"C{place}", alpha=0.2)
            axes.plot(n, terms[place], label=name)
        axes.set(xlabel=f"points seen, i ({data})", ylim=(low, terms.max() + 0.1))
    figure.axes[0].set_ylabel("$L(D_{\\leq i}) - L(D_{<i})$, nats")
    figure.axes[0].legend()


EXPERIMENT = Experiment(
    "training-speed-ntk", "Tangent kernels: the convolutional network trains faster", _cells,
    run_cell, _claims, _draw,
    modules=("benchmarks.evidence.training", "benchmarks.evidence.ledger.linear_problems"),
)  # fmt: skip
"""Lyle et al. (2020), Figure 2 right."""
