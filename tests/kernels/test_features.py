"""Feature maps against numpy and scikit-learn, and the kernels that are their inner products."""

from __future__ import annotations

import copy
import pickle

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from sklearn import preprocessing

from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.inference.observations import observations
from gpclml.kernels import FeatureKernel, FourierFeatures, PolynomialFeatures, RandomFourierFeatures


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_fourier_features_are_all_sines_then_all_cosines():
    x = numbers(7, 1)
    angles = x.numpy() * np.arange(1, 5)
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    np.testing.assert_allclose(FourierFeatures(4)(x), expected, rtol=1e-12)
    batch = torch.stack([x, 2 * x])
    torch.testing.assert_close(FourierFeatures(4)(batch)[1], FourierFeatures(4)(2 * x))
    assert FourierFeatures(2)(x.float()).dtype == torch.float32


@pytest.mark.parametrize("degree", [0, 1, 2, 4])
@pytest.mark.parametrize("d", [1, 3])
def test_polynomials_are_those_of_scikit_learn(degree, d):
    x = numbers(5, d)
    expected = preprocessing.PolynomialFeatures(degree).fit_transform(x.numpy())
    np.testing.assert_allclose(PolynomialFeatures(degree)(x), expected, rtol=1e-12)
    batch = torch.stack([x, x + 1])
    torch.testing.assert_close(PolynomialFeatures(degree)(batch)[0], PolynomialFeatures(degree)(x))


def test_gradient_of_polynomials_at_zero():
    x = torch.tensor([[0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(PolynomialFeatures(3), (x,))


@pytest.mark.parametrize("ard", [False, True])
def test_random_fourier_features_are_cosines(ard):
    features = RandomFourierFeatures(3, 10, lengthscale=0.7, amplitude=1.3, ard=ard, seed=4)
    features = features.double()
    if ard:
        features.lengthscale = torch.tensor([0.5, 1.0, 2.0])
    x = numbers(7, 3)
    weight, bias = features.weight.numpy(), features.bias.numpy()
    scaled = x.numpy() / (np.array([0.5, 1.0, 2.0]) if ard else 0.7)
    expected = 1.3 * np.sqrt(2 / 10) * np.cos(scaled @ weight.T + bias)
    np.testing.assert_allclose(features(x).detach(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(features(torch.stack([x, 3 * x]))[1], features(3 * x))
    assert bias.min() >= 0
    assert bias.max() <= 2 * np.pi
    assert {name for name, _ in features.named_parameters()} == {"raw_lengthscale", "raw_amplitude"}

    def function(x, lengthscale, amplitude):
        given = {"raw_lengthscale": lengthscale, "raw_amplitude": amplitude}
        return torch.func.functional_call(features, given, (x,))

    inputs = x, features.raw_lengthscale, features.raw_amplitude
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(function, inputs)


def test_they_approximate_an_rbf_kernel():
    R = 100_000
    x = numbers(5, 3)
    features = RandomFourierFeatures(3, R, amplitude=0.8, ard=True, seed=1).double()
    features.lengthscale = torch.tensor([0.7, 1.5, 3.0])
    kernel = RBFKernel(ard_num_dims=3).double()
    kernel.lengthscale = torch.tensor([0.7, 1.5, 3.0])
    with torch.no_grad():
        phi = features(x)
        expected = 0.64 * kernel(x).to_dense()
        # Each of the R terms is one draw: its spread gives the standard error of their sum.
        terms = R * phi.unsqueeze(1) * phi.unsqueeze(0)
        error = terms.std(-1) / R**0.5
    assert float(error.max()) < 0.01
    assert bool(((terms.mean(-1) - expected).abs() < 4.5 * error).all())


def test_seeds_and_given_frequencies():
    before = torch.random.get_rng_state()
    first, same, other = (RandomFourierFeatures(2, 6, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    for name in ("weight", "bias"):
        assert torch.equal(getattr(first, name), getattr(same, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))
    weight, bias = numbers(6, 2), numbers(6)
    given = RandomFourierFeatures(2, 6, weight=weight, bias=bias, lengthscale=2.0, amplitude=0.5)
    x = numbers(4, 2)
    expected = 0.5 * np.sqrt(2 / 6) * np.cos(x.numpy() / 2 @ weight.numpy().T + bias.numpy())
    np.testing.assert_allclose(given(x).detach(), expected, rtol=1e-12)
    assert given.raw_lengthscale.dtype == torch.float64


def test_states_and_copies_keep_values():
    features = RandomFourierFeatures(2, 6, seed=3, lengthscale=0.3, amplitude=4.0, ard=True)
    kernel = FeatureKernel(features, torch.linspace(0.3, 2.0, 6))
    fresh = FeatureKernel(RandomFourierFeatures(2, 6, seed=8, ard=True), torch.ones(6))
    fresh.load_state_dict(kernel.state_dict())
    x = numbers(4, 2).float()
    for other in (fresh, copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert torch.equal(other(x).to_dense(), kernel(x).to_dense())
    torch.testing.assert_close(features.lengthscale, torch.full((2,), 0.3))
    torch.testing.assert_close(features.amplitude, torch.tensor([4.0]))
    torch.testing.assert_close(kernel.prior_variance, torch.linspace(0.3, 2.0, 6))
    kernel.prior_variance = 0.5
    torch.testing.assert_close(kernel.prior_variance, torch.full((6,), 0.5))


def test_covariances_are_inner_products_of_features():
    x, z, variance = numbers(6, 2), numbers(4, 2, seed=1), torch.tensor([0.3, 1.0, 2.0]).double()
    features = PolynomialFeatures(1)
    kernel = FeatureKernel(features, variance)
    expected = features(x) @ torch.diag(variance) @ features(z).mT
    torch.testing.assert_close(kernel(x, z).to_dense(), expected)
    torch.testing.assert_close(kernel(x, diag=True), kernel(x).to_dense().diagonal())
    torch.testing.assert_close(kernel(x[:4], z, diag=True), kernel(x[:4], z).to_dense().diagonal())
    batch = torch.stack([x, 2 * x])
    torch.testing.assert_close(kernel(batch).to_dense()[1], kernel(2 * x).to_dense())
    torch.testing.assert_close(kernel(x[:3]).to_dense(), kernel(x).to_dense()[:3, :3])
    torch.testing.assert_close(kernel(x)[1:4, 2:5].to_dense(), kernel(x).to_dense()[1:4, 2:5])
    function = FeatureKernel(lambda points: features(points), variance)
    torch.testing.assert_close(function(x).to_dense(), kernel(x).to_dense())


def test_gradients_of_prior_variances_and_features():
    x, network = numbers(6, 2), torch.nn.Linear(2, 3).double()
    kernel = FeatureKernel(network, torch.tensor([0.3, 1.0, 2.0]).double())

    def function(raw, weight):
        given = {"raw_prior_variance": raw, "features.weight": weight}
        return torch.func.functional_call(kernel, given, (x, x)).to_dense()

    parameters = kernel.raw_prior_variance, network.weight
    inputs = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    with gpytorch.settings.lazily_evaluate_kernels(False):
        assert torch.autograd.gradcheck(function, inputs)


def frequencies(shape):
    return RandomFourierFeatures(1, 2, weight=torch.ones(*shape), bias=torch.ones(2))


X, TWO, IDENTITY = numbers(7, 3), torch.tensor([2.0, 1.0]), torch.nn.Identity()
LAST = {"last_dim_is_batch": True}
UNFIT = r"features: got .* of \(7, 3\)"
BAD = [
    (lambda: FourierFeatures(0), ArgumentError, "num_frequencies: got 0"),
    (lambda: PolynomialFeatures(-1), ArgumentError, "degree: got -1"),
    (lambda: RandomFourierFeatures(0, 3), ArgumentError, "num_inputs: got 0"),
    (lambda: RandomFourierFeatures(3, 0), ArgumentError, "num_features: got 0"),
    (lambda: RandomFourierFeatures(1, 2, weight=torch.ones(2, 1)), ArgumentError, "bias: got None"),
    (lambda: RandomFourierFeatures(1, 2, lengthscale=0.0), ArgumentError, "lengthscale: got 0.0"),
    (lambda: RandomFourierFeatures(1, 2, amplitude=-1.0), ArgumentError, "amplitude: got -1.0"),
    (lambda: FourierFeatures(2)(X), ShapeError, r"x: got \(7, 3\)"),
    (lambda: RandomFourierFeatures(2, 4).double()(X), ShapeError, r"x: got \(7, 3\)"),
    (lambda: frequencies((1, 2)), ShapeError, r"\(2,\), expected \(R,\) with R = 1 as weight"),
    (lambda: frequencies((2, 2)), ShapeError, r"expected \(2, 1\) and \(2,\)"),
    (lambda: FeatureKernel(IDENTITY, TWO - 1), ArgumentError, "prior_variance: got as low as 0"),
    (lambda: setattr(FeatureKernel(IDENTITY), "prior_variance", TWO), ShapeError, r"got \(2,\)"),
    (lambda: FeatureKernel(IDENTITY, TWO).features_of(X), ShapeError, "got 2 numbers, expected"),
    (lambda: FeatureKernel(lambda x: x.sum(-1)).features_of(X), ShapeError, UNFIT),
    (lambda: FeatureKernel(lambda x: x[:3]).features_of(X), ShapeError, UNFIT),
    (lambda: FeatureKernel(lambda x: x[:, :0]).features_of(X), ShapeError, UNFIT),
    (lambda: FeatureKernel(IDENTITY).forward(X, X, **LAST), UnsupportedError, "last_dim_is_batch"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_bad_arguments(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("batch_shape", [(), (3,)])
def test_a_batch_of_linear_kernels(batch_shape):
    x, y = numbers(3, 14, 2), numbers(3, 14, seed=1)
    batch = torch.Size(batch_shape)
    likelihood = GaussianLikelihood(batch_shape=batch)
    likelihood.noise = torch.tensor([[0.1], [0.2], [0.3]]) if batch else 0.1
    kernel = LinearKernel(batch_shape=batch)
    kernel.variance = torch.tensor([0.5, 1.0, 2.0]).reshape(3, 1, 1) if batch else 0.5
    kernel = ScaleKernel(kernel, batch_shape=batch).double()
    prior = MultivariateNormal(torch.zeros(3, 14).double(), kernel(x))
    data = observations(likelihood.double(), prior, y)
    expected = likelihood(prior).covariance_matrix
    torch.testing.assert_close(data.covariance.to_dense(), expected)
    for member in (1, slice(1, 3)):
        torch.testing.assert_close(data.member(member).covariance.to_dense(), expected[member])
