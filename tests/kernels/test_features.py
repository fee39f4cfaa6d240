"""Feature maps against plain numpy, scikit-learn and the kernels that they approximate."""

from __future__ import annotations

import copy
import pickle

import gpytorch
import numpy as np
import pytest
import torch
from sklearn import preprocessing

from gpclml.errors import ArgumentError, ShapeError
from gpclml.kernels import (
    FourierFeatures,
    IdentityFeatures,
    PolynomialFeatures,
    PrefixFeatures,
    RandomFourierFeatures,
)


def points(n: int = 7, d: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.tensor(np.random.RandomState(seed).randn(n, d))


def test_fourier_features_are_all_sines_then_all_cosines():
    x = points(7, 1)
    angles = x.numpy() * np.arange(1, 5)
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    np.testing.assert_allclose(FourierFeatures(4)(x), expected, rtol=1e-12)
    batch = torch.stack([x, 2 * x])
    torch.testing.assert_close(FourierFeatures(4)(batch)[1], FourierFeatures(4)(2 * x))
    assert FourierFeatures(2)(x.float()).dtype == torch.float32


@pytest.mark.parametrize("ard", [False, True])
def test_random_fourier_features_are_cosines(ard):
    features = RandomFourierFeatures(
        3, 10, lengthscale=0.7, amplitude=1.3, ard=ard, seed=4
    ).double()
    if ard:
        features.lengthscale = torch.tensor([0.5, 1.0, 2.0])
    x = points()
    weight, bias = features.weight.numpy(), features.bias.numpy()
    scaled = x.numpy() / (np.array([0.5, 1.0, 2.0]) if ard else 0.7)
    expected = 1.3 * np.sqrt(2 / 10) * np.cos(scaled @ weight.T + bias)
    np.testing.assert_allclose(features(x).detach(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(features(torch.stack([x, 3 * x]))[1], features(3 * x))
    assert features.raw_lengthscale.shape == ((3,) if ard else (1,))
    assert bias.min() >= 0
    assert bias.max() <= 2 * np.pi


def test_they_approximate_an_rbf_kernel():
    R = 100_000
    x = points(5)
    features = RandomFourierFeatures(3, R, amplitude=0.8, ard=True, seed=1).double()
    features.lengthscale = torch.tensor([0.7, 1.5, 3.0])
    kernel = gpytorch.kernels.RBFKernel(ard_num_dims=3).double()
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
    one, same, other = (RandomFourierFeatures(2, 6, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.weight, same.weight)
    assert torch.equal(one.bias, same.bias)
    assert not torch.equal(one.weight, other.weight)
    assert not torch.equal(one.bias, other.bias)
    before = torch.random.get_rng_state()
    RandomFourierFeatures(2, 6)
    assert torch.equal(before, torch.random.get_rng_state())
    weight, bias = points(6, 2), points(6, 1).squeeze(-1)
    given = RandomFourierFeatures(2, 6, weight=weight, bias=bias, lengthscale=2.0, amplitude=0.5)
    x = points(4, 2)
    expected = 0.5 * np.sqrt(2 / 6) * np.cos(x.numpy() / 2 @ weight.numpy().T + bias.numpy())
    np.testing.assert_allclose(given(x).detach(), expected, rtol=1e-12)
    assert given.raw_lengthscale.dtype == torch.float64


def test_lengthscale_and_amplitude_train_and_frequencies_do_not():
    features = RandomFourierFeatures(2, 20, ard=True).double()
    names = {name for name, _ in features.named_parameters()}
    assert names == {"raw_lengthscale", "raw_amplitude"}
    x = points(6, 2)
    torch.autograd.gradcheck(
        lambda raw: torch.func.functional_call(features, {"raw_lengthscale": raw}, (x,)),
        (features.raw_lengthscale.detach().clone().requires_grad_(),),
    )
    target = RandomFourierFeatures(2, 20, ard=True, amplitude=2.0, lengthscale=1.5).double()(x)
    optimizer = torch.optim.Adam(features.parameters(), lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        (features(x) - target.detach()).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(
        features.lengthscale, torch.full((2,), 1.5).double(), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(
        features.amplitude, torch.full((1,), 2.0).double(), rtol=1e-3, atol=0
    )


def test_state_dict_and_copies_keep_values():
    features = RandomFourierFeatures(2, 6, seed=3, lengthscale=0.3, amplitude=4.0, ard=True)
    fresh = RandomFourierFeatures(2, 6, seed=8, ard=True)
    fresh.load_state_dict(features.state_dict())
    x = points(4, 2).float()
    for one in (fresh, copy.deepcopy(features), pickle.loads(pickle.dumps(features))):
        assert torch.equal(one(x), features(x))
    torch.testing.assert_close(features.lengthscale, torch.full((2,), 0.3))
    torch.testing.assert_close(features.amplitude, torch.tensor([4.0]))


@pytest.mark.parametrize("degree", [0, 1, 2, 4])
@pytest.mark.parametrize("d", [1, 3])
def test_polynomials_are_those_of_scikit_learn(degree, d):
    x = points(5, d)
    expected = preprocessing.PolynomialFeatures(degree).fit_transform(x.numpy())
    np.testing.assert_allclose(PolynomialFeatures(degree)(x), expected, rtol=1e-12)
    batch = torch.stack([x, x + 1])
    torch.testing.assert_close(PolynomialFeatures(degree)(batch)[0], PolynomialFeatures(degree)(x))


def test_gradient_of_polynomials_at_zero():
    x = torch.tensor([[0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(PolynomialFeatures(3), (x,))


def test_identity_and_prefixes():
    x = points()
    assert torch.equal(IdentityFeatures()(x), x)
    with_ones = IdentityFeatures(intercept=True)(torch.stack([x, x]))
    assert torch.equal(with_ones[1], torch.cat([torch.ones(7, 1).double(), x], dim=-1))
    for count in (1, 2, 3):
        assert torch.equal(PrefixFeatures(count)(x), x[:, :count])
    # Nested: a smaller model's features are the first of a larger one's.
    larger = PrefixFeatures(3)(x)
    assert torch.equal(PrefixFeatures(2)(larger), PrefixFeatures(2)(x))


def test_bad_arguments():
    x = points()
    for make, match in (
        (lambda: FourierFeatures(0), "num_frequencies: got 0"),
        (lambda: RandomFourierFeatures(0, 3), "num_inputs: got 0"),
        (lambda: RandomFourierFeatures(3, 0), "num_features: got 0"),
        (lambda: RandomFourierFeatures(1, 2, weight=torch.ones(2, 1)), "bias: got None"),
        (lambda: RandomFourierFeatures(1, 2, bias=torch.ones(2)), "bias: got tensor"),
        (lambda: RandomFourierFeatures(1, 2, lengthscale=0.0), "lengthscale: got 0.0"),
        (lambda: RandomFourierFeatures(1, 2, amplitude=-1.0), "amplitude: got -1.0"),
        (lambda: RandomFourierFeatures(1, 2, lengthscale=float("nan")), "lengthscale: got nan"),
        (lambda: PolynomialFeatures(-1), "degree: got -1"),
        (lambda: PrefixFeatures(0), "num_features: got 0"),
    ):
        with pytest.raises(ArgumentError, match=match):
            make()
    for make, match in (
        (lambda: FourierFeatures(2)(x), r"x: got \(7, 3\)"),
        (lambda: RandomFourierFeatures(2, 4).double()(x), r"x: got \(7, 3\)"),
        (lambda: PrefixFeatures(4)(x), r"x: got \(7, 3\)"),
        (
            lambda: RandomFourierFeatures(1, 2, weight=torch.ones(1, 2), bias=torch.ones(2)),
            r"bias: got \(2,\), expected \(R,\) with R = 1 as weight",
        ),
        (
            lambda: setattr(RandomFourierFeatures(2, 4), "lengthscale", torch.ones(2)),
            "lengthscale: got",
        ),
    ):
        with pytest.raises(ShapeError, match=match):
            make()
