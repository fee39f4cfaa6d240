"""Learned lengthscales of an RBF kernel and their bias with few points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import torch
from gpytorch.kernels import RBFKernel
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.evidence.ledger.claims import (
    Claim,
    Experiment,
    array,
    differs,
    graded,
    mean_and_error,
    with_error,
)
from gpclml.conditioning import RandomOrderings
from gpclml.evaluation import conditional_log_marginal_likelihood, log_marginal_likelihood
from gpclml.models import GPRegression

__all__ = ["EXPERIMENT"]

_LENGTHSCALE, _NOISE, _RANGE = 4.0, 0.04, 50.0
_LOWEST, _HIGHEST = 0.2, 20.0
_SIZES = (5, 10, 20, 50, 100, 149)
_PUBLISHED = {
    "lml": (6.5066, 5.3239, 4.4124, 4.2810, 4.0860, 4.0384),
    "clml": (5.4051, 4.7784, 4.4018, 4.1275, 4.0385, 4.0260),
}
_SOURCE = "Lotfi et al. 2022, Figures 8a and 22a"


def _cells() -> list[dict[str, Any]]:
    common = {"experiment": "lengthscale-bias", "lengthscales": 100, "orders": 50}
    return [common | {"seed": seed, "sizes": _SIZES} for seed in range(100)]


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Lengthscales that the LML and the CLML choose from the first n points of one data set.

    The data are a draw of a GP with an RBF kernel of lengthscale 4 and outputscale 1 at points
    uniform in [0, 50], plus noise of variance .04; all but the lengthscale is known to the model.
    The paper does not say its ranges and noise; with these the LML learns lengthscales near the
    published ones. It trains by Adam; here the largest value over lengthscales from .2 to 20,
    evenly spaced in the logarithm, is taken, so that neither start nor number of steps counts.

    Args:
        cell: ``seed`` of the data, ``sizes`` n, number of ``lengthscales``, ``orders`` of the
            CLML, which conditions on the first int(.9 n) points of each.

    Returns:
        ``lml`` and ``clml``, the lengthscales chosen at each size.
    """
    x, y = _data(cell["seed"], max(cell["sizes"]))
    ends = math.log(_LOWEST), math.log(_HIGHEST)
    lengthscales = torch.linspace(*ends, cell["lengthscales"], dtype=x.dtype).exp()
    chosen = {"lml": [], "clml": []}
    for n in cell["sizes"]:
        model = _models(x[:n], y[:n], lengthscales)
        orders = RandomOrderings(cell["orders"], int(0.9 * n), seed=0)
        clml = conditional_log_marginal_likelihood(model, orders).mean(-1)
        for name, values in (("lml", log_marginal_likelihood(model)), ("clml", clml)):
            chosen[name].append(float(lengthscales[values.argmax()]))
    return chosen


def _data(seed: int, points: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = _RANGE * torch.rand(points, 1, dtype=torch.float64, generator=generator)
    covariance = torch.exp(-0.5 * (x - x.mT).square() / _LENGTHSCALE**2)
    root = torch.linalg.cholesky(covariance + _NOISE * torch.eye(points, dtype=x.dtype))
    return x, root @ torch.randn(points, dtype=x.dtype, generator=generator)


def _models(x: Tensor, y: Tensor, lengthscales: Tensor) -> GPRegression:
    """A batch of models, one for each lengthscale."""
    batch = lengthscales.shape
    kernel = RBFKernel(batch_shape=batch)
    x, y = x.expand(*batch, *x.shape), y.expand(*batch, *y.shape)
    model = GPRegression(x, y, kernel=kernel, mean="zero", standardize=False)
    kernel.lengthscale = lengthscales.reshape(-1, 1, 1)
    model.likelihood.noise = _NOISE
    return model


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    sizes = cells["sizes"].iloc[0]
    lml, clml = (array(cells[name]) for name in ("lml", "clml"))
    return [_overestimates(sizes, lml), _compared(sizes, lml, clml)]


def _overestimates(sizes: list[int], lml: NDArray[np.float64]) -> Claim:
    return Claim(
        _SOURCE,
        "The LML overestimates the lengthscale with few points, and less with more.",
        "true 4; LML " + _by_size(sizes, [f"{one:.2f}" for one in _PUBLISHED["lml"]]),
        "LML " + _by_size(sizes, [with_error(one, 2) for one in lml.T]),
        graded(differs(lml[:, 0] - _LENGTHSCALE, 1), differs(lml[:, 0] - lml[:, -1], 1)),
        "Means are over all data sets, those whose largest value lies at the end of the range "
        f"({_HIGHEST:g}) included.",
    )


def _compared(sizes: list[int], lml: NDArray[np.float64], clml: NDArray[np.float64]) -> Claim:
    paired = (lml - clml).T
    published = np.subtract(*_PUBLISHED.values())
    larger = paired[2:].mean(0) if len(paired) > 2 else paired[0]
    return Claim(
        _SOURCE,
        "The CLML (m = .9 n) is less biased than the LML.",
        "LML minus CLML " + _by_size(sizes, [f"{one:+.2f}" for one in published]),
        "LML minus CLML "
        + _by_size(sizes, [with_error(one, 2) for one in paired])
        + "; CLML "
        + _by_size(sizes, [with_error(one, 2) for one in clml.T]),
        graded(*(differs(one, 1) for one in paired[:2]), differs(larger, 1)),
        "Three parts: with the fewest points, with the next size, and with all larger sizes "
        "together, the CLML is lower by two standard errors.",
    )


def _by_size(sizes: list[int], values: list[str]) -> str:
    return ", ".join(f"{one} (n = {n})" for n, one in zip(sizes, values, strict=False))


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    axes = figure.subplots()
    sizes = cells["sizes"].iloc[0]
    for color, name in (("C0", "lml"), ("C1", "clml")):
        several = [mean_and_error(values) for values in array(cells[name]).T]
        means, errors = zip(*several, strict=True)
        axes.errorbar(sizes, means, errors, color=color, marker="o", label=name.upper())
        label = f"{name.upper()}, published"
        published = _PUBLISHED[name][: len(sizes)]
        axes.plot(sizes, published, color=color, linestyle=":", marker="x", label=label)
    axes.axhline(_LENGTHSCALE, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="points n", ylabel="mean learned lengthscale")
    axes.legend()


EXPERIMENT = Experiment(
    "lengthscale-bias", "A lengthscale learned from few points", _cells, run_cell, _claims, _draw,
    size=(6.0, 3.6),
)  # fmt: skip
