"""Groups of hidden units as models of their own: their sums of losses, and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.data import has_files
from benchmarks.evidence.ledger.claims import (
    Claim,
    Experiment,
    array,
    differs,
    listed,
    rank_correlations,
    with_error,
)
from benchmarks.evidence.ledger.linear_problems import image_source
from benchmarks.evidence.training import CLASSES, images
from gpclml.kernels.networks import MLP

__all__ = ["EXPERIMENT"]

_WIDTH, _GROUP, _BATCH = 200, 10, 50
_RATES = (0.1, 0.01)
_FASHION = "fashion-part"


def _cells() -> list[dict[str, Any]]:
    sources = {"digits": 1000, image_source(): 1000}
    if has_files(_FASHION):
        sources[_FASHION] = 700  # of 900
    return [
        {
            "experiment": "training-speed-subnetworks", "data": data, "seed": seed, "lr": rate,
            "num_train": num_train, "epochs": 20,
        }
        for data, num_train in sorted(sources.items())
        for rate in _RATES
        for seed in range(10)
    ]  # fmt: skip


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Subnetworks of one network, trained by plain stochastic gradient descent.

    The network has two hidden layers of 200 units. Ten units of the second and their weights in
    the last layer are a subnetwork, with logits of its own; only the whole is trained.

    Args:
        cell: ``data``, ``seed``, ``lr``, ``num_train`` images, ``epochs`` in batches of 50.

    Returns:
        Of each of twenty subnetworks: ``sum``, the sum of its cross-entropies before each step,
        a point; ``final``, the mean of the last epoch's; ``weight``, the norm of its weights in
        the last layer, and ``growth``, by how much it grew. ``accuracy`` of the whole network at
        test points.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"])
    generator = torch.Generator().manual_seed(cell["seed"])
    x, y = data.train_x.flatten(1), data.train_y
    network = MLP([x.shape[-1], _WIDTH, _WIDTH, CLASSES], generator=generator)
    *first, last = network.children()
    hidden = torch.nn.Sequential(*first)
    optimizer = torch.optim.SGD(network.parameters(), lr=cell["lr"])
    curves, start = [], _norms(last.weight)
    for _ in range(cell["epochs"]):
        total = torch.zeros(_WIDTH // _GROUP)
        for rows in torch.randperm(len(y), generator=generator).split(_BATCH):
            units = hidden(x[rows])
            total += len(rows) * _losses(units.detach(), last.weight.detach(), y[rows])
            optimizer.zero_grad()
            cross_entropy(last(units), y[rows]).backward()
            optimizer.step()
        curves.append(total / len(y))
    with torch.no_grad():
        right = network(data.test_x.flatten(1)).argmax(-1) == data.test_y
    weights = _norms(last.weight)
    return {
        "sum": torch.stack(curves).sum(0).tolist(), "final": curves[-1].tolist(),
        "weight": weights.tolist(), "growth": (weights - start).tolist(),
        "accuracy": float(right.double().mean()),
    }  # fmt: skip


def _norms(weight: Tensor) -> Tensor:
    """Of the weights of each group of units."""
    return weight.detach().reshape(CLASSES, -1, _GROUP).square().sum((0, 2)).sqrt()


def _losses(units: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of each group of units by its own logits."""
    groups = units.reshape(len(y), -1, _GROUP)
    logits = torch.einsum("bgk,cgk->gbc", groups, weight.reshape(CLASSES, -1, _GROUP))
    return torch.stack([cross_entropy(group, y) for group in logits])


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    def line(data: str, rate: float, some: pandas.DataFrame) -> tuple[str, bool]:
        ranks, final = (
            rank_correlations(-array(some[name]), some["weight"]) for name in ("sum", "final")
        )
        growth = rank_correlations(-array(some["sum"]), some["growth"])
        text = (
            f"{data}, learning rate {rate:g}: {with_error(ranks, 2)} (with its growth "
            f"{with_error(growth, 2)}; of the loss of the last epoch "
            f"{with_error(final, 2)}; test accuracy {some['accuracy'].mean():.3f})"
        )
        return text, differs(ranks, 1)

    claims = []
    for figures, chosen in (
        ("Figure 4", cells["data"] != _FASHION),
        ("Figures 8 and 9, Fashion-MNIST", cells["data"] == _FASHION),
    ):
        lines = [line(*key, some) for key, some in cells[chosen].groupby(["data", "lr"])]
        if lines:
            claims.append(
                Claim(
                    f"Lyle et al. 2020, Section 4.2 and {figures}",
                    "Descent gives larger weights to those subnetworks of a network whose sum of "
                    "training losses is lower.",
                    "weights and sums are correlated",
                    *listed(lines, "rank correlation of minus the sum with the weight: "),
                    "The network is of the paper's size, 200-200-10 in groups of ten, with ten "
                    "seeds; there are fewer images: 1000 digits, 700 of Fashion-MNIST. Growth is "
                    "the weight at the end less that at the start.",
                    rule="positive by two standard errors for each data set and learning rate",
                    doubt="Ours: fewer images, and learning rates of our own choice.",
                    full_size=False,
                )
            )
    return claims


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    kinds = list(cells.groupby(["data", "lr"]))
    several = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, ((data, rate), some) in zip(several, kinds, strict=True):
        for _, row in some.iterrows():
            axes.plot(np.array(row["weight"]), np.array(row["sum"]), ".", markersize=4)
        axes.set(xlabel="weight of the subnetwork", title=f"{data}, learning rate {rate:g}")
    several[0].set_ylabel("sum of training losses, nats a point")


EXPERIMENT = Experiment(
    "training-speed-subnetworks", "Subnetworks: descent favours those that train fast", _cells,
    run_cell, _claims, _draw, size=(15.0, 3.0),
    modules=("benchmarks.evidence.training", "benchmarks.evidence.ledger.linear_problems"),
)  # fmt: skip
"""Lyle et al. (2020), Section 4.2 and Figures 4, 8 and 9."""
