"""Peak memory of the lower bound of a linear model of many features, and of its gradient."""

from __future__ import annotations

import gc
import sys

import torch

from benchmarks.speed.resident_memory import bytes_printed_by, highest_resident, start_of_peak
from gpclml.errors import UnknownNameError
from gpclml.kernels import RandomFourierFeatures
from gpclml.linalg.gaussians import DiagonalFamily, FullFamily, GaussianFamily, LowRankFamily
from gpclml.mlls import LinearEvidenceLowerBound
from gpclml.models import BayesianLinearModel

__all__ = ["FAMILIES", "bound_memory"]

FAMILIES: dict[str, GaussianFamily] = {
    "diagonal": DiagonalFamily(), "rank-1": LowRankFamily(1), "rank-10": LowRankFamily(10),
    "full": FullFamily(),
}  # fmt: skip


def bound_memory(
    family: str, num_features: int, num_data: int, dtype: torch.dtype, gradient: bool
) -> int:
    """Highest memory in use by the bound less that before it, in bytes, in a process of its own.

    Random Fourier features of inputs with two columns. Features, (n, R), are made within.

    Args:
        family: A name in :data:`FAMILIES`.
        num_features: R.
        num_data: n.
        dtype: ``torch.float32`` or ``torch.float64``.
        gradient: Whether the gradient in all hyperparameters is taken too.

    Raises:
        UnknownNameError: No such family.
        subprocess.CalledProcessError: The process fails.
    """
    if family not in FAMILIES:
        raise UnknownNameError("family", family, FAMILIES)
    kind = str(dtype).removeprefix("torch.")
    arguments = (family, str(num_features), str(num_data), kind, str(int(gradient)))
    return bytes_printed_by(__name__, *arguments)


def _peak(family: str, num_features: int, num_data: int, dtype: torch.dtype, grad: bool) -> int:
    _bound(family, 50, 20, dtype, grad)  # loads what libraries load at their first use
    gc.collect()
    before = start_of_peak()
    _bound(family, num_features, num_data, dtype, grad)
    return highest_resident() - before


def _bound(family: str, num_features: int, num_data: int, dtype: torch.dtype, grad: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 2, generator=generator, dtype=dtype)
    features = RandomFourierFeatures(2, num_features, seed=0)
    model = BayesianLinearModel(x, x[:, 0].sin(), features, noise=0.1)
    mll = LinearEvidenceLowerBound(model.likelihood, model, FAMILIES[family])
    with torch.set_grad_enabled(grad):
        value = mll(model(x), model.train_targets)
        if grad:
            value.backward()


if __name__ == "__main__":
    name, R, n, kind, with_gradient = sys.argv[1:]
    print(_peak(name, int(R), int(n), getattr(torch, kind), bool(int(with_gradient))))
