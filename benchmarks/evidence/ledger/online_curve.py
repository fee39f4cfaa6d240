"""Networks on a curve and on two classes, learned online beside fixed precisions."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas
import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor

from benchmarks.data import fetch, has_files
from benchmarks.evidence.ledger.claims import Claim, Experiment, differs, graded, listed, with_error
from benchmarks.evidence.ledger.stacked_networks import function_variance, objective
from gpclml.curvature import Full, GaussianWeightPrior
from gpclml.fit import fit_map
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

_STARTS = (1e-3, 1.0, 100.0)
_DELTAS = tuple(10.0**power for power in range(-3, 3))
# Nats a point, of evidences and of test densities: single runs differ by .03 and more if their
# starts differ by rounding.
_WITHIN, _NEAR = 0.05, 0.05
_KEPT = 10  # epochs between evidences that are kept
_SOURCE = "Immer et al. 2021, Figure"
SETTINGS = {
    "width": 50, "rate": 0.01, "hyper_rate": 0.01, "every": 1, "hyper_steps": 1, "burn_in": 0,
    "curvature": "full GGN",
}  # fmt: skip
"""Of Figure 1, which Figures 3 and 4 share."""
_PAPER = SETTINGS | {"data": "snelson", "points": 148, "epochs": 1000}


def _cells() -> list[dict[str, Any]]:
    data = "snelson" if has_files("snelson") else "stand-in"
    common = {"data": data, "epochs": 1000, "held": 0}
    fits = [
        common | {"inputs": inputs, "depth": depth, "start": 1.0, "seed": seed}
        for seed in range(5)
        for inputs in ("raw", "standardized")
        for depth in (1, 3)
    ]
    kinds = [*({"start": start} for start in _STARTS), *({"fixed": delta} for delta in _DELTAS)]
    grid = [
        common | {"inputs": "raw", "depth": 3} | kind | {"held": held, "seed": seed}
        for seed in range(2)
        for held in (0, 30)
        for kind in kinds
    ]
    return fits + [cell for cell in grid if cell not in fits]


def curve(name: str) -> tuple[Tensor, Tensor]:
    """Two hundred points of a curve, ``(200, 1)`` and ``(200,)``.

    Args:
        name: ``"snelson"``, the set of Snelson and Ghahramani (2006), fetched into the data folder
            where it is missing; ``"stand-in"``, points of a similar curve.
    """
    if name == "snelson":
        x, y = (torch.tensor(np.loadtxt(path)) for path in fetch("snelson"))
    else:
        generator = torch.Generator().manual_seed(0)
        x = 6 * torch.rand(200, dtype=torch.float64, generator=generator)
        noise = 0.3 * torch.randn(200, dtype=torch.float64, generator=generator)
        y = (3 * x).sin() * 0.7 - (x - 3.5).square() * 0.2 + noise
    return x.unsqueeze(-1), y


def train_every_epoch(
    mll: LaplaceMarginalLogLikelihood, x: Tensor, y: Tensor, epochs: int, fixed: bool = False
) -> list[float]:
    """Trains weights and hyperparameters, a step of Adam at rate .01 on each in every epoch.

    The state of the largest evidence is kept.

    Args:
        mll: The evidence; trained in place.
        x: All points.
        y: Their targets.
        epochs: Number of them.
        fixed: Whether precisions stay as they are.

    Returns:
        The evidence after each step on the weights, in nats a point.
    """
    weights = list(mll.model.network.parameters())
    kept = {id(p) for p in [*weights, *([mll.model.prior.log_precision] if fixed else [])]}
    hyper = [p for p in mll.parameters() if id(p) not in kept]
    adams = [torch.optim.Adam(several, lr=0.01) for several in (weights, hyper)]
    history: list[float] = []
    best = mll.state_dict()
    for _ in range(epochs):
        _step(adams[0], mll.log_joint(mll.model(x), y))
        value = mll.evidence_of(x, y)()
        history.append(float(value.detach()))
        if history[-1] >= max(history):
            best = copy.deepcopy(mll.state_dict())
        _step(adams[1], value)
    mll.load_state_dict(best)
    return history


def _step(adam: torch.optim.Optimizer, value: Tensor) -> None:
    adam.zero_grad()
    (-value).backward()
    adam.step()


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A network of ReLU units on the points outside the gap from 1.5 to 3.

    Precisions of its tensors and the noise are learned online, or the noise alone.

    Args:
        cell: ``data``; ``inputs``, ``"raw"`` or ``"standardized"``; ``depth``, hidden layers of
            50; ``start`` of the precisions, or one that is ``fixed``; ``held``, number of points
            that are held out at random; ``epochs``; ``seed`` of start and held-out points.

    Returns:
        ``history``, every tenth evidence in nats a point; ``evidence``, the largest, and there
        ``noise``; at training points ``error``, the root of the mean squared one, and
        ``deviation``, the mean of the posterior predictive; ``test``, the mean predictive log
        density at held-out points, of those in the gap if none are held out.
    """
    x, y = curve(cell["data"])
    gap = (x[:, 0] >= 1.5) & (x[:, 0] <= 3)
    if cell["inputs"] == "standardized":
        x = (x - x[~gap].mean()) / x[~gap].std()
    generator = torch.Generator().manual_seed(cell["seed"])
    rows = torch.nonzero(~gap)[:, 0]
    rows = rows[torch.randperm(len(rows), generator=generator)]
    held, rows = rows[: cell["held"]], rows[cell["held"] :]
    network = MLP([1, *[50] * cell["depth"], 1], generator=generator, dtype=torch.float64)
    precision = cell.get("start", cell.get("fixed"))
    mll = objective(network, len(rows), "kernel", precision=precision)
    history = train_every_epoch(mll, x[rows], y[rows], cell["epochs"], "fixed" in cell)
    mll.curvature = Full()  # the same evidence, and a posterior
    evidence = mll.evidence_of(x[rows], y[rows])
    noise = mll.likelihood.noise.detach()

    def predicted(at: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            squares = (network(x[at]).squeeze(-1) - y[at]).square()
        return squares, noise + function_variance(mll, evidence, x[at])

    squares, variance = predicted(rows)
    test_squares, test_variance = predicted(held if len(held) else torch.nonzero(gap)[:, 0])
    density = -0.5 * (test_squares / test_variance + (2 * math.pi * test_variance).log())
    return {
        "history": history[::_KEPT], "evidence": max(history), "noise": float(noise.sqrt()),
        "error": float(squares.mean().sqrt()), "deviation": float(variance.sqrt().mean()),
        "test": float(density.mean()),
    }  # fmt: skip


def _claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    names = {"evidence": 1, "error": -1, "deviation": -1}
    texts, holds = {}, []
    for inputs, some in cells[(cells["start"] == 1) & (cells["held"] == 0)].groupby("inputs"):
        single, three = (some[some["depth"] == depth].set_index("seed") for depth in (1, 3))
        gaps = {name: (three[name] - single[name]).dropna() for name in names}
        texts[inputs] = "; ".join(
            f"{name} {three[name].mean():.3f} and {single[name].mean():.3f}, apart "
            f"{with_error(gaps[name], 3, '+')}"
            for name in names
        )
        if inputs == "raw":
            holds = [differs(gaps[name], sign) for name, sign in names.items()]
    yield Claim(
        f"{_SOURCE} 1",
        "Three hidden layers have the larger evidence and fit the curve; one underfits, with a "
        "larger predictive deviation.",
        "drawn, without figures",
        f"three layers and one, raw inputs: {texts['raw']}",
        graded(*holds),
        f"On standardized inputs: {texts['standardized']}. Which inputs and units "
        "the paper has is not stated; ReLU units and raw inputs are our choice.",
        rule="on raw inputs evidence larger, error and predictive deviation at training points "
        "smaller with three layers, each by two standard errors over starts",
        doubt="Not known: activation and scaling of the inputs are not stated, and the verdict "
        "depends on them. Tried raw and standardized inputs, and one start of tanh units: evidence "
        "-.528 with three layers and -.773 with one on raw inputs, -.475 and -.447 on standardized "
        "ones.",
    )

    deep = cells[(cells["inputs"] == "raw") & (cells["depth"] == 3)]
    # What begins from precision 1 has more seeds than the grid.
    deep = deep[deep["seed"].isin(deep["seed"][deep["fixed"].notna()])]
    online = deep[deep["held"] == 0]
    grid = online.dropna(subset="fixed").pivot(index="seed", columns="fixed", values="evidence")
    lines = []
    for start, some in online.groupby("start"):
        tuned = some.set_index("seed")
        apart = (tuned["evidence"] - grid.max(axis=1)).dropna()
        # Epochs until the evidence is as near to the grid's optimum as the rule asks.
        reached = [
            f"{_KEPT * int(np.argmax(near))}" if near.any() else "never"
            for seed in apart.index
            for near in [np.array(tuned["history"][seed]) > grid.loc[seed].max() - _WITHIN]
        ]
        text = (
            f"from {start:g}: {with_error(apart, 3, '+')} of the grid's optimum, "
            f"{apart.min():+.3f} at least, so near first at epoch (of every tenth): "
            f"{', '.join(reached)}; noise {tuned['noise'].mean():.3f}"
        )
        lines.append((text, apart.mean() > -_WITHIN))
    yield Claim(
        f"{_SOURCE} 4",
        "Learned online, the precisions reach the largest evidence of a grid, from any start.",
        "the optimum of the grid, in the same number of steps",
        *listed(lines),
        f"The grid's optimum, {grid.max(axis=1).mean():.3f} nats a point in the mean, is at "
        f"precision {', '.join(f'{delta:g}' for delta in grid.idxmax(axis=1))}. Under a fixed "
        "precision, one of all weights, the noise is learned alike. The grid has a value a decade.",
        rule=f"in the mean over seeds at most {_WITHIN} nats a point below, for each start",
        doubt="Ours or not known: activation and inputs are not stated, nor how the grid treats "
        "the noise. From 100 the network ends as a constant. Tanh units, one seed each: "
        "evidence -.606 from .001, -.528 from 1, -1.213 from 100; on standardized inputs -.527, "
        "-.475, -1.213.",
    )

    texts, gaps = [], []
    for _, some in deep[deep["held"] > 0].groupby("seed"):
        chosen, best = (some.loc[some[score].idxmax()] for score in ("evidence", "test"))
        name, other = (
            f"fixed {row['fixed']:g}" if row["fixed"] > 0 else f"online from {row['start']:g}"
            for row in (chosen, best)
        )
        texts.append(f"{name}: {chosen['test']:.3f}, best {best['test']:.3f}, of {other}")
        gaps.append(best["test"] - chosen["test"])
    yield Claim(
        f"{_SOURCE} 4, test log likelihood",
        "The largest evidence is at the best test log likelihood.",
        "drawn, without figures",
        f"test log density, nats a point, at the largest evidence: {'; '.join(texts)}; "
        f"{with_error(gaps, 3)} below the best",
        graded(np.mean(gaps) <= _NEAR),
        "Which test points the paper has is not stated: 30 of the 148 points are held out at "
        "random here.",
        rule=f"of the nine networks, online and fixed, that of the largest evidence is at most "
        f"{_NEAR} nats a point below the best, in the mean over seeds",
        doubt="Ours or not known: of 30 points the density is known to about a tenth.",
    )


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    course, grid = figure.subplots(1, 2)
    cells = cells[(cells["seed"] == cells["seed"].min()) & (cells["held"] == 0)]
    for _, row in cells[cells["start"] == 1].iterrows():
        epochs = _KEPT * np.arange(len(row["history"]))
        layers = "1 layer" if row["depth"] == 1 else f"{row['depth']} layers"
        course.plot(epochs, row["history"], label=f"{layers}, {row['inputs']} inputs")
    course.set(xlabel="epoch", ylabel="evidence, nats a point", title=cells["data"].iloc[0])
    deep = cells[(cells["inputs"] == "raw") & (cells["depth"] == 3)]
    for name, style in (("fixed", "o-"), ("start", "k*")):
        some = deep.dropna(subset=name).sort_values(name)
        label = "online, by start" if name == "start" else name
        grid.semilogx(some[name], some["evidence"], style, label=label)
    grid.set(xlabel="precision", ylabel="evidence, nats a point")
    for axes in (course, grid):
        axes.legend(fontsize=9)


EXPERIMENT = Experiment(
    "online-curve", "A curve: depths by their evidence, and precisions learned online", _cells,
    run_cell, _claims, _draw, items=("Figure 1", "Figure 4"),
    paper={
        f"{_SOURCE} 1": _PAPER | {"depth": (1, 3)},
        f"{_SOURCE} 4": _PAPER | {"start": _STARTS},
        f"{_SOURCE} 4, test": _PAPER | {"start": _STARTS, "points_trained_on": 148},
    },
    constants=SETTINGS | {"points": 148, "points_trained_on": 118},
    departures="[1, 50, 50, 50, 1] has 5,251 parameters; the paper prints 5,221. Precisions are of "
    "each tensor, as in the authors' code; the text has one a layer.",
)  # fmt: skip


_BANANA_SOURCE, _TRAININGS = "Immer et al. 2021, Figure 3", ("online", "weak")
_FITTED = 0.97  # of the training points, with the weak prior


def run_banana(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A network [2, 50, 2] of tanh units, trained twice from one start on all points at once.

    Online precisions of its tensors and the temperature are learned, with a step after every
    epoch. The weak prior stays as it is, and so does the temperature.

    Args:
        cell: ``data``, the 5300 points of ``"banana"``, or two interleaved arcs; ``points``, number
            of random rows that are trained on; ``epochs`` online; ``weak_precision`` and
            ``weak_epochs`` of the other; ``seed`` of rows and start.

    Returns:
        Of ``online`` and ``weak``: accuracy at training points and at all others, ``train_online``
        and so on, and the ``evidence`` in nats a point; ``temperature`` that was learned.
    """
    if cell["data"] == "banana":
        table = np.loadtxt(fetch("banana")[0], delimiter=",", skiprows=1)
        x, y = torch.tensor(table[:, :2]), torch.tensor(table[:, 2] > 0).long()
    else:
        x, y = map(torch.tensor, make_moons(5300, noise=0.4, random_state=0))
    generator = torch.Generator().manual_seed(cell["seed"])
    rows = torch.randperm(len(x), generator=generator)
    train, test = rows[: cell["points"]], rows[cell["points"] :]
    start = int(torch.randint(2**31, (), generator=generator))
    results: dict[str, Any] = {}
    for name in _TRAININGS:
        network = MLP([2, 50, 2], torch.nn.Tanh, generator=generator.manual_seed(start)).double()
        online = name == "online"
        precision = 1.0 if online else cell["weak_precision"]
        mll = LaplaceMarginalLogLikelihood(
            SoftmaxLikelihood(num_classes=2, mixing_weights=False),
            LinearizedNetwork(network, GaussianWeightPrior(network, "parameter", precision)),
            len(train), Full(),
            temperature=torch.nn.Parameter(torch.ones((), dtype=x.dtype)) if online else 1.0,
        )  # fmt: skip
        if online:
            train_every_epoch(mll, x[train], y[train], cell["epochs"])
            results["temperature"] = float(torch.as_tensor(mll.temperature).detach())
        else:
            epochs = cell["weak_epochs"]
            fit_map(mll, x[train], y[train], epochs=epochs, lr=0.01, progress=False)
        with torch.no_grad():
            results[f"evidence_{name}"] = float(mll.evidence_of(x[train], y[train])())
            right = network(x).argmax(1) == y
        for at, chosen in (("train", train), ("test", test)):
            results[f"{at}_{name}"] = float(right[chosen].double().mean())
    return results


def _banana_claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    gains = {at: cells[f"{at}_online"] - cells[f"{at}_weak"] for at in ("test", "evidence")}
    lines = [
        f"{name}: {with_error(100 * cells[f'train_{name}'], 1)} % of training and "
        f"{with_error(100 * cells[f'test_{name}'], 1)} % of test points, evidence "
        f"{with_error(cells[f'evidence_{name}'])} nats a point"
        for name in _TRAININGS
    ]
    yield Claim(
        _BANANA_SOURCE,
        "A weakly regularized network fits nearly all training points and predicts worse than "
        "one that is learned online; the evidence tells them apart.",
        "weak: nearly 100 % of training and 86 % of test points; online: 89 % of test points, "
        "and the larger evidence",
        "; ".join(lines) + f"; gain of online {with_error(100 * gains['test'], 1, '+')} points "
        f"and {with_error(gains['evidence'], 3, '+')} nats a point",
        graded(
            cells["train_weak"].mean() >= _FITTED,
            *(differs(gain, 1) for gain in gains.values()),
        ),
        f"Over {len(cells)} random subsets; test points are all others. Weak is a precision of "
        f"{cells['weak_precision'].iloc[0]:g} for {cells['weak_epochs'].iloc[0]} epochs, in "
        "which it fits nearly all training points, as the paper says of its own; tanh units "
        "and these values are our choice. The temperature that is learned is "
        f"{with_error(cells['temperature'], 2)}.",
        rule=f"weak fits {100 * _FITTED:g} % of training points; online better at test points "
        "and in evidence, each by two standard errors over subsets",
        doubt="Ours or not known: neither units nor the weak prior are stated.",
    )


def _draw_banana(cells: pandas.DataFrame, figure: Figure) -> None:
    accuracy, evidence = figure.subplots(1, 2)
    for name in _TRAININGS:
        accuracy.plot(cells[f"train_{name}"], cells[f"test_{name}"], "o", label=name)
        evidence.plot(cells[f"evidence_{name}"], cells[f"test_{name}"], "o", label=name)
    accuracy.set(xlabel="accuracy at training points", ylabel="accuracy at test points")
    evidence.set(xlabel="evidence, nats a point", ylabel="accuracy at test points")
    accuracy.legend()


BANANA = Experiment(
    "banana", "Two classes: a weak prior, and one learned online",
    lambda: [
        {"data": "banana" if has_files("banana") else "stand-in", "points": 265, "epochs": 200,
         "weak_precision": 1e-4, "weak_epochs": 3000, "seed": seed}
        for seed in range(10)
    ],
    run_banana, _banana_claims, _draw_banana, items=("Figure 3",),
    paper={_BANANA_SOURCE: SETTINGS | {"data": "banana", "points": 265, "epochs": 200}},
    constants=SETTINGS,
    departures="The temperature divides the log likelihood; the paper calls it that of the "
    "softmax. Precisions are of each tensor, as in the authors' code; the text has one a layer.",
)  # fmt: skip
