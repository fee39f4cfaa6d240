"""The deep kernel of the authors' code for Figure 9(a) of Lotfi et al. (2022), on GPyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, ZeroMean
from gpytorch.models import ExactGP
from gpytorch.utils.grid import ScaleToBounds
from gpytorch.utils.interpolation import Interpolation
from torch import Tensor

from benchmarks.data import load, split
from benchmarks.tables.scores import normal, score

_STEPS, _LR, _SHARE = 100, 0.01, 0.9


class InterpolatedRBFKernel(RBFKernel):
    """An ARD RBF kernel interpolated from a grid of ``size`` points a side on [-1, 1]^d.

    It is GPyTorch's ``GridInterpolationKernel(RBFKernel(...))``, with lengthscales in the order of
    the columns. Each entry is a product over columns, as weights of the interpolation and an RBF
    kernel both are: a covariance of 100 points takes milliseconds in place of seconds.
    """

    def __init__(self, num_dims: int, size: int) -> None:
        super().__init__(ard_num_dims=num_dims)
        # A spacing beyond either end, which cubic interpolation needs.
        spacing = 2.0 / (size - 2)
        self.register_buffer("grid", torch.linspace(-1.0 - spacing, 1.0 + spacing, size))

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """See the class."""
        grid, result = cast(Tensor, self.grid), x1.new_ones(1)
        for d, scale in enumerate(self.lengthscale.squeeze(-2)):
            apart = (grid.unsqueeze(-1) - grid) / scale
            weights = [self._weights(x[:, d]) for x in (x1, x2)]
            result = result * (weights[0] @ (-0.5 * apart.square()).exp() @ weights[1].mT)
        return result.diagonal(dim1=-1, dim2=-2) if diag else result

    def _weights(self, x: Tensor) -> Tensor:
        """Of the values at the grid's points in those at points, ``(n, size)``."""
        grid = cast(Tensor, self.grid)
        indices, values = Interpolation().interpolate([grid], x.unsqueeze(-1))
        return x.new_zeros(len(x), len(grid)).scatter_add(-1, indices, values)


class _DeepKernelGP(ExactGP):
    """A network [d, 50, 2] below an interpolated RBF kernel (KISS-GP)."""

    def __init__(self, x: Tensor, y: Tensor, *, mean: bool) -> None:
        super().__init__(x, y, GaussianLikelihood())
        self.mean_module = ConstantMean() if mean else ZeroMean()
        self.covar_module = ScaleKernel(InterpolatedRBFKernel(2, 100))
        self.network = torch.nn.Sequential(
            torch.nn.Linear(x.shape[-1], 50), torch.nn.ReLU(), torch.nn.Linear(50, 2)
        )
        self.bounds = ScaleToBounds(-1.0, 1.0)

    def forward(self, x: Tensor) -> MultivariateNormal:
        # In train mode the bounds are those of the points at hand.
        features = self.bounds(self.network(x))
        return MultivariateNormal(self.mean_module(features), self.covar_module(features))


def run_published(cell: Mapping[str, Any]) -> dict[str, float]:
    """Trains and tests the model of the authors' code under the LML or its CLML.

    It departs from the paper's text: the network is [d, 50, 2], the kernel interpolated, numbers
    are float32, and all trials have the same n rows. Under the CLML there is no mean, and features
    are scaled to the bounds of the m points for one of its two densities and to those of all n for
    the other, so that their difference is no conditional density.

    Args:
        cell: ``dataset``; ``n``, number of training rows; ``seed`` of the start; ``objective``,
            ``"lml"`` or ``"clml"`` (m = .9 n, a fresh order at each step).

    Returns:
        ``rmse`` and ``nll`` on a tenth of all rows, in units of the other rows' targets.
    """
    data, rows = load(cell["dataset"]), split(load(cell["dataset"]).num_data, 0)
    x, y = data.inputs.float(), data.targets.float()
    known = [values[rows.train] for values in (x, y)]
    x, y = ((v - k.mean(0)) / k.std(0).clamp_min(1e-9) for v, k in zip((x, y), known, strict=True))
    train = rows.train[: cell["n"]]
    train_x, train_y = x[train], y[train]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell["seed"])
        model = _DeepKernelGP(train_x, train_y, mean=cell["objective"] == "lml")
    generator = torch.Generator().manual_seed(cell["seed"])
    optimizer = torch.optim.Adam(model.parameters(), lr=_LR)

    def density(chosen: Tensor) -> Tensor:
        return model.likelihood(model.forward(train_x[chosen])).log_prob(train_y[chosen])

    model.train()
    for _ in range(_STEPS):
        order = torch.randperm(cell["n"], generator=generator)
        value = density(order)
        if cell["objective"] == "clml":
            value = value - density(order[: round(_SHARE * cell["n"])])
        optimizer.zero_grad()
        (-value / cell["n"]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        predicted = model.likelihood(model(x[rows.test]))
        mean, variance = predicted.mean.numpy(), predicted.variance.numpy()
    scores = score(normal(mean, variance**0.5), y[rows.test].numpy(), 1.0)
    return {"rmse": scores["rmse"], "nll": scores["nll"]}
