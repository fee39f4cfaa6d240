"""Kernels in closed form are those of GPyTorch: values, gradients, other points, both types."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from gpytorch.kernels import (
    ConstantKernel,
    IndexKernel,
    LinearKernel,
    MaternKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from kernel_cases import KERNELS, NUM_TASKS

from gpclml.errors import ArgumentError
from gpclml.gram import Gram, Reason, closed_form, matrix_node, precomputed, transform_of
from gpclml.kernels import MLP, DeepKernel

NO_BATCH = torch.Size()
UNKNOWN = (
    "subclass", "piecewise_polynomial", "fourier", "features", "features_and_rbf",
    "joint_spectral_mixture", "joint_mixture_in_sum", "deep_joint_mixture",
    "sum_of_tasks",  # which GPyTorch factors, with jitter
)  # fmt: skip
WITHOUT_BATCH = ("cosine_similarity", "cosine_similarity_and_rbf", "deep_cosine_similarity")
D = 3


def network(inputs=D):
    return MLP([inputs, 4, 2], torch.nn.Tanh)


def shared():
    kernel = RBFKernel()
    return kernel + ScaleKernel(kernel)


# Beside those of every kind and structure.
MORE = {
    "two_kernels_of_features": lambda d, **b: DeepKernel(
        network(),
        RBFKernel(ard_num_dims=3, active_dims=(0, 1, 2))
        + ScaleKernel(RQKernel(ard_num_dims=2, active_dims=(3, 4)))
        + RBFKernel(active_dims=(4,)) * LinearKernel(ard_num_dims=1, active_dims=(1,)),
    ),
    "deep_of_columns": lambda d, **b: DeepKernel(
        network(2), RBFKernel(ard_num_dims=2), False, active_dims=(2, 0)
    ),
    "deep_in_deep": lambda d, **b: DeepKernel(network(), DeepKernel(network(5), MaternKernel(1.5))),
    "one_kernel_twice": lambda d, **b: shared(),
    "linear_power": lambda d, **b: PolynomialKernel(power=1, **b),
    "one_column_mixture": lambda d, **b: SpectralMixtureKernel(2, active_dims=(1,), **b),
    "columns_in_another_order": lambda d, **b: RBFKernel(ard_num_dims=2, active_dims=(2, 0), **b),
}
NAMES = [name for name in (*KERNELS, *MORE) if name not in UNKNOWN]


def kernel_named(name, batch=NO_BATCH):
    """In float64, with other hyperparameters than those it starts with."""
    torch.manual_seed(0)
    options = {"batch_shape": batch} if batch else {}
    return randomized((KERNELS | MORE)[name](D, **options))


def points(*batch: int, n: int = 7, seed: int = 0, tasks: bool = False) -> torch.Tensor:
    """Of three columns, and one of task indices, in float64."""
    generator = torch.Generator().manual_seed(seed + n)
    x = torch.rand(*batch, n, D, generator=generator, dtype=torch.float64)
    indices = torch.arange(n, dtype=torch.float64) % NUM_TASKS
    return torch.cat([x, indices.expand(*batch, n).unsqueeze(-1)], -1) if tasks else x


def randomized(module, seed: int = 0):
    """The module in float64 with other parameters than those it starts with."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    for parameter in module.parameters():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += 0.5 * draw
    return module


def gram_of(kernel) -> Gram:
    gram = closed_form(kernel, select=True)
    assert isinstance(gram, Gram)
    return gram


def gradients(value, wanted, *, diagonal=True):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(value.shape, generator=generator, dtype=value.dtype)
    if not diagonal:
        weights.diagonal(dim1=-2, dim2=-1).zero_()
    return torch.autograd.grad((value * weights).sum(), wanted, allow_unused=True)


def assert_gradients_close(got, expected):
    for gradient, other in zip(got, expected, strict=True):
        if other is None:
            assert gradient is None or not gradient.any()
            continue
        scale = max(1e-4, float(other.abs().max()))
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-8 * scale)


def expected_matrix(kernel, x, other=None):
    """GPyTorch's. Distances of equal points are a rounding of zero where it takes gradients."""
    with gpytorch.settings.lazily_evaluate_kernels(False):
        with torch.no_grad():
            exact = kernel(x, other).to_dense()
        return exact, kernel(x, other).to_dense()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("batch", [(), (3, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_matrices_and_gradients_are_gpytorchs(name, batch):
    """Batches of points meet batches of hyperparameters."""
    several = batch and name not in WITHOUT_BATCH
    kernel = kernel_named(name, torch.Size([2]) if several else NO_BATCH)
    gram = gram_of(kernel)
    tasks = name.endswith("of_tasks")
    for wants_points in (False, not tasks):
        x = points(*batch, tasks=tasks).requires_grad_(wants_points)
        value = matrix_node(gram(x), x.dtype)
        exact, differentiable = expected_matrix(kernel, x)
        torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)
        wanted = [*kernel.parameters(), *([x] if wants_points else [])]
        # A distance of zero is 1e-15 to GPyTorch, and a Matern-1/2 kernel has a kink there.
        has_kink = any(getattr(module, "nu", None) == 0.5 for module in kernel.modules())
        if has_kink and wants_points:
            continue
        assert_gradients_close(
            gradients(value, wanted, diagonal=not has_kink),
            gradients(differentiable, wanted, diagonal=not has_kink),
        )


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("of_tasks")])
def test_other_points_in_the_columns(name):
    kernel = kernel_named(name)
    gram = gram_of(kernel)
    x, other = points().requires_grad_(), points(n=4, seed=5).requires_grad_()
    value = precomputed(gram(x, other))
    exact, differentiable = expected_matrix(kernel, x, other)
    torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)
    wanted = [*kernel.parameters(), x, other]
    assert_gradients_close(gradients(value, wanted), gradients(differentiable, wanted))


@pytest.mark.parametrize("task", [-1.0, 3.0])
def test_tasks_that_the_kernel_has_not(task):
    x = points(tasks=True)
    x[:, D] = task
    with pytest.raises(ArgumentError, match=r"task indices.*from 0 to 2"):
        gram_of(kernel_named("rbf_of_tasks"))(x)


@pytest.mark.parametrize(
    "name", ["rbf_ard", "matern12", "rq_ard", "polynomial", "rbf_times_periodic", "periodic"]
)
@pytest.mark.parametrize("columns", [slice(0, 3), slice(0, 1)])
def test_many_points_are_computed_some_rows_at_a_time(name, columns):
    """What a row of few points is, it is among many; so are gradients."""
    gram, (few, many) = gram_of(kernel_named(name)), (points(n=300), points(n=300))
    if "ard" in name or "times" in name:
        columns = slice(0, 3)
    few, many = few[:5, columns].requires_grad_(), many[:, columns].requires_grad_()
    block, whole = precomputed(gram(few, many.detach())), precomputed(gram(many))
    torch.testing.assert_close(block, whole[:5], rtol=1e-12, atol=1e-12)
    # With a weight of these rows alone, of the symmetric matrix, each pair counts once.
    weights = torch.randn(5, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    symmetric = torch.zeros(300, 300, dtype=torch.float64)
    symmetric[:5] = weights
    value = (matrix_node(gram(many), torch.float64) * symmetric).sum()
    left, right = many[:5], many
    expected = (precomputed(gram(left, right)) * weights).sum()
    ours, theirs = torch.autograd.grad(value, many), torch.autograd.grad(expected, many)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["rbf_ard", "matern52", "rq", "linear_and_rbf"])
@pytest.mark.parametrize("n", [40, 600])
def test_single_precision(name, n):
    """Few points are computed in double precision, many with distances in double precision."""
    kernel = kernel_named(name).float().double()  # numbers that both types have
    x = points(n=n).float()
    double = matrix_node(gram_of(kernel)(x.double()), torch.float64)
    weights = torch.rand(n, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad((double * weights).sum(), list(kernel.parameters()))
    single = matrix_node(gram_of(kernel.float())(x), torch.float32)
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=2e-6)
    gradients = torch.autograd.grad((single * weights.float()).sum(), list(kernel.parameters()))
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        scale = float(other.abs().max())
        torch.testing.assert_close(gradient.double(), other, rtol=1e-4, atol=1e-4 * scale)


def test_rows_of_a_kernel_on_features_are_those_of_its_matrix():
    gram, x = gram_of(kernel_named("deep")), points()
    inner, features = gram.on_features(x)
    assert not inner.has_features
    rows = torch.cat([inner(features[i : i + 1], features).value for i in range(7)])
    torch.testing.assert_close(rows, gram(x).value)


def test_a_rank_is_known_where_it_is_finite():
    ranks = {"linear": 3, "polynomial": float("inf"), "linear_and_rbf": float("inf")}
    assert {name: gram_of(kernel_named(name)).rank(3) for name in ranks} == ranks
    assert gram_of(ConstantKernel()).rank(3) == 1
    assert gram_of(kernel_named("rbf_of_tasks")).rank(4) == float("inf")


# Variances of differences of near values are squared distances in the metric times these, one for
# each function of distance.
METRICS = {
    "rbf_twice_scaled": 1.0, "matern32_ard": 3.0, "matern52_ard": 5 / 3, "rq_ard": 1.0,
    "cosine": math.pi**2, "spectral_mixture": 4 * math.pi**2, "one_column_mixture": 4 * math.pi**2,
    "linear_and_rbf": 1.0, "periodic_ard": 1.0, "rbf_times_periodic": 1.0, "linear": 1.0,
    "constant_and_matern": 3.0, "constant_times_rq": 1.0, "cosine_similarity_and_rbf": 1.0,
    "deep_residual": 1.0, "deep_in_sum": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", METRICS)
@torch.no_grad()
def test_near_points_are_as_far_in_the_metric_as_their_values_differ(name):
    gram, x = gram_of(kernel_named(name)), points()
    near = x + 1e-4 * points(seed=1)
    K = gram(torch.cat([x, near])).value
    variances = K.diagonal()[:7] + K.diagonal()[7:] - 2 * K[:7, 7:].diagonal()
    squares = (gram.metric(x) - gram.metric(near)).square().sum(-1)
    torch.testing.assert_close(variances, METRICS[name] * squares, rtol=5e-3, atol=0.0)


def test_tasks_are_as_far_in_the_metric_as_their_values_differ():
    kernel = IndexKernel(NUM_TASKS, rank=2).double()
    x = torch.arange(3.0, dtype=torch.float64).unsqueeze(-1)
    K, rows = gram_of(kernel)(x).value, gram_of(kernel).metric(x)
    variances = K.diagonal().unsqueeze(-1) + K.diagonal() - 2 * K
    torch.testing.assert_close(torch.cdist(rows, rows).square(), variances)


@pytest.mark.parametrize("make", [RBFKernel, RQKernel, lambda: MaternKernel(0.5)])
def test_gradients_by_finite_differences_where_points_are_equal(make):
    gram, x = gram_of(randomized(ScaleKernel(make()))), points()
    x[5] = x[2]
    other = points(n=3, seed=2)
    assert torch.autograd.gradcheck(
        lambda other: precomputed(gram(x, other)), other.requires_grad_()
    )


class OwnForward(RBFKernel):
    def forward(self, x1, x2, **options):
        return 2.0 * super().forward(x1, x2, **options)


def hooked():
    kernel = RBFKernel()
    kernel.register_forward_hook(lambda module, args, output: output)
    return kernel


def replaced():
    kernel = RBFKernel()
    kernel.forward = lambda x1, x2, **options: x1 @ x2.mT
    return kernel


def patched():
    kernel = RBFKernel()
    softplus = torch.nn.Softplus()
    torch.nn.utils.parametrize.register_parametrization(kernel, "raw_lengthscale", softplus)
    return kernel


SUBCLASS = "OwnForward is a subclass of RBFKernel"
EXCHANGED = "RBFKernel has hooks, or a forward that was exchanged"


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (OwnForward(), SUBCLASS),
        (ScaleKernel(OwnForward()), SUBCLASS),
        (RBFKernel() + OwnForward(), SUBCLASS),
        (RBFKernel() * OwnForward(), SUBCLASS),
        (DeepKernel(network(), OwnForward()), SUBCLASS),
        (hooked(), EXCHANGED),
        (replaced(), EXCHANGED),
        (ScaleKernel(replaced()), EXCHANGED),
        (gpytorch.kernels.PiecewisePolynomialKernel(), "PiecewisePolynomialKernel is not known"),
        (type("Own", (DeepKernel,), {})(network(), RBFKernel()), "Own is a subclass of DeepKernel"),
        (patched(), ""),
    ],
)
def test_other_kernels_are_left_to_gpytorch_with_a_reason(kernel, words):
    reason = closed_form(kernel)
    assert isinstance(reason, Reason)
    assert str(reason).startswith(words)


def test_columns_are_selected_where_it_is_asked_for():
    kernel = LinearKernel(active_dims=(0, 2))
    called, forward = closed_form(kernel, select=True), closed_form(kernel)
    assert isinstance(called, Gram)
    assert isinstance(forward, Gram)
    assert called.rank(7) == 2
    assert forward.rank(7) == 7


@pytest.mark.parametrize(
    "constraint",
    [
        None,
        Positive(),
        GreaterThan(0.3),
        GreaterThan(0.3, transform=None),
        Positive(transform=None),
    ],
)
def test_transforms_are_those_of_constraints(constraint):
    transform, raw = transform_of(constraint), torch.linspace(-3.0, 30.0, 7).double()
    value = raw if constraint is None else constraint.transform(raw)
    torch.testing.assert_close(transform.value(raw), value)
    torch.testing.assert_close(transform.inverse(value), raw)
    x = raw.clone().requires_grad_()
    (slope,) = torch.autograd.grad(transform.value(x).sum(), x)
    torch.testing.assert_close(transform.slope(raw) * torch.ones_like(raw), slope)


@pytest.mark.parametrize(
    "constraint",
    [
        Interval(0.1, 3.0), LessThan(3.0), GreaterThan(torch.tensor([0.1, 0.2])),
        Positive(torch.nn.Softplus(beta=3.0)), Positive(torch.exp, torch.log),
    ],
)  # fmt: skip
def test_other_constraints_are_left_to_gpytorch(constraint):
    assert transform_of(constraint) is None
