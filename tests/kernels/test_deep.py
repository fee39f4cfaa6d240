"""Kernels and means on the features of networks."""

import copy

import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, RBFKernelGrad, ScaleKernel

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.kernels import CosineSimilarityKernel, DeepKernel, NetworkMean, SkipFeatures
from gpclml.kernels.networks import MLP, reset_network

NO_BATCH = torch.Size()


def points(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def deep(d=3, q=2, residual=True, base=RBFKernel, batch_shape=NO_BATCH, **options):
    network = MLP([d, 8, q], activation=torch.nn.Tanh, dtype=torch.float64, **options)
    columns = d + q if residual else q
    kernel = DeepKernel(network, base(ard_num_dims=columns, batch_shape=batch_shape), residual)
    kernel.base_kernel.lengthscale = torch.linspace(0.5, 1.5, columns)
    return kernel.double()


def test_residual_kernel_of_a_zero_network_is_the_ard_kernel():
    x, x2 = points(20, 3), points(7, 3, seed=1)
    kernel = deep(output_scale=0.0)
    ard = RBFKernel(ard_num_dims=3).double()
    ard.lengthscale = kernel.base_kernel.lengthscale[:, :3].detach()
    for arguments in [(x,), (x, x2)]:
        value, expected = kernel(*arguments).to_dense(), ard(*arguments).to_dense()
        torch.testing.assert_close(value, expected, rtol=1e-14, atol=1e-15)
    assert (deep()(x).to_dense() <= ard(x).to_dense() + 1e-12).all()  # it only loses correlation


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("base", [RBFKernel, MaternKernel])
def test_value_and_gradient_are_those_of_the_base_kernel_on_the_features(residual, base):
    x, x2 = points(9, 3), points(5, 3, seed=1)
    kernel = ScaleKernel(deep(residual=residual, base=base)).double()
    network, inner = kernel.base_kernel.feature_extractor, kernel.base_kernel.base_kernel

    def explicit(x1, x2):
        z1, z2 = network(x1), network(x2)
        if residual:
            z1, z2 = torch.cat([x1, z1], -1), torch.cat([x2, z2], -1)
        scaled = (z1.unsqueeze(1) - z2.unsqueeze(0)) / inner.lengthscale.unsqueeze(0)
        square = scaled.square().sum(-1)
        if base is RBFKernel:
            return kernel.outputscale * torch.exp(-square / 2)
        r = (5 * square).sqrt()
        return kernel.outputscale * (1 + r + r.square() / 3) * torch.exp(-r)

    x.requires_grad_()
    weights = points(9, 5, seed=2)
    value, reference = kernel(x, x2).to_dense(), explicit(x, x2)
    torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-13)
    inputs = [x, *kernel.parameters()]
    gradient = torch.autograd.grad((value * weights).sum(), inputs)
    expected = torch.autograd.grad((reference * weights).sum(), inputs)
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)


def test_a_network_near_zero_learns_but_one_at_zero_does_not():
    x, weights = points(12, 3), points(12, 12, seed=1)
    for scale, alive in [(1e-3, True), (0.0, False)]:
        kernel = deep(output_scale=scale)
        (kernel(x).to_dense() * weights).sum().backward()
        last = kernel.feature_extractor[-1].weight.grad.abs().max()
        assert (last > 1e-5) == alive
        assert alive or last < 1e-12


@pytest.mark.parametrize("batch_shape", [NO_BATCH, torch.Size([4])])
def test_batch_is_the_stack_of_singles(batch_shape):
    x, x2 = points(4, 6, 3), points(4, 5, 3, seed=1)
    kernel = ScaleKernel(deep(batch_shape=batch_shape), batch_shape=batch_shape).double()
    lengthscale = points(*kernel.base_kernel.base_kernel.lengthscale.shape).exp()
    kernel.base_kernel.base_kernel.lengthscale = lengthscale
    assert kernel.batch_shape == batch_shape
    full = kernel(x, x2).to_dense()
    diagonal = kernel(x, diag=True)
    for i in range(4):
        single = copy.deepcopy(kernel)[i] if batch_shape else kernel
        torch.testing.assert_close(full[i], single(x[i], x2[i]).to_dense())
        torch.testing.assert_close(diagonal[i], single(x[i], diag=True))
        torch.testing.assert_close(full[i], kernel(x, x2)[i].to_dense())
        torch.testing.assert_close(diagonal[i], single(x[i]).to_dense().diagonal())
    pairs = kernel(x[:, :5], x2, diag=True)
    torch.testing.assert_close(pairs, full[:, :5].diagonal(dim1=-2, dim2=-1))


def test_columns_of_the_inputs_and_of_the_base_kernel_and_several_outputs():
    x, network = points(6, 5), MLP([2, 4, 1], dtype=torch.float64)
    deep = DeepKernel(network, RBFKernel(), active_dims=(1, 3)).double()
    reference = DeepKernel(network, deep.base_kernel)(x[:, [1, 3]]).to_dense()
    scaled = ScaleKernel(deep).double()
    torch.testing.assert_close(deep(x).to_dense(), reference)
    torch.testing.assert_close(scaled(x).to_dense(), scaled.outputscale * reference)
    features = DeepKernel(network, RBFKernel(active_dims=(2,))).double()
    x = x[:, :2]
    torch.testing.assert_close(features(x).to_dense(), RBFKernel().double()(network(x)).to_dense())
    tasks = DeepKernel(network, MultitaskKernel(RBFKernel(), num_tasks=2)).double()
    assert tasks.num_outputs_per_input(x, x) == 2
    assert tasks(x).shape == tasks(x).to_dense().shape == (12, 12)


def test_float32_agrees_with_float64():
    x = points(10, 3)
    x[:, 1] = 7.0  # a constant column, and equal rows
    x[1] = x[0]
    kernel = deep()
    double = kernel(x).to_dense()
    single = copy.deepcopy(kernel).float()(x.float()).to_dense()
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)


def test_the_mean_is_the_network():
    network = MLP([3, 5, 1], dtype=torch.float64)
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    mean = NetworkMean(network)(x)
    assert torch.equal(mean, network(x)[..., 0])
    mean.sum().backward()
    assert network[0].weight.grad.abs().max() > 0
    assert NetworkMean(MLP([1, 1]))(torch.randn(5)).shape == (5,)


class Infinite(torch.nn.Module):
    def forward(self, x):
        return torch.stack([x[..., 0], 0 * x[..., 0] + torch.inf], -1)


X = points(6, 3)
FLAT = DeepKernel(torch.nn.Flatten(0), RBFKernel())
NOT_FINITE = r"6 non-finite of 12 .*\(6, 2\), dtype torch.float64"
BAD = [
    (lambda: deep().forward(X, X, last_dim_is_batch=True), UnsupportedError, "last_dim"),
    (lambda: DeepKernel(MLP([3, 3]), RBFKernelGrad()), UnsupportedError, "RBFKernelGrad"),
    (lambda: DeepKernel(Infinite(), RBFKernel())(X).to_dense(), NonFiniteError, NOT_FINITE),
    (lambda: FLAT(X).to_dense(), ShapeError, "network output"),
    (lambda: NetworkMean(MLP([3, 2]).double())(X), ShapeError, "network output"),
    (lambda: NetworkMean(torch.nn.Flatten(0))(X), ShapeError, "network output"),
    (lambda: NetworkMean(MLP([2, 1]).double())(X), ShapeError, "x: got torch.float64 of shape"),
    (lambda: SkipFeatures([3]), ArgumentError, "sizes"),
    (lambda: SkipFeatures([3, 2], start=0.0), ArgumentError, "start"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_features_are_the_linear_map_beside_the_network():
    features = SkipFeatures([3, 5, 2]).double()
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    with torch.no_grad():
        features.log_scale.copy_(torch.tensor([0.0, 1.0, -1.0]))
        features.mixing.copy_(torch.arange(9.0).reshape(3, 3))
    matrix = torch.diag(features.log_scale.exp()) + features.mixing
    output = features(x)
    torch.testing.assert_close(output[:, :3], x @ matrix)
    torch.testing.assert_close(output[:, 3:], features.network(x))
    torch.testing.assert_close(features(x.expand(2, 4, 3)), output.expand(2, 4, 5))


def test_it_starts_small_and_is_reset_to_its_start():
    features = SkipFeatures([3, 5, 2], start=1e-3)
    x = torch.ones(1, 3)
    assert 0 < features(x).abs().max() < 2e-3
    start = features(x).detach().clone()
    with torch.no_grad():
        for parameter in features.parameters():
            parameter.add_(1.0)
    features.reset_parameters()
    assert torch.equal(features(x), start)
    reset_network(features, torch.Generator().manual_seed(5))
    assert torch.equal(features(x)[:, :3], start[:, :3])
    assert not torch.equal(features(x)[:, 3:], start[:, 3:])


def test_the_cosine_of_two_points():
    kernel, x, z = CosineSimilarityKernel(), points(2, 4, 3), points(2, 5, 3, seed=1)
    expected = torch.nn.functional.cosine_similarity(x.unsqueeze(-2), z.unsqueeze(-3), dim=-1)
    torch.testing.assert_close(kernel(x, z).to_dense(), expected)
    torch.testing.assert_close(kernel(x, diag=True), torch.ones(2, 4, dtype=torch.float64))
    torch.testing.assert_close(kernel(7 * x).to_dense(), kernel(x).to_dense())
    assert torch.autograd.gradcheck(lambda x: kernel(x).to_dense(), (x[0].requires_grad_(),))
    z[0, 0] = 0.0  # unrelated to all
    assert torch.equal(kernel(z).to_dense()[0, 0], torch.zeros(5, dtype=torch.float64))
