"""Networks of Lyle et al. (2020): sums of training losses, and weights of combinations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from benchmarks.data import has_files
from benchmarks.evidence.ledger.claims import (
    AtLeast,
    Claim,
    Experiment,
    array,
    differs,
    listed,
    rank_correlation_rows,
    rank_correlations,
    with_error,
)
from benchmarks.evidence.training import CLASSES, Images, image_source, images, network
from gpclml.evidence.training_speed import SumOfTrainingLosses
from gpclml.kernels.networks import MLP

_ARCHITECTURES = (
    "mlp-32x1", "mlp-128x1", "mlp-512x1", "mlp-128x3", "cnn-4x1", "cnn-8x1", "cnn-8x2", "cnn-16x2",
)  # fmt: skip
_SETTINGS = {"digits": (6, 500, 40), "mnist-test": (3, 1000, 20)}  # seeds, points, epochs
_BATCH = 50
_NETWORKS_SOURCE = "Lyle et al. 2020, Section 4.2 and Figure 3"
_networks_claim = partial(Claim, doubt="Ours: few small networks on small data.")
_SUM_AND_WEIGHT = "rank correlation of minus the sum with the weight: "


def _networks_cells() -> list[dict[str, Any]]:
    common = {"architectures": list(_ARCHITECTURES), "lr": 0.1, "weights_lr": 1e-2}
    return [
        common | {"data": data, "seed": seed, "num_train": num_train, "epochs": epochs}
        for data in sorted({"digits", image_source()})
        for seeds, num_train, epochs in [_SETTINGS[data]]
        for seed in range(seeds)
    ]


def run_networks(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Networks trained on the same batches, and a linear combination of their outputs.

    Everything is trained by plain stochastic gradient descent. The weights of the combination,
    1 / M at first, are trained on the cross-entropy of the combined logits. In parallel training
    each network is trained on its own cross-entropy, on the same batches (Eqs. 42 and 43); in
    concurrent training the networks too are trained on the cross-entropy of the combination
    (Eq. 44); and weights are trained on as many batches after networks that were trained in
    parallel.

    Args:
        cell: ``data``, ``seed``, ``architectures``, ``num_train`` points, ``epochs`` in batches
            of 50, learning rates ``lr`` of the networks, in concurrent training times M, and
            ``weights_lr`` of the weights.

    Returns:
        Lists over architectures: ``sum``, the sum of each network's own losses of all batches
        before the step on each; ``final``, the mean loss of the last epoch; ``accuracy`` and
        ``log_density`` at test points, nats a point; ``curves``, the mean loss of each epoch;
        weights ``parallel`` and ``after``. The same under concurrent training: ``joint_sum``,
        ``joint_log_density``, and the weights ``concurrent``.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"])
    shape = data.train_x.shape[1:3]
    # Both trainings begin from the same weights.
    networks, jointly = (
        [network(name, *shape, CLASSES, cell["seed"]) for name in cell["architectures"]]
        for _ in range(2)
    )
    speeds, parallel = _train(networks, data, cell, joint=False)
    joint_speeds, concurrent = _train(jointly, data, cell, joint=True)
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
    networks: Sequence[torch.nn.Module], data: Images, cell: Mapping[str, Any], joint: bool
) -> tuple[list[SumOfTrainingLosses], Tensor]:
    """Trains the networks in place, each by its own loss or all by that of their combination.

    Returns:
        What each lost on the way, and the weights.
    """
    x, y = data.train_x, data.train_y
    speeds = [SumOfTrainingLosses() for _ in networks]
    parameters = [p for model in networks for p in model.parameters()]
    # In the combination a network's gradient has its weight, 1 / M at first, as a factor.
    optimizer = torch.optim.SGD(parameters, cell["lr"] * (len(networks) if joint else 1))
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


def _networks_claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    names = ("tests", "parallel", "concurrent", "after", "final")
    lines: dict[str, list[tuple]] = {name: [] for name in names}
    for data, some in cells.groupby("data"):
        ranks = {test: _against(some, "sum", test) for test in ("accuracy", "log_density")}
        texts = " and ".join(with_error(values, 2) for values in ranks.values())
        holds = (differs(values, 1) for values in ranks.values())
        lines["tests"].append((f"{data} {texts}", *holds))

        weights, others = (_against(some, name, "parallel") for name in ("sum", "accuracy"))
        text = f"(of test accuracy with the weight {with_error(others, 2)})"
        line = f"{data} {with_error(weights, 2)} {text}", differs(weights, 1)
        lines["parallel"].append(line)

        joint, test, parallel = (
            _against(some, name, "concurrent") for name in ("joint_sum", "joint_log_density", "sum")
        )
        text = (
            f"{data} {with_error(test, 2)} and {with_error(joint, 2)} (with minus its sum when "
            f"trained in parallel {with_error(parallel, 2)})"
        )
        lines["concurrent"].append((text, differs(test, 1), differs(joint, 1)))

        after, final = (_against(some, name, "after") for name in ("sum", "final"))
        text = (
            f"{data} {with_error(after, 2)}, gain by training along "
            f"{with_error(weights - after, 2)} (with minus the final loss {with_error(final, 2)})"
        )
        lines["after"].append((text, differs(weights - after, 1)))

        for test, values in ranks.items():
            final = _against(some, "final", test)
            text = f"{with_error(final, 2)}, gain by the sum {with_error(values - final, 2)}"
            line = f"{data}, test {test.replace('_', ' ')}: {text}", differs(values - final, 1)
            lines["final"].append(line)
    yield _networks_claim(
        f"{_NETWORKS_SOURCE} (middle)",
        "Of networks trained in parallel, those with a lower sum of losses predict better.",
        "sum of training losses and test loss are correlated",
        *listed(
            lines["tests"],
            "rank correlation of minus the sum with test accuracy and log density: ",
        ),
        f"{len(_ARCHITECTURES)} small networks: " + ", ".join(_ARCHITECTURES) + ". Learning rates "
        "of plain descent: .1 in parallel and .8 in concurrent training, .01 of the weights.",
        rule="both positive by two standard errors, for each data set",
    )
    yield _networks_claim(
        "Lyle et al. 2020, Section 4.2, parallel training (Eqs. 42 and 43)",
        "In a combination whose networks are trained each by its own loss, those with a lower sum "
        "of training losses get larger weights.",
        "weights and sums are correlated",
        *listed(lines["parallel"], _SUM_AND_WEIGHT),
        rule="positive by two standard errors for each data set",
    )
    yield _networks_claim(
        f"{_NETWORKS_SOURCE} (left), concurrent training (Eq. 44)",
        "In a combination trained as a whole, networks that predict better get larger weights.",
        "weights and test losses are correlated",
        *listed(
            lines["concurrent"],
            "rank correlation of the weight with the network's own test log density and minus its "
            "own sum of losses: ",
        ),
        rule="both positive by two standard errors, for each data set",
        doubt="Ours: few small networks on small data. Tried with each network's own "
        "losses along the joint training, and with those of parallel training.",
    )
    yield _networks_claim(
        "beside Lyle et al. 2020, Section 4.2",
        "Weights trained after the networks follow the sum of training losses less.",
        "no figure",
        *listed(lines["after"], _SUM_AND_WEIGHT),
        "The paper shows it for linear models.",
        rule="gain positive by two standard errors for each data set",
        kind="question",
    )
    yield _networks_claim(
        "beside Lyle et al. 2020, Section 4.2",
        "The training loss at the end says less than the sum.",
        "no figure",
        *listed(lines["final"], "rank correlation of minus the loss of the last epoch with "),
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
    _networks_claims, _draw_networks,
    size=(14.0, 5.6),
    items=("Figure 3", "Figure 7"),
    paper={
        "Lyle et al. 2020, Section 4.2": {
            "data": "Fashion-MNIST", "training": "SGD until convergence", "runs": AtLeast(10),
        },
    },
    constants={
        "training": "SGD, 20 or 40 epochs",
        "runs": min(runs for runs, *_ in _SETTINGS.values()),
    },
    departures="The paper's images are Fashion-MNIST, ours digits; training ends after 20 or 40 "
    "epochs, converged or not.",
)  # fmt: skip


_WIDTH, _GROUP = 200, 10
_RATES, _RUNS = (0.1, 0.01), 10
_EPOCHS = 100
_NEWTON_STEPS = 12  # bring gradients of all classifiers to rounding errors
_PARTS = {"fashion-part": 700, "cifar10-part": 500}  # data of the paper, and how many images


def _subnetworks_cells() -> list[dict[str, Any]]:
    sources = {"digits": 1000, image_source(): 1000}
    sources |= {data: num_train for data, num_train in _PARTS.items() if has_files(data)}
    return [
        {"data": data, "seed": seed, "lr": rate, "num_train": n, "epochs": _EPOCHS, "every": 10}
        for data, n in sorted(sources.items())
        for rate in _RATES
        for seed in range(_RUNS)
    ]


def run_subnetworks(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of units of one network, and how well each alone predicts throughout training.

    The network has two hidden layers of 200 units and is trained by plain stochastic gradient
    descent. For every class the units of the second are ranked by the absolute weight that each
    has at the end in the output of that class, and ten successive ones are a group. A group's loss
    at a checkpoint is that of a logistic classifier, fitted to tell the class from the rest by the
    outputs that the units of the group have there (Lyle et al. 2020, Appendix B.3).

    Args:
        cell: ``data``, ``seed``, ``lr``, ``num_train`` images, ``epochs`` in batches of 50, with a
            checkpoint before the first and each ``every`` epochs.

    Returns:
        Of each group of each class, largest weights first: ``sum``, of its cross-entropies at all
        checkpoints, nats a point, and ``weight``, the mean of its absolute weights. Of the whole
        network in the end ``loss``, its cross-entropy, and the test ``accuracy``.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"])
    generator = torch.Generator().manual_seed(cell["seed"])
    x, y = data.train_x.flatten(1), data.train_y
    network = MLP([x.shape[-1], _WIDTH, _WIDTH, CLASSES], generator=generator)
    *first, last = network.children()
    hidden = torch.nn.Sequential(*first)
    optimizer = torch.optim.SGD(network.parameters(), lr=cell["lr"])
    checkpoints = []
    for epoch in range(cell["epochs"]):
        if epoch % cell["every"] == 0:
            checkpoints.append(hidden(x).detach())
        for rows in torch.randperm(len(y), generator=generator).split(_BATCH):
            optimizer.zero_grad()
            cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
    weights, order = last.weight.detach().abs().sort(descending=True)
    losses = torch.stack([_group_losses(units[:, order], y) for units in checkpoints])
    with torch.no_grad():
        right = network(data.test_x.flatten(1)).argmax(-1) == data.test_y
        loss = cross_entropy(network(x), y)
    return {
        "sum": losses.sum(0).tolist(),
        "weight": weights.reshape(CLASSES, -1, _GROUP).mean(-1).tolist(),
        "loss": float(loss), "accuracy": float(right.double().mean()),
    }  # fmt: skip


def _group_losses(units: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of a logistic classifier for each class and group, nats a point.

    Weights of outputs that are scaled to mean zero and variance one have a standard normal prior;
    the intercept has none.

    Args:
        units: ``(N, C, U)``, for each class in its order.
        y: ``(N,)``.

    Returns:
        ``(C, U / 10)``.
    """
    # Units that are dead stay zero.
    units = (units - units.mean(0)) / units.std(0, correction=0).clamp_min(1e-6)
    groups = units.unflatten(-1, (-1, _GROUP)).movedim(0, -2)  # (C, G, N, 10)
    inputs = torch.cat([groups, torch.ones_like(groups[..., :1])], -1)
    target = one_hot(y, CLASSES).mT[:, None, :, None].to(inputs).expand_as(inputs[..., :1])
    precision = torch.ones(_GROUP + 1)
    precision[-1] = 0.0
    weights = inputs.new_zeros(*inputs.shape[:2], _GROUP + 1, 1)
    for _ in range(_NEWTON_STEPS):
        p = (inputs @ weights).sigmoid()
        gradient = inputs.mT @ (p - target) + precision.unsqueeze(-1) * weights
        curvature = inputs.mT @ (p * (1 - p) * inputs) + precision.diag()
        weights = weights - torch.linalg.solve(curvature, gradient)
    logits = inputs @ weights
    losses = binary_cross_entropy_with_logits(logits, target, reduction="none")
    return losses.mean((-2, -1))


def _subnetworks_claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    lines = []
    for (data, rate), some in cells.groupby(["data", "lr"]):  # type: ignore[misc]
        sums, weights = array(some["sum"]), array(some["weight"])
        # Over groups, of each network and class.
        rows = (values.reshape(-1, values.shape[-1]) for values in (-sums, weights))
        ranks = rank_correlation_rows(*rows).reshape(sums.shape[:2])
        every_class, mean = ranks.mean(0), ranks.mean(1)
        text = (
            f"{data}, learning rate {rate:g}: {with_error(mean, 2)}, of single classes "
            f"{every_class.min():.2f} to {every_class.max():.2f} (whole network: training loss "
            f"{some['loss'].mean():.2g}, test accuracy {some['accuracy'].mean():.3f})"
        )
        lines.append((text, differs(mean, 1), bool((every_class > 0).all())))
    yield Claim(
        "Lyle et al. 2020, Section 4.2 and Figures 4, 8 and 9",
        "Groups of hidden units to which descent gives larger weights in the output of a class "
        "have a lower sum of losses, by classifiers of their own.",
        "larger weight, lower sum, for the classes shown",
        *listed(lines, _SUM_AND_WEIGHT),
        "Sums and weights are of twenty groups for each of ten classes. A classifier is logistic, "
        "tells one class from the rest, and has a standard normal prior on weights of outputs of "
        "unit variance, so that the size of outputs does not matter.",
        rule="for each data set and learning rate, positive by two standard errors on average over "
        "classes, and positive for every class on average over networks",
        doubt="Ours: few images, and learning rates of our own choice.",
    )


def _draw_subnetworks(cells: pandas.DataFrame, figure: Figure) -> None:
    sources = list(cells.groupby("data"))
    panels = figure.subplots(len(_RATES), len(sources), squeeze=False)
    for column, (data, same_data) in zip(panels.T, sources, strict=True):
        for axes, (rate, some) in zip(column, same_data.groupby("lr"), strict=False):
            # A line for each class.
            means = (array(some[name]).mean(0).T for name in ("weight", "sum"))
            axes.plot(*means, ".-", markersize=4, linewidth=0.5)
            axes.set(xlabel="mean weight of the group", title=f"{data}, learning rate {rate:g}")
    for axes in panels[:, 0]:
        axes.set_ylabel("sum of losses, nats a point")


SUBNETWORKS = Experiment(
    "training-speed-subnetworks", "Groups of hidden units: descent favours those that train fast",
    _subnetworks_cells, run_subnetworks, _subnetworks_claims, _draw_subnetworks, size=(12.0, 5.6),
    items=("Figure 4", "Figure 8", "Figure 9"),
    paper={
        "Lyle et al. 2020, Section 4.2": {
            "data": ("CIFAR-10", "Fashion-MNIST"), "hidden_units": (200, 200), "group_size": 10,
            "training": "SGD until convergence", "runs": AtLeast(10),
        },
    },
    constants={
        "hidden_units": (_WIDTH, _WIDTH), "group_size": _GROUP, "runs": _RUNS,
        "training": f"SGD, {_EPOCHS} epochs",
    },
    departures="The paper's images are Fashion-MNIST and CIFAR-10, ours 1000 digits, 1000 of "
    "MNIST's test set, 700 of Fashion-MNIST and 500 of CIFAR-10; training ends after 100 epochs, "
    "converged or not.",
)  # fmt: skip
