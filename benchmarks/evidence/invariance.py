"""Whether the evidence finds a rotation that images have, and none that they do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.evidence.data import images, rotated
from benchmarks.evidence.networks import network
from benchmarks.evidence.training import CLASSES, objective, outputs_at, predictive_scores, trained
from gpclml.curvature import FunctionSpace
from gpclml.curvature.invariances import AffineAugmentation, AveragedNetwork
from gpclml.fit import fit_online

__all__ = ["run_invariance"]

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
        rotated(part, largest, cell["seed"] + i)
        for i, part in enumerate((data.train_x, data.test_x))
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
    augmentation.samples = _TEST_SAMPLES
    with torch.no_grad():
        outputs = torch.cat([averaged(augmentation(part)) for part in test_x.split(100)])
    return {
        "rotation": math.degrees(augmentation.ranges()["rotation"]),
        "evidence": fit.objective,
        "best_epoch": float(fit.best),
        **predictive_scores(mll, outputs.unsqueeze(0), data.test_y, "map"),
    }
