"""Points of a real set in single precision, and the model that they train."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.speed.methods import ExactRBF
from gpclml.datasets import load

__all__ = ["Data", "load_split", "starting_model"]


@dataclass(frozen=True)
class Data:
    """Standardized by the training points."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_split(dataset: str, num_test: int, seed: int, num_train: int | None = None) -> Data:
    """Random test points of a set; all others, or some, to train on. In single precision.

    Args:
        dataset: A UCI set.
        num_test: Test points.
        seed: Of the split.
        num_train: Training points; all others if None.
    """
    data = load(dataset)
    order = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(seed))
    test, train = order[:num_test], order[num_test:][:num_train]
    x, y = data.inputs.double(), data.targets.double()
    location, scale = x[train].mean(0), x[train].std(0).clamp_min(1e-12)
    x, y = (x - location) / scale, (y - y[train].mean()) / y[train].std()
    return Data(*(part.float() for part in (x[train], y[train], x[test], y[test])))


def starting_model(data: Data) -> ExactRBF:
    """Where training starts from: lengthscales √d, a noise of a tenth.

    Args:
        data: Training points.
    """
    model = ExactRBF(data.x, data.y).to(data.x)
    model.covar_module.base_kernel.lengthscale = data.x.shape[-1] ** 0.5
    model.covar_module.outputscale = 1.0
    model.likelihood.noise = 0.1
    return model.train()
