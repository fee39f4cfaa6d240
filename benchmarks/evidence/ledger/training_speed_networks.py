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
    joint_speeds, concurrent = _train(jointly, data.train_x, data.train_y, cell, joint=True)
    with torch.no_grad():
        outputs = torch.stack([model(data.train_x) for model in networks], -1)
    after = _weights_after(outputs, data.train_y, cell)
    accuracy, log_density = _tested(networks, data)
    return {
        "sum": [speed.sum() for speed in speeds],
        "final": [speed.epoch_means()[-1] for speed in speeds],
        "accuracy": accuracy, "log_density": log_density, "parallel": parallel.tolist(),
        "after": after.tolist(), "curves": [speed.epoch_means() for speed in speeds],
        "joint_sum": [speed.sum() for speed in joint_speeds],
        "joint_log_density": _tested(jointly, data)[1], "concurrent": concurrent.tolist(),
    }  # fmt: skip


def _tested(networks: Sequence[torch.nn.Module], data: Images) -> tuple[list[float], list[float]]:
    """Accuracy and mean log density of each network at test points."""
    with torch.no_grad():
        test = torch.stack([model(data.test_x) for model in networks]).log_softmax(-1)
    log_densities = test.gather(-1, data.test_y.expand(len(test), -1).unsqueeze(-1)).squeeze(-1)
    accuracy = (test.argmax(-1) == data.test_y).double().mean(-1)
    return accuracy.tolist(), log_densities.mean(-1).tolist()


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
    optimizers = [torch.optim.Adam(model.parameters(), lr=cell["lr"]) for model in networks]
    weights = torch.full((len(networks),), 1 / len(networks))
    for epoch in _epochs(len(y), cell):
        for rows in epoch:
            outputs = torch.stack([model(x[rows]) for model in networks], -1)
            losses = [cross_entropy(logits, y[rows]) for logits in outputs.unbind(-1)]
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
    sources = {str(data): some for data, some in cells.groupby("data")}
    return [
        _generalization(sources), _weights(sources), _jointly(sources), _trained_after(sources),
        _final_loss(sources),
    ]  # fmt: skip


def _against(cells: pandas.DataFrame, score: str, other: str) -> NDArray[np.float64]:
    """Rank correlation over architectures, a seed each; of losses the negative."""
    sign = -1 if score in ("sum", "final", "joint_sum") else 1
    return rank_correlations(sign * array(cells[score]), cells[other])


def _generalization(sources: Mapping[str, pandas.DataFrame]) -> Claim:
    def line(data: str, cells: pandas.DataFrame) -> tuple[Any, ...]:
        ranks = [_against(cells, "sum", test) for test in ("accuracy", "log_density")]
        texts = " and ".join(with_error(values, 2) for values in ranks)
        return f"{data} {texts}", *(differs(values, 1) for values in ranks)

    before = "rank correlation of minus the sum with test accuracy and log density: "
    return Claim(
        f"{_SOURCE} (middle)",
        "Of networks trained in parallel, those with a lower sum of losses predict better.",
        "sum of training losses and test loss are correlated",
        *listed((line(*source) for source in sources.items()), before),
        f"{len(_ARCHITECTURES)} small networks: " + ", ".join(_ARCHITECTURES) + ".",
        rule="both positive by two standard errors, for each data set",
        doubt="Ours: few small networks on small data.",
        full_size=False,
    )


def _weights(sources: Mapping[str, pandas.DataFrame]) -> Claim:
    def line(data: str, cells: pandas.DataFrame) -> tuple[str, bool]:
        ranks, others = (_against(cells, name, "parallel") for name in ("sum", "accuracy"))
        text = f"{with_error(ranks, 2)} (of test accuracy with the weight {with_error(others, 2)})"
        return f"{data} {text}", differs(ranks, 1)

    return Claim(
        "Lyle et al. 2020, Section 4.2, parallel training (Eqs. 42 and 43)",
        "In a combination whose networks are trained each by its own loss, those with a lower sum "
        "of training losses get larger weights.",
        "weights and sums are correlated",
        *listed(
            (line(*source) for source in sources.items()),
            "rank correlation of minus the sum with the weight: ",
        ),
        rule="positive by two standard errors for each data set",
        doubt="Ours: few small networks on small data.",
        full_size=False,
    )


def _jointly(sources: Mapping[str, pandas.DataFrame]) -> Claim:
    def line(data: str, cells: pandas.DataFrame) -> tuple[Any, ...]:
        scores = ("joint_sum", "joint_log_density", "sum")
        joint, test, parallel = (_against(cells, name, "concurrent") for name in scores)
        text = (
            f"{data} {with_error(test, 2)} and {with_error(joint, 2)} (with minus its sum when "
            f"trained in parallel {with_error(parallel, 2)})"
        )
        return text, differs(test, 1), differs(joint, 1)

    before = "rank correlation of the weight with the network's own test log density and minus "
    return Claim(
        f"{_SOURCE} (left), concurrent training (Eq. 44)",
        "In a combination trained as a whole, networks that predict better get larger weights.",
        "weights and test losses are correlated",
        *listed((line(*source) for source in sources.items()), f"{before}its own sum of losses: "),
        rule="both positive by two standard errors, for each data set",
        doubt="Ours: few small networks on small data, Adam for the networks and plain descent for "
        "the weights. Tried with each network's own losses along the joint training, and with "
        "those of parallel training.",
        full_size=False,
    )


def _trained_after(sources: Mapping[str, pandas.DataFrame]) -> Claim:
    def line(data: str, cells: pandas.DataFrame) -> tuple[str, bool]:
        after, final = (_against(cells, name, "after") for name in ("sum", "final"))
        gain = _against(cells, "sum", "parallel") - after
        text = (
            f"{with_error(after, 2)}, gain by training along {with_error(gain, 2)} "
            f"(with minus the final loss {with_error(final, 2)})"
        )
        return f"{data} {text}", differs(gain, 1)

    return Claim(
        "beside Lyle et al. 2020, Section 4.2",
        "Weights trained after the networks follow the sum of training losses less.",
        "no figure",
        *listed(
            (line(*source) for source in sources.items()),
            "rank correlation of minus the sum with the weight: ",
        ),
        "The paper shows it for linear models.",
        rule="gain positive by two standard errors for each data set",
        doubt="Ours: few small networks on small data.",
        question=True,
    )


def _final_loss(sources: Mapping[str, pandas.DataFrame]) -> Claim:
    def line(data: str, cells: pandas.DataFrame, test: str) -> tuple[str, bool]:
        final = _against(cells, "final", test)
        gain = _against(cells, "sum", test) - final
        text = f"{with_error(final, 2)}, gain by the sum {with_error(gain, 2)}"
        return f"{data}, test {test.replace('_', ' ')}: {text}", differs(gain, 1)

    lines = (
        line(*source, test) for source in sources.items() for test in ("accuracy", "log_density")
    )
    return Claim(
        "beside Lyle et al. 2020, Section 4.2",
        "The training loss at the end says less than the sum.",
        "no figure",
        *listed(lines, "rank correlation of minus the loss of the last epoch with "),
        rule="each gain positive by two standard errors",
        doubt="The paper does not claim this. Tried on two sets of images, by accuracy and by "
        "log density.",
        question=True,
    )


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    names = list(cells["data"].unique())
    for index, row in enumerate(figure.subplots(len(names), 4, squeeze=False)):
        some = cells[cells["data"] == names[index]]
        _scatter(row[0], some, "accuracy", f"test accuracy ({names[index]})")
        _scatter(row[1], some, "parallel", "weight, parallel training")
        _scatter(row[2], some, "concurrent", "weight, concurrent", "joint_sum")
        _draw_curves(row[3], some)
    figure.axes[0].legend(fontsize=6)


def _scatter(
    axes: Axes, cells: pandas.DataFrame, score: str, label: str, losses: str = "sum"
) -> None:
    for index, name in enumerate(cells["architectures"].iloc[0]):
        axes.plot(
            [values[index] for values in cells[losses]],
            [values[index] for values in cells[score]],
            ".", color=f"C{index}", label=name,
        )  # fmt: skip
    axes.set(xlabel="sum of training losses, nats", ylabel=label, xscale="log")


def _draw_curves(axes: Axes, cells: pandas.DataFrame) -> None:
    curves = array(cells["curves"]).mean(0)
    for index, curve in enumerate(curves):
        axes.semilogy(range(1, len(curve) + 1), curve, color=f"C{index}")
    axes.set(xlabel="epoch", ylabel="training loss, nats a point")


EXPERIMENT = Experiment(
    "training-speed-networks", "Networks: sums of training losses and weights of a combination",
    _cells, run_cell, _claims, _draw, size=(14.0, 5.6),
    modules=("benchmarks.evidence.training", "benchmarks.evidence.ledger.linear_problems"),
)  # fmt: skip
"""Lyle et al. (2020), Section 4.2 and Figure 3."""
