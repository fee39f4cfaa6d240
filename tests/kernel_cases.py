"""Kernels of every kind and structure, by name: functions of the number of columns and a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.kernels import (
    ConstantKernel,
    CosineKernel,
    IndexKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    PolynomialKernel,
    RBFKernel,
    RFFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

from gpclml.kernels import (
    MLP,
    CosineSimilarityKernel,
    DeepKernel,
    FeatureKernel,
    JointSpectralMixtureKernel,
    SkipFeatures,
)

NUM_TASKS = 3


class ShiftedRBF(RBFKernel):
    """A subclass, which is another kernel than its base."""

    def forward(self, x1, x2, diag=False, **params):
        return 0.9 * super().forward(x1, x2, diag=diag, **params) + 0.1


def network(d, outputs=2, scale=1.0):
    return MLP([d, 4, outputs], torch.nn.Tanh, output_scale=scale)


def constrained(d, **b):
    """Each constraint that GPyTorch has."""
    periodic = PeriodicKernel(
        period_length_constraint=Interval(0.1, 8.0), lengthscale_constraint=GreaterThan(0.05), **b
    )
    exponential = Positive(transform=torch.exp, inv_transform=torch.log)
    rational = RQKernel(
        alpha_constraint=Interval(0.05, 50.0), lengthscale_constraint=exponential, **b
    )
    without = ScaleKernel(
        RBFKernel(**b), outputscale_constraint=Interval(0.01, 10.0, transform=None), **b
    )
    return periodic * rational + without


def nested(d, **b):
    first = ScaleKernel(
        RBFKernel(active_dims=(0,), **b) * PeriodicKernel(active_dims=(0,), **b), **b
    )
    second = LinearKernel(active_dims=(1,), **b) + ConstantKernel(active_dims=(1,), **b)
    return first + ScaleKernel(RQKernel(active_dims=(d - 1,), **b) * second, **b)


def additive(d, **b):
    kinds = [RBFKernel, partial(MaternKernel, 1.5), RQKernel, CosineKernel]
    total = None
    for column in range(d):
        kernel = kinds[column % 4](active_dims=(column,), **b)
        term = ScaleKernel(kernel, **b)
        total = term if total is None else total + term
    return total


def scaled(make: Callable[..., Kernel]) -> Callable[..., Kernel]:
    return lambda d, **b: ScaleKernel(make(d, **b), **b)


def hadamard(make: Callable[..., Kernel], rank: int = 1) -> Callable[..., Kernel]:
    """The kernel of all columns but the last, times that of the tasks in the last."""

    def kernel(d, **b):
        points = make(d, active_dims=tuple(range(d)), **b)
        return points * IndexKernel(NUM_TASKS, rank=rank, active_dims=(d,), **b)

    return kernel


def deep(make: Callable[..., Kernel], residual: bool) -> Callable[..., Kernel]:
    def kernel(d, active_dims=None, **b):
        count = len(active_dims) if active_dims else d
        base = make(count + 2 if residual else 2, **b)
        return DeepKernel(network(count), base, residual=residual, active_dims=active_dims)

    return kernel


def rbf(d, **b):
    return RBFKernel(**b)


def rbf_ard(d, **b):
    return RBFKernel(ard_num_dims=d, **b)


def matern(nu, ard=False):
    return lambda d, **b: MaternKernel(nu, ard_num_dims=d if ard else None, **b)


def deep_in_sum(d, **b):
    features = SkipFeatures([d, 4, 2], start=0.5)
    columns = tuple(range(d)), tuple(range(d, 2 * d + 2))
    inner = RBFKernel(ard_num_dims=d, active_dims=columns[0], **b)
    outer = ScaleKernel(RQKernel(active_dims=columns[1], **b), **b)
    return ScaleKernel(DeepKernel(features, inner + outer, residual=True), **b)


KERNELS: dict[str, Callable[..., Kernel]] = {
    "rbf": scaled(rbf),
    "rbf_unscaled": rbf,
    "rbf_ard": scaled(rbf_ard),
    "rbf_twice_scaled": scaled(scaled(rbf_ard)),
    "rbf_columns": scaled(lambda d, **b: RBFKernel(active_dims=(d - 1,), **b)),
    "matern12": scaled(matern(0.5)),
    "matern12_ard": scaled(matern(0.5, True)),
    "matern32": scaled(matern(1.5)),
    "matern32_ard": scaled(matern(1.5, True)),
    "matern52": scaled(matern(2.5)),
    "matern52_ard": scaled(matern(2.5, True)),
    "rq": scaled(lambda d, **b: RQKernel(**b)),
    "rq_ard": scaled(lambda d, **b: RQKernel(ard_num_dims=d, **b)),
    "spectral_mixture": lambda d, **b: SpectralMixtureKernel(3, ard_num_dims=d, **b),
    "joint_spectral_mixture": lambda d, **b: JointSpectralMixtureKernel(3, d),
    "joint_mixture_in_sum": lambda d, **b: JointSpectralMixtureKernel(2, d) + scaled(rbf)(d, **b),
    "linear": scaled(lambda d, **b: LinearKernel(**b)),
    "linear_ard": lambda d, **b: LinearKernel(ard_num_dims=d, **b),
    "polynomial": scaled(lambda d, **b: PolynomialKernel(2, **b)),
    "cubic_and_rbf": lambda d, **b: PolynomialKernel(3, **b) + scaled(rbf)(d, **b),
    "periodic": scaled(lambda d, **b: PeriodicKernel(**b)),
    "periodic_ard": scaled(lambda d, **b: PeriodicKernel(ard_num_dims=d, **b)),
    "cosine": scaled(lambda d, **b: CosineKernel(active_dims=(0,), **b)),
    "cosine_times_rbf": lambda d, **b: CosineKernel(active_dims=(0,), **b) * scaled(rbf)(d, **b),
    "cosine_similarity": scaled(lambda d, **b: CosineSimilarityKernel()),
    "cosine_similarity_and_rbf": lambda d, **b: CosineSimilarityKernel() + scaled(rbf)(d, **b),
    "constant_and_matern": lambda d, **b: ConstantKernel(**b) + scaled(matern(1.5))(d, **b),
    "constant_times_rq": lambda d, **b: ConstantKernel(**b) * RQKernel(**b),
    "linear_and_rbf": lambda d, **b: LinearKernel(ard_num_dims=d, **b) + scaled(rbf_ard)(d, **b),
    "rbf_times_periodic": scaled(lambda d, **b: rbf_ard(d, **b) * PeriodicKernel(**b)),
    "matern_times_matern": lambda d, **b: (
        MaternKernel(0.5, active_dims=(0,), **b)
        * ScaleKernel(MaternKernel(2.5, active_dims=(1,), **b), **b)
    ),
    "nested": nested,
    "additive": additive,
    "constrained": constrained,
    "subclass": scaled(lambda d, **b: ShiftedRBF(ard_num_dims=d, **b)),
    "piecewise_polynomial": scaled(lambda d, **b: PiecewisePolynomialKernel(2, **b)),
    "fourier": scaled(lambda d, **b: RFFKernel(7, num_dims=d, **b)),
    "features": lambda d, **b: FeatureKernel(network(d, 5), torch.ones(5)),
    "features_and_rbf": lambda d, **b: FeatureKernel(network(d, 3)) + scaled(rbf)(d, **b),
    "rbf_of_tasks": hadamard(rbf_ard),
    "deep_of_tasks": hadamard(deep(rbf, False), rank=2),
    "sum_of_tasks": lambda d, **b: (
        hadamard(matern(2.5), 2)(d, **b)
        + ScaleKernel(hadamard(lambda d, **b: LinearKernel(**b))(d, **b), **b)
    ),
    "deep": scaled(deep(rbf_ard, False)),
    "deep_residual": scaled(deep(rbf_ard, True)),
    "deep_rq": scaled(deep(lambda d, **b: RQKernel(**b), False)),
    "deep_mixture": deep(lambda d, **b: SpectralMixtureKernel(2, ard_num_dims=d, **b), False),
    "deep_joint_mixture": deep(lambda d, **b: JointSpectralMixtureKernel(2, d), True),
    "deep_cosine_similarity": scaled(deep(lambda d, **b: CosineSimilarityKernel(), False)),
    "deep_polynomial": deep(lambda d, **b: PolynomialKernel(2, **b), True),
    "deep_linear": deep(lambda d, **b: LinearKernel(ard_num_dims=d, **b), False),
    "deep_and_rbf": lambda d, **b: (
        scaled(rbf_ard)(d, **b) + ScaleKernel(deep(matern(1.5), False)(d, **b), **b)
    ),
    "deep_in_sum": deep_in_sum,
}
