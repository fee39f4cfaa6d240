"""Networks of Lyle et al. (2020): sums of training losses, and weights of combinations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.data import has_files
from benchmarks.evidence.ledger.claims import (
    AtLeast,
    Claim,
    Experiment,
    array,
    claims_by,
    differs,
    listed,
    rank_correlations,
    with_error,
)
from benchmarks.evidence.training import CLASSES, Images, image_source, images, network
from gpclml.evidence.training_speed import SumOfTrainingLosses
from gpclml.kernels.networks import MLP

__all__ = ["NETWORKS", "SUBNETWORKS"]

_ARCHITECTURES = (
    "mlp-32x1", "mlp-128x1", "mlp-512x1", "mlp-128x3", "cnn-4x1", "cnn-8x2", "cnn-16x2",
    "resnet-8x1",
)  # fmt: skip
_SETTINGS = {"digits": (6, 500, 40), "mnist-test": (3, 1000, 20)}  # seeds, points, epochs
_BATCH = 50
_NETWORKS_SOURCE = "Lyle et al. 2020, Section 4.2 and Figure 3"
_networks_claim = partial(Claim, doubt="Ours: few small networks on small data.")
_SUM_AND_WEIGHT = "rank correlation of minus the sum with the weight: "


def _networks_cells() -> list[dict[str, Any]]:
    common = {"architectures": list(_ARCHITECTURES), "lr": 3e-3, "weights_lr": 1e-2}
    return [
        common | {"data": data, "seed": seed, "num_train": num_train, "epochs": epochs}
        for data in sorted({"digits", image_source()})
        for seeds, num_train, epochs in [_SETTINGS[data]]
        for seed in range(seeds)
    ]


def run_networks(cell: Mapping[str, Any]) -> dict[str, Any]:
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

    # Both trainings begin from the same weights.
    networks, jointly = fresh(), fresh()
    speeds, parallel = _train(networks, data.train_x, data.train_y, cell)
    joint_speeds, concurrent = _train(jointly, data.train_x, data.train_y, cell, joint=True)
    with torch.no_grad():
        outputs = torch.stack([model(data.train_x) for model in networks], -1)
    # Outputs of trained networks are constants: only weights are trained.
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
    # Adam has a step size for each weight: one optimizer trains them as one each would.
    optimizer = torch.optim.Adam([p for model in networks for p in model.parameters()], cell["lr"])
    weights = torch.full((len(networks),), 1 / len(networks))
    for epoch in _epochs(len(y), cell):
        for rows in epoch:
            outputs = torch.stack([model(x[rows]) for model in networks], -1)
            losses = [cross_entropy(logits, y[rows]) for logits in outputs.unbind(-1)]
            for speed, loss in zip(speeds, losses, strict=True):
                # The loss before the step on its batch: of unseen points in the first epoch.
                speed.update(loss, len(rows))
            # Of the sum of all losses each network has the gradient of its own alone.
            loss = cross_entropy(outputs @ weights, y[rows]) if joint else torch.stack(losses).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # Weights see the outputs from before the networks' step.
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
    # Every training of a cell sees the same batches.
    generator = torch.Generator().manual_seed(100 + cell["seed"])
    for _ in range(cell["epochs"]):
        yield torch.randperm(num_points, generator=generator).split(_BATCH)


def _against(cells: pandas.DataFrame, score: str, other: str) -> NDArray[np.float64]:
    """Rank correlation over architectures, a seed each; of losses the negative."""
    # A lower loss should go with a larger weight or accuracy.
    sign = -1 if score in ("sum", "final", "joint_sum") else 1
    return rank_correlations(sign * array(cells[score]), cells[other])


def _generalization(cells: pandas.DataFrame) -> Claim:
    def line(data: str, cells: pandas.DataFrame) -> tuple[Any, ...]:
        ranks = [_against(cells, "sum", test) for test in ("accuracy", "log_density")]
        texts = " and ".join(with_error(values, 2) for values in ranks)
        return f"{data} {texts}", *(differs(values, 1) for values in ranks)

    before = "rank correlation of minus the sum with test accuracy and log density: "
    return _networks_claim(
        f"{_NETWORKS_SOURCE} (middle)",
        "Of networks trained in parallel, those with a lower sum of losses predict better.",
        "sum of training losses and test loss are correlated",
        *listed(starmap(line, cells.groupby("data")), before),
        f"{len(_ARCHITECTURES)} small networks: " + ", ".join(_ARCHITECTURES) + ".",
        rule="both positive by two standard errors, for each data set",
    )


def _weights(cells: pandas.DataFrame) -> Claim:
    def line(data: str, cells: pandas.DataFrame) -> tuple[str, bool]:
        ranks, others = (_against(cells, name, "parallel") for name in ("sum", "accuracy"))
        text = f"{with_error(ranks, 2)} (of test accuracy with the weight {with_error(others, 2)})"
        return f"{data} {text}", differs(ranks, 1)

    return _networks_claim(
        "Lyle et al. 2020, Section 4.2, parallel training (Eqs. 42 and 43)",
        "In a combination whose networks are trained each by its own loss, those with a lower sum "
        "of training losses get larger weights.",
        "weights and sums are correlated",
        *listed(starmap(line, cells.groupby("data")), _SUM_AND_WEIGHT),
        rule="positive by two standard errors for each data set",
    )


def _jointly(cells: pandas.DataFrame) -> Claim:
    def line(data: str, cells: pandas.DataFrame) -> tuple[Any, ...]:
        scores = ("joint_sum", "joint_log_density", "sum")
        joint, test, parallel = (_against(cells, name, "concurrent") for name in scores)
        text = (
            f"{data} {with_error(test, 2)} and {with_error(joint, 2)} (with minus its sum when "
            f"trained in parallel {with_error(parallel, 2)})"
        )
        return text, differs(test, 1), differs(joint, 1)

    before = "rank correlation of the weight with the network's own test log density and minus "
    return _networks_claim(
        f"{_NETWORKS_SOURCE} (left), concurrent training (Eq. 44)",
        "In a combination trained as a whole, networks that predict better get larger weights.",
        "weights and test losses are correlated",
        *listed(starmap(line, cells.groupby("data")), f"{before}its own sum of losses: "),
        rule="both positive by two standard errors, for each data set",
        doubt="Ours: few small networks on small data, Adam for the networks and plain descent for "
        "the weights. Tried with each network's own losses along the joint training, and with "
        "those of parallel training.",
    )


def _trained_after(cells: pandas.DataFrame) -> Claim:
    def line(data: str, cells: pandas.DataFrame) -> tuple[str, bool]:
        after, final = (_against(cells, name, "after") for name in ("sum", "final"))
        gain = _against(cells, "sum", "parallel") - after
        text = (
            f"{with_error(after, 2)}, gain by training along {with_error(gain, 2)} "
            f"(with minus the final loss {with_error(final, 2)})"
        )
        return f"{data} {text}", differs(gain, 1)

    return _networks_claim(
        "beside Lyle et al. 2020, Section 4.2",
        "Weights trained after the networks follow the sum of training losses less.",
        "no figure",
        *listed(starmap(line, cells.groupby("data")), _SUM_AND_WEIGHT),
        "The paper shows it for linear models.",
        rule="gain positive by two standard errors for each data set",
        kind="question",
    )


def _final_loss(cells: pandas.DataFrame) -> Claim:
    def line(data: str, cells: pandas.DataFrame, test: str) -> tuple[str, bool]:
        final = _against(cells, "final", test)
        gain = _against(cells, "sum", test) - final
        text = f"{with_error(final, 2)}, gain by the sum {with_error(gain, 2)}"
        return f"{data}, test {test.replace('_', ' ')}: {text}", differs(gain, 1)

    tests = ("accuracy", "log_density")
    lines = (line(data, some, test) for data, some in cells.groupby("data") for test in tests)
    return _networks_claim(
        "beside Lyle et al. 2020, Section 4.2",
        "The training loss at the end says less than the sum.",
        "no figure",
        *listed(lines, "rank correlation of minus the loss of the last epoch with "),
        rule="each gain positive by two standard errors",
        doubt="The paper does not claim this. Tried on two sets of images, by accuracy and by "
        "log density.",
        kind="question",
    )


def _draw_networks(cells: pandas.DataFrame, figure: Figure) -> None:
    groups = list(cells.groupby("data", sort=False))
    rows = figure.subplots(len(groups), 4, squeeze=False)
    for row, (data, some) in zip(rows, groups, strict=True):
        _scatter(row[0], some, "accuracy", f"test accuracy ({data})")
        _scatter(row[1], some, "parallel", "weight, parallel training")
        _scatter(row[2], some, "concurrent", "weight, concurrent", "joint_sum")
        curves = array(some["curves"]).mean(0)
        row[3].semilogy(range(1, curves.shape[1] + 1), curves.T)
        row[3].set(xlabel="epoch", ylabel="training loss, nats a point")
    figure.axes[0].legend(fontsize=9)


def _scatter(
    axes: Axes, cells: pandas.DataFrame, score: str, label: str, losses: str = "sum"
) -> None:
    """A point for each seed, a colour for each architecture."""
    axes.plot(array(cells[losses]), array(cells[score]), ".", label=cells["architectures"].iloc[0])
    axes.set(xlabel="sum of training losses, nats", ylabel=label, xscale="log")


NETWORKS = Experiment(
    "training-speed-networks", "Networks: sums of training losses and weights of a combination",
    _networks_cells, run_networks,
    claims_by(_generalization, _weights, _jointly, _trained_after, _final_loss), _draw_networks,
    size=(14.0, 5.6),
    items=("Figure 3", "Figure 7"),
    paper={
        "Lyle et al. 2020, Section 4.2": {
            "data": "Fashion-MNIST", "training": "SGD until convergence", "runs": AtLeast(10),
        },
    },
    constants={
        "training": "Adam, as many epochs for all",
        "runs": min(runs for runs, *_ in _SETTINGS.values()),
    },
    departures="The paper trains by plain stochastic gradient descent, ours by Adam; its images "
    "are Fashion-MNIST, ours digits.",
)  # fmt: skip
"""Lyle et al. (2020), Section 4.2 and Figure 3."""


_WIDTH, _GROUP = 200, 10
_RATES = (0.1, 0.01)
_FASHION = "fashion-part"


def _subnetworks_cells() -> list[dict[str, Any]]:
    sources = {"digits": 1000, image_source(): 1000}
    if has_files(_FASHION):
        sources[_FASHION] = 700  # of 900
    return [
        {"data": data, "seed": seed, "lr": rate, "num_train": num_train, "epochs": 20}
        for data, num_train in sorted(sources.items())
        for rate in _RATES
        for seed in range(10)
    ]


def run_subnetworks(cell: Mapping[str, Any]) -> dict[str, Any]:
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
    # Subnetworks are groups of the last hidden units.
    *first, last = network.children()
    hidden = torch.nn.Sequential(*first)
    optimizer = torch.optim.SGD(network.parameters(), lr=cell["lr"])
    curves, start = [], _norms(last.weight)
    for _ in range(cell["epochs"]):
        total = torch.zeros(_WIDTH // _GROUP)
        for rows in torch.randperm(len(y), generator=generator).split(_BATCH):
            units = hidden(x[rows])
            # Before the step, and detached: subnetworks are watched, not trained.
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
    # Group g has the logits of its own units and weights alone.
    logits = torch.einsum("bgk,cgk->gbc", groups, weight.reshape(CLASSES, -1, _GROUP))
    return torch.stack([cross_entropy(group, y) for group in logits])


def _subnetworks_claims(cells: pandas.DataFrame) -> list[Claim]:
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
                    *listed(lines, _SUM_AND_WEIGHT),
                    "The network is of the paper's size, 200-200-10 in groups of ten, with ten "
                    "seeds; there are fewer images: 1000 digits, 700 of Fashion-MNIST. Growth is "
                    "the weight at the end less that at the start.",
                    rule="positive by two standard errors for each data set and learning rate",
                    doubt="Ours: fewer images, and learning rates of our own choice.",
                )
            )
    return claims


def _draw_subnetworks(cells: pandas.DataFrame, figure: Figure) -> None:
    kinds = list(cells.groupby(["data", "lr"]))
    several = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, ((data, rate), some) in zip(several, kinds, strict=True):
        for _, row in some.iterrows():
            axes.plot(np.array(row["weight"]), np.array(row["sum"]), ".", markersize=4)
        axes.set(xlabel="weight of the subnetwork", title=f"{data}, learning rate {rate:g}")
    several[0].set_ylabel("sum of training losses, nats a point")


SUBNETWORKS = Experiment(
    "training-speed-subnetworks", "Subnetworks: descent favours those that train fast",
    _subnetworks_cells, run_subnetworks, _subnetworks_claims, _draw_subnetworks, size=(15.0, 3.0),
    items=("Figure 4", "Figure 8", "Figure 9"),
    paper={
        "Lyle et al. 2020, Section 4.2": {
            "data": ("CIFAR-10", "Fashion-MNIST"), "hidden_units": (200, 200), "group_size": 10,
            "training": "SGD until convergence", "runs": AtLeast(10),
        },
    },
    constants={
        "hidden_units": (_WIDTH, _WIDTH), "group_size": _GROUP, "training": "SGD, 20 epochs",
        "runs": 10,
    },
)  # fmt: skip
"""Lyle et al. (2020), Section 4.2 and Figures 4, 8 and 9."""
