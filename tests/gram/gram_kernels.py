"""Kernels of every kind that is known in closed form."""

from __future__ import annotations

import copy
import itertools

import torch
from gpytorch.kernels import (
    ConstantKernel,
    CosineKernel,
    IndexKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

from gpclml.kernels import MLP, CosineSimilarityKernel, DeepKernel

TWO = torch.Size([2])
NO_BATCH = torch.Size()

STATIONARY = {
    "rbf": RBFKernel,
    "matern-1/2": lambda **options: MaternKernel(0.5, **options),
    "matern-3/2": lambda **options: MaternKernel(1.5, **options),
    "matern-5/2": lambda **options: MaternKernel(2.5, **options),
    "rq": RQKernel,
    "periodic": PeriodicKernel,
}
OPTIONS = {
    "": {},
    "ard": {"ard_num_dims": 3},
    "columns": {"active_dims": (2, 0)},
    "batch": {"ard_num_dims": 2, "active_dims": (2, 0), "batch_shape": TWO},
}


def network(inputs: int = 3) -> MLP:
    return MLP([inputs, 4, 2], torch.nn.Tanh)


def kernels():
    """Isotropic and not, of some columns, batched, summed, multiplied; on three columns."""
    for (name, make), (kind, options) in itertools.product(STATIONARY.items(), OPTIONS.items()):
        batch = options.get("batch_shape", NO_BATCH)
        yield f"scaled {name} {kind}".strip(), ScaleKernel(make(**options), batch_shape=batch)
    for name, make in STATIONARY.items():
        yield name, make()
    for (a, first), (b, second) in itertools.pairwise(STATIONARY.items()):
        yield f"{a}+{b}", ScaleKernel(first(ard_num_dims=3)) + second(active_dims=(1,))
        yield f"{a}*{b}", ScaleKernel(ScaleKernel(first(active_dims=(0,))) * second())
    yield "cosine", ScaleKernel(CosineKernel())
    yield "spectral mixture", SpectralMixtureKernel(num_mixtures=3, ard_num_dims=3)
    yield "spectral mixture of a column", SpectralMixtureKernel(num_mixtures=2, active_dims=(1,))
    yield (
        "batched spectral mixture",
        SpectralMixtureKernel(num_mixtures=2, ard_num_dims=3, batch_shape=TWO),
    )
    yield "polynomial", ScaleKernel(PolynomialKernel(power=3))
    yield "polynomial of power one", PolynomialKernel(power=1, batch_shape=TWO)
    yield "cosine similarity", ScaleKernel(CosineSimilarityKernel())
    yield "linear", ScaleKernel(LinearKernel(ard_num_dims=3))
    yield "batched linear", LinearKernel(batch_shape=TWO)
    yield "constant", ConstantKernel(batch_shape=TWO)
    yield "linear+rbf", LinearKernel() + ScaleKernel(RBFKernel(ard_num_dims=3))
    yield "scaled linear*rbf", ScaleKernel(LinearKernel(active_dims=(1,)) * RBFKernel())
    yield "constant+matern", ScaleKernel(ConstantKernel() + MaternKernel(1.5))
    yield "rbf*rq", ScaleKernel(ScaleKernel(RBFKernel(active_dims=(0,))) * RQKernel())
    yield "nested", ScaleKernel(RBFKernel() * (LinearKernel() + ScaleKernel(RQKernel())))
    yield "three", RBFKernel() + RQKernel() + MaternKernel(1.5) * RBFKernel() * LinearKernel()
    yield "deep", ScaleKernel(DeepKernel(network(), RBFKernel(ard_num_dims=5)))
    yield "deep, features alone", DeepKernel(network(), ScaleKernel(MaternKernel(2.5)), False)
    yield (
        "deep, some columns",
        ScaleKernel(DeepKernel(network(2), RBFKernel(ard_num_dims=2), False, active_dims=(2, 0))),
    )
    yield (
        "deep, parts of the features",
        ScaleKernel(
            DeepKernel(
                network(),
                RBFKernel(ard_num_dims=3, active_dims=(0, 1, 2))
                + ScaleKernel(RQKernel(ard_num_dims=2, active_dims=(3, 4)))
                + RBFKernel(active_dims=(4,)) * LinearKernel(ard_num_dims=1, active_dims=(1,)),
            )
        ),
    )
    yield "deep + rbf", RBFKernel() + ScaleKernel(DeepKernel(network(), RBFKernel()))
    yield "deep in deep", DeepKernel(network(), DeepKernel(network(5), MaternKernel(1.5)))
    yield (
        "batched deep",
        ScaleKernel(DeepKernel(network(), RBFKernel(batch_shape=TWO)), batch_shape=TWO),
    )
    yield (
        "batched sum",
        ScaleKernel(
            RBFKernel(batch_shape=TWO) + MaternKernel(2.5, batch_shape=TWO), batch_shape=TWO
        ),
    )
    shared = RBFKernel()
    yield "one kernel twice", shared + ScaleKernel(shared)


def tasks(batch: torch.Size = NO_BATCH) -> ScaleKernel:
    """Hadamard tasks: two columns of inputs, and one of task indices."""
    data = MaternKernel(2.5, active_dims=(0, 1), batch_shape=batch)
    index = IndexKernel(num_tasks=3, rank=2, active_dims=(2,), batch_shape=batch)
    return ScaleKernel(data * index, batch_shape=batch)


KERNELS = dict(kernels())


def kernel_named(name: str):
    """A copy of the kernel in float64, with other hyperparameters than those it starts with."""
    return randomized(copy.deepcopy(KERNELS[name]))


def points(*batch: int, n: int = 7, seed: int = 0) -> torch.Tensor:
    """Of three columns, in float64."""
    generator = torch.Generator().manual_seed(seed + n)
    return torch.rand(*batch, n, 3, generator=generator, dtype=torch.float64)


def randomized(module, seed: int = 0):
    """The module in float64 with other parameters than those it starts with."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    for parameter in module.parameters():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += 0.5 * draw
    return module
