"""Networks on UCI sets: hyperparameters learned online by the evidence, or by validation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure

from benchmarks._figures import PALETTE
from benchmarks.data import EMBEDDED, load, load_published_split, split
from benchmarks.evidence.ledger.claims import (
    Claim,
    Experiment,
    differs,
    graded,
    listed,
    mean_and_error,
    with_error,
)
from benchmarks.evidence.ledger.stacked_networks import (
    Networks,
    function_variance,
    objective,
    train_fixed,
    train_online,
)
from gpclml.models import Standardizer

PUBLISHED: Mapping[str, tuple[tuple[float, float], ...]] = {
    "yacht": ((2.30, 0.02), (1.01, 0.05), (5.89, 1.25), (2.43, 0.61), (1.48, 0.07)),
    "energy": ((1.02, 0.05), (0.82, 0.03), (0.55, 0.11), (0.73, 0.15), (0.53, 0.02)),
    "concrete": ((3.17, 0.04), (3.05, 0.04), (3.06, 0.05), (3.07, 0.04), (3.13, 0.06)),
    "boston": ((2.71, 0.10), (2.57, 0.05), (2.69, 0.12), (2.62, 0.12), (2.70, 0.09)),
    "wine-red": ((0.98, 0.02), (0.97, 0.02), (0.93, 0.02), (0.93, 0.01), (0.94, 0.02)),
    "power": ((2.82, 0.01), (2.83, 0.01), (2.78, 0.02), (2.78, 0.01), (2.78, 0.02)),
    "kin8nm": ((-1.09, 0.01), (-1.23, 0.01), (-1.14, 0.01), (-1.14, 0.01), (-1.13, 0.01)),
    "naval": ((-5.75, 0.05), (-6.40, 0.06), (-6.93, 0.03), (-6.92, 0.04), (-6.88, 0.05)),
}
"""Test NLL of CV MAP, CV Laplace, and of full GGN, full EF and KFAC online, each with its error."""

_COLUMNS = ("CV, mode", "CV, Laplace", "full", "ef", "kronecker", "diagonal")
_SPLITS, _SOURCE = 10, "Immer et al. 2021, Table 1"
_claim = partial(Claim, _SOURCE)
_FIXED = {"hidden_layers": 1, "width": 50, "activation": "ReLU"}
_PAPER = _FIXED | {
    "splits": _SPLITS, "epochs": 10000, "every": 1, "burn_in": 0, "rate": 1e-3, "hyper_rate": 1e-3,
}  # fmt: skip
"""Of Table 1: Adam has its standard rate, and a step on hyperparameters follows every epoch."""
_BATCHES = {"naval": {"batch_size": 2048}}
"""Points of a step, where 10,000 steps on all points end before the training error has fallen."""
_TRAIN = ("train_x", "train_y")
_DELTAS = tuple(10.0**power for power in range(-2, 3))  # of cross-validation


def _cells() -> list[dict[str, Any]]:
    names = list(PUBLISHED)  # small ones first
    common = {"splits": _SPLITS, "epochs": 10000}
    return [
        common | {"dataset": data, "method": method} | _BATCHES.get(data, {})
        for several in (names[:5], names[5:])
        for methods in (("kronecker", "full"), ("cv",), ("ef",), ("diagonal",))
        for data in several
        for method in methods
    ]


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Networks [D, 50, 1] of several splits, trained together.

    Weights are trained by Adam on all points at once, or in batches of points, with a learning
    rate that falls from .01 to 1e-5, or at a constant one. Online, after 100 epochs and then after
    every 50, or as the cell says, precisions of the four tensors and the noise make a step of Adam
    on the evidence of each network, at rate .1 or the constant one; the network is kept as it was
    at its largest evidence. By validation, the precision of all weights
    is the best of five on a tenth of the training points, by the error of the mode or by the
    density of the posterior, and the chosen one trains again on all. The noise is the mean squared
    error, of the mode in validation and of the posterior in training.

    Args:
        cell: ``dataset``, of the UCI sets; ``splits``, their number, published
            ones where the set has them; ``method``: ``"full"``, ``"ef"``, ``"kronecker"``,
            ``"diagonal"`` or ``"cv"``; ``epochs``; ``batch_size``, of a step, if not all;
            ``every``, ``burn_in`` and ``rate``, where they are others.

    Returns:
        Of each split ``nll_map`` and ``nll_laplace``, the mean over test points in nats and units
        of the data, of the mode and of the linearized posterior; ``noise``, its standard
        deviation over that of the targets, ``error``, the mean squared one of the mode in units of
        their variance, and ``evidence`` of training points.
    """
    splits = [_split(cell["dataset"], k) for k in range(cell["splits"])]
    if cell["method"] == "cv":
        trained = _validated(splits, cell)
    else:
        networks = _stack(splits, cell)
        n = networks.x.shape[1]
        trained = [objective(network, n, cell["method"]) for network in networks.single]
        train_online(networks, trained, cell)
    results = list(map(_scores, splits, trained))
    return {name: [result[name] for result in results] for name in results[0]}


def _split(name: str, k: int) -> dict[str, Any]:
    """Standardized training and test points of a split, and the unit of its targets."""
    data = load(name)
    # The set that ships with scikit-learn has no published splits.
    rows = split(data.num_data, k) if name == EMBEDDED else load_published_split(name, k)
    x_scale = Standardizer.fit(data.inputs[rows.train], dim=0)
    y_scale = Standardizer.fit(data.targets[rows.train], dim=0)
    x = x_scale.transform(data.inputs).double()
    y = y_scale.transform(data.targets).double()
    return {
        "train_x": x[rows.train], "train_y": y[rows.train], "test_x": x[rows.test],
        "test_y": y[rows.test], "unit": float(y_scale.scale), "seed": k,
    }  # fmt: skip


def _stack(splits: list[dict[str, Any]], cell: Mapping[str, Any]) -> Networks:
    x, y = (torch.stack([split_data[name] for split_data in splits]) for name in _TRAIN)
    seeds = [split_data["seed"] for split_data in splits]
    rates = {"rates": (cell["rate"], cell["rate"])} if "rate" in cell else {}
    return Networks(seeds, x, y, cell["epochs"], cell.get("batch_size"), **rates)


def _validated(splits: list[dict[str, Any]], cell: Mapping[str, Any]) -> list[Any]:
    """Objectives for each split by the best precision for modes, and for the posterior."""
    held = len(splits[0]["train_y"]) // 10
    inner = []
    for split_data in splits:
        generator = torch.Generator().manual_seed(split_data["seed"])
        order = torch.randperm(len(split_data["train_y"]), generator=generator)
        x, y = (split_data[name][order] for name in _TRAIN)
        points = {"train_x": x[held:], "train_y": y[held:], "test_x": x[:held], "test_y": y[:held]}
        # One stack trains every precision of every split.
        inner += [split_data | points] * len(_DELTAS)
    mlls = _trained_at(inner, [*_DELTAS] * len(splits), cell)
    scores = pandas.DataFrame(map(_scores, inner, mlls))

    def best(score: str) -> tuple[list[float], list[float]]:
        values = scores[score].to_numpy().reshape(len(splits), -1)
        return [_DELTAS[index] for index in values.argmin(1)], values.min(1).tolist()

    # Modes choose by their error, posteriors by their density.
    deltas, errors = best("error")
    # The noise of a mode is what it errs by on points that it has not seen.
    modes = _trained_at(splits, deltas, cell, errors)
    posteriors = _trained_at(splits, best("nll_laplace")[0], cell)
    return list(zip(modes, posteriors, strict=True))


def _trained_at(splits: list, deltas: list[float], cell: Any, noise: Any = None) -> list[Any]:
    """Trained objectives whose noise is given, or is the error in training."""
    networks = _stack(splits, cell)
    trained = train_fixed(networks, deltas)
    return [
        objective(network, networks.x.shape[1], "full", "network", *others)
        for network, *others in zip(networks.single, deltas, noise or trained, strict=True)
    ]


def _scores(split_data: dict[str, Any], trained: Any) -> dict[str, float]:
    """Of an objective, or of two: for modes, and for the posterior."""
    mode_mll, posterior_mll = trained if isinstance(trained, tuple) else (trained, trained)
    x, y, unit = split_data["test_x"], split_data["test_y"], math.log(split_data["unit"])
    nlls: dict[str, float] = {}
    for name, mll in (("map", mode_mll), ("laplace", posterior_mll)):
        network, noise = mll.model.network, mll.likelihood.noise.detach()
        with torch.no_grad():
            error = network(x).squeeze(-1) - y
        # Of the mode: noise alone; the posterior adds the variance of its function.
        variance = noise.expand(len(y))
        # The mode comes first, and its error is that which is kept.
        nlls.setdefault("error", float(error.square().mean()))
        if name == "laplace":
            evidence = mll.evidence_of(split_data["train_x"], split_data["train_y"])
            variance = variance + function_variance(mll, evidence, x)
            nlls["evidence"] = float(evidence().detach())
        density = -0.5 * (error.square() / variance + (2 * math.pi * variance).log())
        nlls[f"nll_{name}"] = unit - float(density.mean())
    return nlls | {"noise": float(mode_mll.likelihood.noise.detach().sqrt())}


def _columns(cells: pandas.DataFrame) -> dict[str, dict[str, np.ndarray]]:
    """Test NLLs over splits by data set and column of the paper's table."""
    tables: dict[str, dict[str, np.ndarray]] = {data: {} for data in PUBLISHED}
    for _, row in cells.iterrows():
        columns = tables.setdefault(row["dataset"], {})
        # Online NLLs are of the mode with the learned noise.
        columns["CV, mode" if row["method"] == "cv" else row["method"]] = np.array(row["nll_map"])
        if row["method"] == "cv":
            columns["CV, Laplace"] = np.array(row["nll_laplace"])
    return {data: columns for data, columns in tables.items() if columns}


_REMARK = (
    "Online NLLs are those of the mode with the learned noise. The splits are the first ten of "
    "the public ones for these sets; we do not know which ten the paper has. The paper's large "
    "NLL of yacht by the full GGN is caused by single points: it is reproduced on the random "
    "splits of the study "
    "[online](results/README.md), 4.98 ± 2.39, and not on these. Networks of naval are trained in "
    "batches of 2048 points: with as many epochs on all points at once, which suffice for the "
    "other sets, training ends too early, at test NLLs of -6.47 ± .07 (full GGN), -6.36 ± .07 "
    "(empirical Fisher) and -6.37 ± .08 (KFAC)."
)
_DOUBT = (
    "Ours or the splits': the paper's ten splits are not public, and its steps on hyperparameters "
    "follow every epoch, as in `uci-every-epoch`. Tried on the first ten public splits, and in the "
    "study [online](results/README.md) on five random ones with other rates and 3000 epochs."
)
_DOUBT_OF_MODES = (
    "Ours, perhaps: cross-validated modes predict better here than in the paper, as their noise is "
    "their validation error. The paper's may be the training error, which for overfit networks is "
    "far too small: tried so on yacht and energy, modes were worse than all others, and the claim "
    "held."
)


def _claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    tables, every_epoch = _columns(cells), "every" in cells
    after = ", with a step on them after every epoch" if every_epoch else ""
    names = {"full": "the full GGN", "ef": "the full empirical Fisher", "kronecker": "KFAC"}
    for method, words in names.items():
        lines, published = [], []
        apart: dict[str, list[str]] = {"better": [], "worse": []}
        for data, columns in tables.items():
            if method not in columns or data not in PUBLISHED:
                continue
            value, error = PUBLISHED[data][_COLUMNS.index(method)]
            mean, ours = mean_and_error(columns[method])
            published.append(f"{data} {value:.2f} ± {error:.2f}")
            within = abs(mean - value) <= 2 * math.hypot(error, ours)
            lines.append((f"{data} {with_error(columns[method], 2)}", within))
            if not within:
                apart["better" if mean < value else "worse"].append(data)
        text, verdict = listed(lines)
        yield _claim(
            "Test NLL of networks whose hyperparameters are learned online by the "
            f"evidence with {words}{after}.",
            "; ".join(published),
            text + "".join(f"; {w} on: {', '.join(on)}" for w, on in apart.items() if on),
            verdict,
            "" if every_epoch else _REMARK,
            rule="on each set within two combined standard errors of the published; what "
            "is better or worse by more does not count",
            doubt=_DOUBT,
        )
    for first, statement in (
        ("kronecker", "KFAC online predicts better than the mode by cross-validation."),
        ("CV, Laplace", "Of cross-validated networks the Laplace posterior predicts better than "
         "the mode."),
    ):  # fmt: skip
        gains, published, wins, agree = [], [], [], []
        for data, columns in tables.items():
            if {first, "CV, mode"} <= set(columns) and data in PUBLISHED:
                gain = columns["CV, mode"] - columns[first]
                mode, other = (PUBLISHED[data][_COLUMNS.index(n)][0] for n in ("CV, mode", first))
                published.append(f"{data} {mode - other:+.2f}")
                gains.append(f"{data} {with_error(gain, 2, '+')}")
                wins.append(gain.mean() > 0)
                agree.append(wins[-1] == (mode > other))
        if gains:
            yield _claim(
                statement,
                "gain in nats: " + "; ".join(published),
                "gain in nats: " + "; ".join(gains),
                # The sign of each published gain, and ours on most sets.
                graded(sum(wins) > len(wins) / 2, all(agree)),
                rule="on most sets; with the published sign on each",
                doubt=_DOUBT_OF_MODES,
            )
    lost: dict[str, list[tuple[str, bool]]] = {"kronecker": [], "full": []}
    for data, columns in tables.items():
        for method in lost:
            if {"diagonal", method} <= set(columns):
                gap = columns["diagonal"] - columns[method]
                lost[method].append((f"{data} {with_error(gap, 2, '+')}", differs(gap, 1)))
    if lost["kronecker"]:
        yield Claim(
            f"beside {_SOURCE}",
            "With the diagonal of the GGN in place of KFAC the learned networks predict worse.",
            "no figure",
            *listed(lost["kronecker"], "loss in nats: "),
            rule="a loss by two standard errors on each set",
            doubt="A question of our own, whose answer depends on the set. Tried against KFAC, and "
            f"against the full GGN: {'; '.join(text for text, _ in lost['full'])}.",
            kind="question",
        )


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    tables = _columns(cells)
    several = np.atleast_1d(figure.subplots(1, len(tables)))
    for axes, (data, columns) in zip(several, tables.items(), strict=True):
        for index, name in enumerate(_COLUMNS):
            if name in columns:
                mean, error = mean_and_error(columns[name])
                axes.errorbar(index - 0.12, mean, error, fmt="o", color=PALETTE[0])
            if index < len(PUBLISHED.get(data, ())):
                axes.errorbar(index + 0.12, *PUBLISHED[data][index], fmt="s", color="gray")
        axes.set_xticks(range(len(_COLUMNS)), _COLUMNS, rotation=90)
        axes.set_title(data)
    several[0].set_ylabel("test NLL, nats: here (o), published (squares)")


EXPERIMENT = Experiment(
    "uci-networks", "UCI sets: hyperparameters by the evidence, online, or by validation", _cells,
    run_cell, _claims, _draw, size=(14.0, 4.0), hours=True,
    items=("Table 1",), paper={_SOURCE: _PAPER},
    constants=_FIXED | {"every": 50, "burn_in": 100, "rate": 0.01, "hyper_rate": 0.1},
    ready=lambda: [_split(name, 0) for name in PUBLISHED],
)  # fmt: skip

EVERY_EPOCH = Experiment(
    "uci-every-epoch", "Small UCI sets: a step on hyperparameters after every epoch",
    lambda: [
        {"dataset": data, "method": method, "splits": _SPLITS, "epochs": 10000, "every": 1,
         "burn_in": 0, "rate": 1e-3}
        for method in ("kronecker", "full", "ef") for data in list(PUBLISHED)[:5]
    ],
    run_cell, _claims, _draw, size=(10.0, 4.0), hours=True,
    items=("Table 1",), paper={_SOURCE: _PAPER}, constants=_FIXED | {"hyper_rate": 1e-3},
    ready=lambda: [_split(name, 0) for name in list(PUBLISHED)[:5]],
)  # fmt: skip
"""Immer et al. (2021), Table 1, five sets at the paper's steps.

Extrapolated from 10 to 40 epochs, of one core: with Kronecker factors .2 hours (yacht) to .4 hours
(wine-red), with the full GGN .9 to 4.2 hours; about a day for all fifteen cells.
"""
