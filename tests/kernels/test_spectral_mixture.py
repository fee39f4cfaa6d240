"""Spectral mixture kernels: the joint one, and starts from the data."""

import math

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel, SpectralMixtureKernel

from gpclml.errors import ArgumentError, ShapeError, UnknownNameError, UnsupportedError
from gpclml.kernels import JointSpectralMixtureKernel, initialize_spectral_mixture


def mixture(d=1, batch_shape=(), num_mixtures=50):
    shape = torch.Size(batch_shape)
    return SpectralMixtureKernel(num_mixtures, ard_num_dims=d, batch_shape=shape).double()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("spacing", ["smallest", "grid"])
def test_ranges_on_an_even_grid(spacing):
    x = torch.linspace(0, 10, 101, dtype=torch.float64)
    y = torch.sin(x)
    kernel = initialize_spectral_mixture(mixture(num_mixtures=2000), x, y, generator(), spacing)
    means = kernel.mixture_means.detach()
    assert means.max() <= 5.0 + 1e-9  # Nyquist: half of one over 0.1
    assert means.max() > 4.5
    assert means.min() > 0
    scales = kernel.mixture_scales.detach()
    assert scales.max() <= 1.0 + 1e-9
    assert (1 / scales).median().item() == pytest.approx(6.745, rel=0.1)  # median of |N(0, 10²)|
    assert kernel.mixture_weights.sum().item() == pytest.approx(y.std().item(), rel=1e-6)


def test_generator_decides_and_the_global_rng_is_untouched():
    x = torch.rand(20, 2, dtype=torch.float64)
    y = x.sum(-1)
    before = torch.get_rng_state()
    first, same, other = (
        initialize_spectral_mixture(mixture(2), x, y, generator(s)).mixture_means for s in (1, 1, 2)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("spacing", ["smallest", "grid"])
def test_constant_columns_duplicate_rows_and_missing_targets(spacing):
    x = torch.rand(30, 3, dtype=torch.float64)
    x[:, 1] = 0.1 + 0.2
    x[::2, 1] = 0.3  # equal up to rounding
    x[5:10] = x[0]
    y = x[:, 0].clone()
    y[3] = torch.nan
    kernel = initialize_spectral_mixture(mixture(3), x, y, generator(), spacing)
    for parameter in kernel.parameters():
        assert parameter.isfinite().all()
    assert kernel.mixture_means[..., 1].max() <= 0.5
    observed = y[~y.isnan()]
    assert kernel.mixture_weights.sum().item() == pytest.approx(observed.std().item(), rel=1e-6)
    covariance = kernel(x).to_dense()
    assert covariance.isfinite().all()
    assert torch.linalg.eigvalsh(covariance).min() > -1e-8


@pytest.mark.parametrize("x", [torch.zeros(1, 1), torch.zeros(5, 1), torch.full((4, 1), torch.pi)])
def test_a_single_or_constant_input(x):
    kernel = mixture().float()
    initialize_spectral_mixture(kernel, x, torch.zeros(len(x)))
    assert all(parameter.isfinite().all() for parameter in kernel.parameters())


@pytest.mark.parametrize("batch_shape", [(), (3, 2), (2,)])
def test_batches(batch_shape):
    x = torch.rand(3, 2, 10, 2, dtype=torch.float64)
    y = torch.randn(3, 2, 10, dtype=torch.float64)
    kernel = mixture(2, batch_shape, num_mixtures=4)
    initialize_spectral_mixture(kernel, x, y, generator())
    assert kernel(x).to_dense().isfinite().all()
    spread = y.std(-1) if batch_shape == (3, 2) else y.std(-1).mean().expand(batch_shape)
    torch.testing.assert_close(kernel.mixture_weights.sum(-1), spread)
    gap = x.sort(-2).values.diff(dim=-2).amin(-2)
    gap = gap if batch_shape == (3, 2) else gap.flatten(0, 1).amin(0)
    assert (kernel.mixture_means <= 0.5 / gap[..., None, None, :]).all()


def test_active_dims_select_the_columns():
    x = torch.stack([torch.linspace(0, 1, 11), torch.linspace(0, 100, 11)], -1).double()
    kernel = SpectralMixtureKernel(20, active_dims=(1,)).double()
    assert initialize_spectral_mixture(kernel, x, x[:, 0].sin()) is kernel
    assert 0.04 < kernel.mixture_means.max() <= 0.05 + 1e-9


def test_the_grid_start_sees_scattered_points_as_correlated():
    x = torch.rand(150, 5, dtype=torch.float64)

    def coupling(spacing):
        kernel = mixture(5, num_mixtures=4)
        initialize_spectral_mixture(kernel, x, x[:, 0], generator(), spacing)
        correlation = kernel(x).to_dense() / kernel(x[:1]).to_dense()
        return (correlation - torch.eye(150)).abs().mean().item()

    assert coupling("grid") > 2 * coupling("smallest")


X = torch.rand(5, 2)


def start(kernel, **options):
    return initialize_spectral_mixture(kernel, X, X[:, 0], **options)


BAD = [
    (lambda: start(ScaleKernel(RBFKernel())), ArgumentError, "got ScaleKernel, expected a"),
    (lambda: start(SpectralMixtureKernel(3)), ShapeError, "ard_num_dims=2"),
    (lambda: start(mixture(2), spacing="smalest"), UnknownNameError, "smallest"),
    (lambda: JointSpectralMixtureKernel(0, 1), ArgumentError, "num_mixtures"),
    (lambda: JointSpectralMixtureKernel(1, 0), ArgumentError, "ard_num_dims"),
    (lambda: kernel().forward(X, X, last_dim_is_batch=True), UnsupportedError, "last_dim"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def kernel(num_mixtures=3, d=2):
    made = JointSpectralMixtureKernel(num_mixtures, d).double()
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            parameter.add_(0.3 * drawn(*parameter.shape, seed=seed))
    return made


def definition(made, x, other):
    tau = x.unsqueeze(-2) - other.unsqueeze(-3)
    terms = [
        weight
        * (-2 * math.pi**2 * (scale * tau).square().sum(-1)).exp()
        * (2 * math.pi * tau @ mean).cos()
        for weight, scale, mean in zip(
            made.mixture_weights, made.mixture_scales, made.mixture_means, strict=True
        )
    ]
    return sum(terms)


@pytest.mark.parametrize("batch", [(), (3,), (2, 1)])
def test_value_and_gradient_of_the_definition(batch):
    made = kernel()
    x, other = drawn(*batch, 5, 2).requires_grad_(), drawn(*batch, 4, 2, seed=1)
    value, expected = made(x, other).to_dense(), definition(made, x, other)
    torch.testing.assert_close(value, expected)
    inputs = [x, *made.parameters()]
    gradients = [torch.autograd.grad(v.square().sum(), inputs) for v in (value, expected)]
    torch.testing.assert_close(*gradients)
    for x1, x2 in ((x, x), (x[..., :4, :], other)):
        full = made(x1, x2).to_dense()
        torch.testing.assert_close(made(x1, x2, diag=True), full.diagonal(dim1=-2, dim2=-1))


def test_of_one_column_it_is_gpytorchs():
    made = kernel(d=1)
    theirs = SpectralMixtureKernel(3, ard_num_dims=1).double()
    theirs.mixture_weights = made.mixture_weights.detach()
    theirs.mixture_scales = made.mixture_scales.detach().unsqueeze(-2)
    theirs.mixture_means = made.mixture_means.detach().abs().unsqueeze(-2)  # cos is even
    x = drawn(6, 1)
    torch.testing.assert_close(made(x).to_dense(), theirs(x).to_dense())


def test_its_start():
    made = JointSpectralMixtureKernel(4, 3000)
    x = torch.randn(3, 3000, generator=generator())
    torch.testing.assert_close(made(x, diag=True), torch.ones(3))
    lengthscales = 1 / (2 * math.pi * made.mixture_scales)
    torch.testing.assert_close(lengthscales, torch.full((4, 3000), math.sqrt(3000)))
    same, other = (JointSpectralMixtureKernel(4, 3000, generator(seed)) for seed in (0, 1))
    assert torch.equal(made.mixture_means, same.mixture_means)
    assert not torch.equal(made.mixture_means, other.mixture_means)
