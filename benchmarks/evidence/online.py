"""Precisions and invariances learned in training (Immer et al. 2021 and 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from gpytorch.likelihoods import GaussianLikelihood

from benchmarks.data import load, split
from benchmarks.evidence.bounds import STRUCTURES
from benchmarks.evidence.invariances import AffineAugmentation, AveragedNetwork
from benchmarks.evidence.training import (
    CLASSES,
    evidence_of_all,
    images,
    network,
    objective,
    outputs_at,
    predictive_scores,
    rotated,
    trained,
    trained_online,
)
from gpclml.curvature import FunctionSpace, GaussianWeightPrior
from gpclml.evidence.sampling import linearized_outputs, marginal_log_densities
from gpclml.fit import fit_online
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork, Standardizer

__all__ = ["run_invariance", "run_regression", "run_search"]

_DRAWS, _WIDTH = 200, 50


def run_regression(cell: Mapping[str, Any]) -> dict[str, float]:
    """A network [D, 50, 1] on a UCI set, its precisions and noise learned online.

    Args:
        cell: ``data``, ``seed`` (of the 90/10 split and the start), ``structure``, ``hessian``,
            ``epochs``, ``precision`` (the start; one a layer), ``device``.

    Returns:
        ``nll_map`` and ``nll_laplace`` of test points, in nats and original units, by the mode
        and by the linearized posterior; ``rmse``, of the mode, original units; ``evidence``, nats
        a training point in standardized units; ``noise`` (standard deviation, standardized).
    """
    data = load(cell["data"])
    rows = split(data.num_data, cell["seed"])
    to = {"dtype": torch.get_default_dtype(), "device": cell["device"]}
    x_scale = Standardizer.fit(data.inputs[rows.train], dim=0)
    y_scale = Standardizer.fit(data.targets[rows.train], dim=0)
    x = x_scale.transform(data.inputs).to(**to)
    y = y_scale.transform(data.targets).to(**to)
    (train_x, train_y), (test_x, test_y) = (
        (x[rows_of_split], y[rows_of_split]) for rows_of_split in (rows.train, rows.test)
    )
    unit = float(y_scale.scale)
    generator = torch.Generator().manual_seed(cell["seed"])
    # A seed gives the split and the start.
    start = MLP([x.shape[1], _WIDTH, 1], generator=generator).to(cell["device"])
    likelihood = GaussianLikelihood().to(cell["device"])
    likelihood.noise = 1.0
    model = LinearizedNetwork(start, GaussianWeightPrior(start, "layer", cell["precision"]))
    mll = LaplaceMarginalLogLikelihood(
        likelihood, model, len(train_x), STRUCTURES[cell["structure"]],
        hessian=cell["hessian"],
    )  # fmt: skip
    fit = fit_online(
        mll, train_x, train_y, epochs=cell["epochs"], lr=1e-2, final_lr=1e-4, burn_in=100,
        every=50, hyper_steps=10, seed=cell["seed"], progress=False,
    )  # fmt: skip
    evidence = mll.evidence_of(train_x, train_y)
    # Of the epoch with the best evidence, whose state the fit has kept.
    draws = linearized_outputs(start, evidence.sample_weights(_DRAWS), test_x)
    mode_outputs = outputs_at(start, test_x).unsqueeze(0)
    nlls = {
        # Log densities of standardized targets become those of original units.
        name: float(math.log(unit) - marginal_log_densities(likelihood, at, test_y).mean())
        for name, at in (("nll_map", mode_outputs), ("nll_laplace", draws))
    }
    error = mode_outputs.flatten() - test_y
    return {
        **nlls, "rmse": float(error.square().mean().sqrt()) * unit, "evidence": fit.objective,
        "noise": float(likelihood.noise.detach().sqrt()), "best_epoch": float(fit.best),
    }  # fmt: skip


def run_search(cell: Mapping[str, Any]) -> dict[str, float]:
    """A classifier trained at one precision of a grid, or with precisions learned online.

    Args:
        cell: ``data``, ``architecture``, ``precision``, ``by`` (``"grid"``: it stays;
            ``"network"`` or ``"layer"``: the start of what is learned), ``num_train``,
            ``epochs``, ``seed``, ``device``.

    Returns:
        ``evidence`` in nats a point; accuracy, log density and calibration error of the mode at
        test points.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"], cell["device"])
    start = network(cell["architecture"], *data.train_x.shape[1:3], CLASSES, cell["seed"])
    start = start.to(cell["device"])
    x, y = data.train_x, data.train_y
    options = cell["precision"], cell["epochs"], cell["seed"]
    if cell["by"] == "grid":
        mll = trained(start, x, y, *options)
    else:
        # The precision is only the start of those that are learned.
        precision, *others = options
        mll = trained_online(start, x, y, precision, cell["by"], *others)
    evidence = evidence_of_all(mll, x, y)
    outputs = outputs_at(start, data.test_x).unsqueeze(0)
    precisions = mll.model.prior.log_precision.detach().exp()
    return {
        "evidence": float(evidence().detach()),
        "precision_least": float(precisions.min()),
        "precision_largest": float(precisions.max()),
        **predictive_scores(mll, outputs, data.test_y, "map"),
    }


_SAMPLES, _TEST_SAMPLES = 4, 20


def run_invariance(cell: Mapping[str, Any]) -> dict[str, float]:
    """A classifier of images that are turned by up to a half of a right angle, or upright.

    Args:
        cell: ``data``, ``architecture``, ``precision`` (the start; one a layer), ``turned``
            (largest angle of the images, degrees), ``invariance`` (``"learned"``; ``"none"``: a
            network without), ``num_train``, ``epochs``, ``seed``, ``device``.

    Returns:
        ``rotation``, the range that is learned, in degrees, at the best evidence and
        ``rotation_last`` at the end; ``evidence``; accuracy, log density and calibration error at
        test points, turned alike.
    """
    data = images(cell["data"], cell["num_train"], cell["seed"], cell["device"])
    largest = math.radians(cell["turned"])
    x, test_x = (
        # Test images are turned by other angles of the same range.
        rotated(images_of_split, largest, cell["seed"] + i)
        for i, images_of_split in enumerate((data.train_x, data.test_x))
    )
    plain = network(cell["architecture"], *x.shape[1:3], CLASSES, cell["seed"]).to(cell["device"])
    if cell["invariance"] == "none":
        mll = trained(plain, x, data.train_y, cell["precision"], cell["epochs"], cell["seed"])
        outputs = outputs_at(plain, test_x).unsqueeze(0)
        return dict(predictive_scores(mll, outputs, data.test_y, "map"))
    averaged = AveragedNetwork(plain)
    augmentation = AffineAugmentation({"rotation": 0.2}, _SAMPLES, cell["seed"]).to(cell["device"])
    mll = objective(
        averaged, len(x), cell["precision"], "layer", FunctionSpace(), augmentation,
        outputs="single", seed=cell["seed"],
    )  # fmt: skip
    fit = fit_online(
        mll, x, data.train_y, epochs=cell["epochs"], batch_size=100, lr=3e-3, final_lr=3e-5,
        hyper_lr=0.05, hyper_steps=10, burn_in=3, every=1, seed=cell["seed"], progress=False,
    )  # fmt: skip
    averaged.eval()
    # Testing averages over more versions: no gradient has to be kept.
    augmentation.samples = _TEST_SAMPLES
    with torch.no_grad():
        outputs = torch.cat(
            [averaged(augmentation(images_of_split)) for images_of_split in test_x.split(100)]
        )
    return {
        "rotation": math.degrees(augmentation.ranges()["rotation"]),
        "evidence": fit.objective,
        "best_epoch": float(fit.best),
        **predictive_scores(mll, outputs.unsqueeze(0), data.test_y, "map"),
    }
