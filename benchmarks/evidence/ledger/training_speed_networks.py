"""Networks trained side by side: sums of training losses, and weights of their combination."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

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
from benchmarks.evidence.training import CLASSES, Images, images, network
from gpclml.evidence.training_speed import SumOfTrainingLosses

__all__ = ["EXPERIMENT"]

_ARCHITECTURES = (
    "mlp-32x1", "mlp-128x1", "mlp-512x1", "mlp-128x3", "cnn-4x1", "cnn-8x2", "cnn-16x2",
    "resnet-8x1",
)  # fmt: skip
_SETTINGS = {"digits": (6, 500, 40), "mnist-test": (3, 1000, 20)}  # seeds, points, epochs
_BATCH = 50
_SOURCE = "Lyle et al. 2020, Section 4.2 and Figure 3"
_WAYS = {"parallel": "Eqs. 42 and 43", "concurrent": "Eq. 44"}


def _cells() -> list[dict[str, Any]]:
    return [
        {
            "experiment": "training-speed-networks", "data": data, "seed": seed,
            "architectures": list(_ARCHITECTURES), "num_train": num_train, "epochs": epochs,
            "lr": 3e-3, "weights_lr": 1e-2,
        }
        for data in sorted({"digits", image_source()})
        for seeds, num_train, epochs in [_SETTINGS[data]]
        for seed in range(seeds)
    ]  # fmt: skip


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Networks trained on the same batches, and a linear combination of their outputs.

    The weights of the combination, 1 / M at first, are trained by plain gradient descent on the
    cross-entropy of the combined logits. In parallel training each network is trained by Adam on
    its own cross-entropy, on the same batches (Eqs. 42 and 43); in concurrent training the
    networks too are trained on the cross-entropy of the combination (Eq. 44); and weights are
    trained on as many batches after networks that were trained in parallel.

    Args:
        cell: ``data``, ``seed``, ``architectures``, ``num_train`` points, ``epochs`` in batches
            of 50, learning rates ``lr`` of the networks and ``weights_lr`` of the weights.

    Returns:
        Lists over architectures: ``sum``, the sum of each network's own losses of all batches
        before the step on each; ``final``, the mean loss of the last epoch; ``accuracy`` and
        ``log_density`` at test points, nats a point; ``curves``, the mean loss of each epoch;
        weights ``parallel`` and ``after``. The same under concurrent training: ``joint_sum``,
        ``joint_log_density``, and the weights ``concurrent``.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"])

    def fresh() -> list[torch.nn.Module]:
        shape = data.train_x.shape[1:3]
        names = cell["architectures"]
        return [network(name, *shape, CLASSES, cell["seed"]) for name in names]

    networks, jointly = fresh(), fresh()
    speeds, parallel = _train(networks, data.train_x, data.train_y, cell)
    of_joint, concurrent = _train(jointly, data.train_x, data.train_y, cell, joint=True)
    with torch.no_grad():
        outputs = torch.stack([one(data.train_x) for one in networks], -1)
    after = _weights_after(outputs, data.train_y, cell)
    accuracy, log_density = _tested(networks, data)
    return {
        "sum": [one.sum() for one in speeds], "final": [one.epoch_means()[-1] for one in speeds],
        "accuracy": accuracy, "log_density": log_density, "parallel": parallel.tolist(),
        "after": after.tolist(), "curves": [one.epoch_means() for one in speeds],
        "joint_sum": [one.sum() for one in of_joint],
        "joint_log_density": _tested(jointly, data)[1], "concurrent": concurrent.tolist(),
    }  # fmt: skip


def _tested(networks: Sequence[torch.nn.Module], data: Images) -> tuple[list[float], list[float]]:
    """Accuracy and mean log density of each network at test points."""
    with torch.no_grad():
        test = torch.stack([one(data.test_x) for one in networks]).log_softmax(-1)
    found = test.gather(-1, data.test_y.expand(len(test), -1).unsqueeze(-1)).squeeze(-1)
    accuracy = (test.argmax(-1) == data.test_y).double().mean(-1)
    return accuracy.tolist(), found.mean(-1).tolist()


def _train(
    networks: Sequence[torch.nn.Module],
    x: Tensor,
    y: Tensor,
    cell: Mapping[str, Any],
    joint: bool = False,
) -> tuple[list[SumOfTrainingLosses], Tensor]:
    """Trains the networks in place, each by its own loss or all by that of their combination.

    Returns:
        What each lost on the way, and the weights.
    """
    speeds = [SumOfTrainingLosses() for _ in networks]
    optimizers = [torch.optim.Adam(one.parameters(), lr=cell["lr"]) for one in networks]
    weights = torch.full((len(networks),), 1 / len(networks))
    for epoch in _epochs(len(y), cell):
        for rows in epoch:
            outputs = torch.stack([one(x[rows]) for one in networks], -1)
            losses = [cross_entropy(one, y[rows]) for one in outputs.unbind(-1)]
            for speed, loss in zip(speeds, losses, strict=True):
                speed.update(loss, len(rows))
            loss = cross_entropy(outputs @ weights, y[rows]) if joint else torch.stack(losses).sum()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            weights = _weights_step(weights, outputs.detach(), y[rows], cell["weights_lr"])
        for speed in speeds:
            speed.end_epoch()
    return speeds, weights


def _weights_after(outputs: Tensor, y: Tensor, cell: Mapping[str, Any]) -> Tensor:
    """Weights trained on outputs ``(N, C, M)`` of trained networks."""
    weights = torch.full(outputs.shape[-1:], 1 / outputs.shape[-1])
    for epoch in _epochs(len(y), cell):
        for rows in epoch:
            weights = _weights_step(weights, outputs[rows], y[rows], cell["weights_lr"])
    return weights


def _weights_step(weights: Tensor, outputs: Tensor, y: Tensor, lr: float) -> Tensor:
    """One step on the cross-entropy of the combination of outputs ``(B, C, M)``."""
    weights = weights.requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(outputs @ weights, y), weights)
    return weights.detach() - lr * gradient


def _epochs(num_points: int, cell: Mapping[str, Any]) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(100 + cell["seed"])
    for _ in range(cell["epochs"]):
        yield torch.randperm(num_points, generator=generator).split(_BATCH)


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    parts = {str(data): some for data, some in cells.groupby("data")}
    return [_generalization(parts), _final_loss(parts), _weights(parts), _trained_after(parts)]


def _against(cells: pandas.DataFrame, score: str, other: str) -> NDArray[np.float64]:
    """Rank correlation over architectures, a seed each; of losses the negative."""
    sign = -1 if score in ("sum", "final") else 1
    return rank_correlations(sign * array(cells[score]), cells[other])


def _generalization(parts: Mapping[str, pandas.DataFrame]) -> Claim:
    def part(data: str, cells: pandas.DataFrame) -> tuple[Any, ...]:
        ranks = [_against(cells, "sum", test) for test in ("accuracy", "log_density")]
        texts = " and ".join(with_error(values, 2) for values in ranks)
        return f"{data} {texts}", *(differs(values, 1) for values in ranks)

    before = "rank correlation of minus the sum with test accuracy and log density: "
    return Claim(
        _SOURCE,
        "Architectures with a lower sum of training losses predict better.",
        "sum of training losses and test performance are correlated",
        *listed((part(*one) for one in parts.items()), before),
        f"{len(_ARCHITECTURES)} small networks: " + ", ".join(_ARCHITECTURES) + ".",
    )


def _final_loss(parts: Mapping[str, pandas.DataFrame]) -> Claim:
    def part(data: str, cells: pandas.DataFrame, test: str) -> tuple[str, bool]:
        final = _against(cells, "final", test)
        gain = _against(cells, "sum", test) - final
        text = f"{with_error(final, 2)}, gain by the sum {with_error(gain, 2)}"
        return f"{data}, test {test.replace('_', ' ')}: {text}", differs(gain, 1)

    found = (part(*one, test) for one in parts.items() for test in ("accuracy", "log_density"))
    return Claim(
        _SOURCE,
        "The training loss at the end says less than the sum.",
        "the sum is the better predictor",
        *listed(found, "rank correlation of minus the loss of the last epoch with "),
    )


def _weights(parts: Mapping[str, pandas.DataFrame]) -> Claim:
    def part(data: str, cells: pandas.DataFrame) -> tuple[str, bool]:
        ranks, others = (_against(cells, name, "concurrent") for name in ("sum", "accuracy"))
        text = f"{with_error(ranks, 2)} (of test accuracy with the weight {with_error(others, 2)})"
        return f"{data} {text}", differs(ranks, 1)

    return Claim(
        _SOURCE,
        "In a combination trained along with its networks, those with a lower sum of training "
        "losses get larger weights.",
        "weights and sums are correlated",
        *listed(
            (part(*one) for one in parts.items()),
            "rank correlation of minus the sum with the weight: ",
        ),
    )


def _trained_after(parts: Mapping[str, pandas.DataFrame]) -> Claim:
    def part(data: str, cells: pandas.DataFrame) -> tuple[str, bool]:
        after, final = (_against(cells, name, "after") for name in ("sum", "final"))
        gain = _against(cells, "sum", "concurrent") - after
        text = (
            f"{with_error(after, 2)}, gain by concurrent training {with_error(gain, 2)} "
            f"(with minus the final loss {with_error(final, 2)})"
        )
        return f"{data} {text}", differs(gain, 1)

    return Claim(
        _SOURCE,
        "Weights trained after the networks follow the sum of training losses less.",
        "of linear models: weights after training prefer those that fit best",
        *listed(
            (part(*one) for one in parts.items()),
            "rank correlation of minus the sum with the weight: ",
        ),
        "The paper shows it for linear models; for networks it is our reading.",
    )


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    names = list(cells["data"].unique())
    for place, row in enumerate(figure.subplots(len(names), 3, squeeze=False)):
        some = cells[cells["data"] == names[place]]
        _scatter(row[0], some, "accuracy", f"test accuracy ({names[place]})")
        _scatter(row[1], some, "concurrent", "weight, concurrent")
        _draw_curves(row[2], some)
    figure.axes[0].legend(fontsize=6)


def _scatter(axes: Axes, cells: pandas.DataFrame, score: str, label: str) -> None:
    for place, name in enumerate(cells["architectures"].iloc[0]):
        axes.plot(
            [values[place] for values in cells["sum"]],
            [values[place] for values in cells[score]],
            ".", color=f"C{place}", label=name,
        )  # fmt: skip
    axes.set(xlabel="sum of training losses, nats", ylabel=label, xscale="log")


def _draw_curves(axes: Axes, cells: pandas.DataFrame) -> None:
    curves = array(cells["curves"]).mean(0)
    for place, curve in enumerate(curves):
        axes.semilogy(range(1, len(curve) + 1), curve, color=f"C{place}")
    axes.set(xlabel="epoch", ylabel="training loss, nats a point")


EXPERIMENT = Experiment(
    "training-speed-networks", "Networks: sums of training losses and weights of a combination",
    _cells, run_cell, _claims, _draw, size=(11.0, 5.6),
    modules=("benchmarks.evidence.training", "benchmarks.evidence.ledger.linear_problems"),
)  # fmt: skip
"""Lyle et al. (2020), Section 4.2 and Figure 4."""
