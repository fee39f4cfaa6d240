"""Kernels that are inner products of features, GPyTorch's own among them."""

from __future__ import annotations

import contextlib
import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import LinearKernel, RBFKernel, RFFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from linear_operator.operators import LowRankRootLinearOperator

from gpclml.conditioning import HeldOut, KFold, LastPoints, LeaveOneOut, RandomOrderings
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.evaluation import (
    conditional_log_marginal_likelihood,
    joint_log_predictive,
    learning_curve,
    leave_one_out,
    log_marginal_likelihood,
    marginal_log_predictive,
)
from gpclml.inference.observations import observations
from gpclml.kernels import FeatureKernel, IdentityFeatures, PolynomialFeatures
from gpclml.linalg import DenseCovariance, LowRankPlusDiagonal
from gpclml.mlls import ConditionalMarginalLogLikelihood

N = 14


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class DenseKernel(gpytorch.kernels.Kernel):
    """The same covariances without their structure."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x1, x2, diag=False, **params):
        covariance = self.kernel(x1, x2).to_dense()
        return covariance.diagonal(dim1=-2, dim2=-1) if diag else covariance


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_kernel(name: str):
    torch.manual_seed(0)
    if name.startswith("scaled"):
        kernel = ScaleKernel(make_kernel(name.removeprefix("scaled ")))
        kernel.outputscale = 1.7
        return kernel
    if name == "linear":
        kernel = LinearKernel(ard_num_dims=3)
        kernel.variance = torch.tensor([[0.5, 1.0, 2.0]])
        return kernel
    if name == "rff":
        return RFFKernel(num_samples=3, num_dims=3)  # six features
    return FeatureKernel(PolynomialFeatures(1), torch.tensor([0.3, 1.0, 2.0, 0.7]))


def make_likelihood(name: str):
    if name == "one":
        likelihood = GaussianLikelihood()
        likelihood.noise = 0.3
        return likelihood
    noise = 0.1 + numbers(N, seed=7).square()
    return FixedNoiseGaussianLikelihood(noise, learn_additional_noise=name == "fixed and learned")


def make_models(kernel: str, likelihood: str, targets=None):
    """A model of low rank and the same with a dense covariance, with equal parameters."""
    x, y = numbers(N, 3), numbers(N, seed=1) if targets is None else targets
    models = []
    for dense in (False, True):
        part = make_kernel(kernel)
        model = Model(x, y, make_likelihood(likelihood), DenseKernel(part) if dense else part)
        model.double().mean_module.constant.data.fill_(0.4)
        models.append(model)
    return models


KERNELS = ["linear", "scaled linear", "rff", "scaled rff", "features", "scaled features"]
LIKELIHOODS = ["one", "fixed", "fixed and learned"]
CONDITIONINGS = [
    LastPoints(0),
    LastPoints(9),
    KFold(5, seed=0),
    KFold(2, seed=0),
    LeaveOneOut(),
    RandomOrderings(4, 6, seed=0),
    HeldOut([0, 1, 2, 3, 4, 5, 6, 7], [9], [8, 11]),
    None,
]


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_objectives_are_those_of_the_dense_covariance(kernel, likelihood, missing):
    y = numbers(N, seed=1)
    if missing:
        y[[2, 8]] = torch.nan
    policy = gpytorch.settings.observation_nan_policy("mask")
    with policy if missing else contextlib.nullcontext():
        models = make_models(kernel, likelihood, y)
        forms = []
        for model in models:
            data = observations(model.likelihood, model(*model.train_inputs), y, model.train_inputs)
            forms.append(type(data.covariance))
        assert forms == [LowRankPlusDiagonal, DenseCovariance]
        for conditioning in CONDITIONINGS:
            results = []
            for model in models:
                model.zero_grad()
                mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
                value = mll(model(*model.train_inputs), y, model.train_inputs)
                loss = mll.compute_custom_loss()
                (value - 0.5 * loss).backward()
                gradients = [p.grad for p in model.parameters()]
                results.append([value.detach(), loss.detach(), *gradients])
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
                assert one is not None


@pytest.mark.parametrize("likelihood", ["one", "fixed"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_are_those_of_the_dense_covariance(kernel, likelihood):
    new_x, new_y = numbers(5, 3, seed=3), numbers(5, seed=4)
    noise = None if likelihood == "one" else torch.full((5,), 0.2).double()
    results = []
    for model in make_models(kernel, likelihood):
        results.append(
            [
                log_marginal_likelihood(model),
                learning_curve(model, orderings=3),
                leave_one_out(model),
                conditional_log_marginal_likelihood(model, RandomOrderings(5, 8)),
                joint_log_predictive(model, new_x, new_y, noise=noise),
                marginal_log_predictive(model, new_x, new_y, noise=noise),
            ]
        )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    lml, curves = results[0][:2]
    torch.testing.assert_close(curves.sum(-1), lml.expand(3))


def test_more_features_than_points_are_dense():
    x, y = numbers(N, 3), numbers(N, seed=1)
    for kernel in (
        FeatureKernel(PolynomialFeatures(4)),
        RFFKernel(num_samples=20, num_dims=3),
        RBFKernel(),
        LinearKernel() + RBFKernel(),
    ):
        model = Model(x, y, GaussianLikelihood(), kernel).double()
        data = observations(model.likelihood, model(x), y)
        assert isinstance(data.covariance, DenseCovariance)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_batch_of_linear_kernels(scaled):
    x, y = numbers(3, N, 2), numbers(3, N, seed=1)
    batch = torch.Size([3])
    likelihood = GaussianLikelihood(batch_shape=batch).double()
    likelihood.noise = torch.tensor([[0.1], [0.2], [0.3]])
    kernel = LinearKernel(batch_shape=batch)
    kernel.variance = torch.tensor([0.5, 1.0, 2.0]).reshape(3, 1, 1)
    kernel = (ScaleKernel(kernel, batch_shape=batch) if scaled else kernel).double()
    prior = MultivariateNormal(torch.zeros(3, N).double(), kernel(x))
    data = observations(likelihood, prior, y)
    assert isinstance(data.covariance, LowRankPlusDiagonal)
    expected = likelihood(prior).covariance_matrix
    torch.testing.assert_close(data.covariance.to_dense(), expected)
    torch.testing.assert_close(data.member(1).covariance.to_dense(), expected[1])


def test_members_of_a_batch_with_one_noise():
    x, y = numbers(3, N, 2), numbers(3, N, seed=1)
    prior = MultivariateNormal(torch.zeros(3, N).double(), LinearKernel().double()(x))
    data = observations(GaussianLikelihood().double(), prior, y)
    for part in (1, slice(1, 3)):
        torch.testing.assert_close(
            data.member(part).covariance.to_dense(), data.covariance.to_dense()[part]
        )


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
    assert isinstance(kernel(x).evaluate_kernel(), LowRankRootLinearOperator)
    assert not isinstance(kernel(x[:3]).evaluate_kernel(), LowRankRootLinearOperator)
    torch.testing.assert_close(kernel(x[:3]).to_dense(), kernel(x).to_dense()[:3, :3])
    torch.testing.assert_close(kernel(x)[1:4, 2:5].to_dense(), kernel(x).to_dense()[1:4, 2:5])
    as_function = FeatureKernel(lambda points: features(points), variance)
    torch.testing.assert_close(as_function(x).to_dense(), kernel(x).to_dense())


def test_gradients_of_prior_variances_and_features():
    x = numbers(6, 2)
    network = torch.nn.Linear(2, 3).double()
    kernel = FeatureKernel(network, torch.tensor([0.3, 1.0, 2.0]).double())
    assert {"features.weight", "features.bias", "raw_prior_variance"} == {
        name for name, _ in kernel.named_parameters()
    }

    def function(raw, weight):
        given = {"raw_prior_variance": raw, "features.weight": weight}
        return torch.func.functional_call(kernel, given, (x, x)).to_dense()

    parts = [
        part.detach().clone().requires_grad_()
        for part in (kernel.raw_prior_variance, network.weight)
    ]
    with gpytorch.settings.lazily_evaluate_kernels(False):
        assert torch.autograd.gradcheck(function, parts)


def test_copies_keep_values():
    kernel = FeatureKernel(PolynomialFeatures(1), torch.tensor([0.3, 1.0, 2.0]))
    fresh = FeatureKernel(PolynomialFeatures(1), torch.ones(3))
    fresh.load_state_dict(kernel.state_dict())
    for one in (fresh, copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        torch.testing.assert_close(one.prior_variance, torch.tensor([0.3, 1.0, 2.0]))
    kernel.prior_variance = 0.5
    torch.testing.assert_close(kernel.prior_variance, torch.full((3,), 0.5))
    assert FeatureKernel(IdentityFeatures(), 2).prior_variance.item() == pytest.approx(2.0)


def test_bad_arguments():
    x = numbers(6, 2)
    with pytest.raises(ArgumentError, match=r"prior_variance: got as low as 0"):
        FeatureKernel(IdentityFeatures(), torch.tensor([1.0, 0.0]))
    kernel = FeatureKernel(IdentityFeatures())
    with pytest.raises(ArgumentError, match=r"prior_variance: got -1"):
        kernel.prior_variance = -1.0
    with pytest.raises(ShapeError, match=r"prior_variance: got \(2,\)"):
        kernel.prior_variance = torch.ones(2)
    with pytest.raises(ShapeError, match="prior_variance: got 3 numbers, expected one"):
        FeatureKernel(IdentityFeatures(), torch.ones(3)).features_of(x)
    for features in (lambda x: x.sum(-1), lambda x: x[:3], lambda x: x[:, :0]):
        with pytest.raises(ShapeError, match=r"features: got .* of \(6, 2\)"):
            FeatureKernel(features).features_of(x)
    with pytest.raises(UnsupportedError, match="last_dim_is_batch"):
        kernel.forward(x, x, last_dim_is_batch=True)
