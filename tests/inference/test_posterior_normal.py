"""The normal of predictions is GPyTorch's in everything but absolute bounds."""

import math

import gpytorch
import pytest
import torch
from botorch.posteriors import GPyTorchPosterior
from exact_gps import PlainGP
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import ConstantKernel, LinearKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.metrics import mean_standardized_log_loss, quantile_coverage_error
from linear_operator.operators import DiagLinearOperator

from gpclml.inference import PosteriorNormal, exact_posterior

SCALES = [1e-12, 1e-6, 1.0, 1e6, 1e12]


def moments(batch=(), dtype=torch.float64, n=5):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(*batch, n, n, generator=generator, dtype=torch.float64)
    mean = torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    return mean.to(dtype), (root @ root.mT + torch.eye(n)).to(dtype)


def both(batch=(), dtype=torch.float64):
    return PosteriorNormal(*moments(batch, dtype)), MultivariateNormal(*moments(batch, dtype))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_all_numbers_are_those_of_gpytorch(batch):
    leaves = [moment.requires_grad_() for moment in moments(batch)]
    ours, theirs = PosteriorNormal(*leaves), MultivariateNormal(*leaves)
    value, many = theirs.mean.detach() + 1.0, torch.zeros(4, *batch, 5, dtype=torch.float64)
    base = torch.linspace(-1, 1, 4 * theirs.mean.numel(), dtype=torch.float64)
    base = base.reshape(4, *theirs.mean.shape)
    values, expected = (
        [
            normal.mean, normal.variance, normal.stddev, *normal.confidence_region(),
            normal.covariance_matrix, normal.log_prob(value), normal.log_prob(many),
            normal.entropy(), normal.scale_tril, normal.rsample(torch.Size([4]), base),
            (normal + normal).variance, (normal * 3).stddev, (normal / 2).log_prob(value),
            normal[..., 1:3].covariance_matrix, normal.unsqueeze(0).stddev,
            normal.expand(torch.Size([2, *batch])).log_prob(value), normal.add_jitter(0.5).variance,
            torch.distributions.kl_divergence(normal, theirs),
            torch.distributions.kl_divergence(theirs, normal),
            normal.to_data_independent_dist().scale,
            *torch.autograd.grad(normal.log_prob(value).sum(), leaves),
        ]
        for normal in (ours, theirs)
    )  # fmt: skip
    torch.testing.assert_close(values, expected)
    assert type(ours[..., 1:3]) is type(ours + ours) is PosteriorNormal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", SCALES)
def test_a_singular_covariance_is_drawn_from_and_scored_in_any_units(scale, dtype):
    """Jitter is of the size of the variances: an absolute one would be all that is drawn."""
    mean, covariance = torch.zeros(3, dtype=dtype), torch.ones(3, 3, dtype=dtype)
    warns = pytest.warns(gpytorch.utils.warnings.NumericalWarning)
    normal = PosteriorNormal(mean, covariance * scale**2)
    base = torch.tensor([[1.0, 1.0, 1.0]], dtype=dtype)
    with warns:
        draw = normal.rsample(torch.Size([1]), base) / scale
    torch.testing.assert_close(draw, torch.ones(1, 3, dtype=dtype), rtol=5e-3, atol=0)
    with warns:
        unit = PosteriorNormal(mean, covariance).log_prob(mean)
        scaled = PosteriorNormal(mean, covariance * scale**2).log_prob(mean)
    # Jitter is a share of the unit squared, which is a power of two: up to twice as much or half.
    torch.testing.assert_close(scaled + 3 * math.log(scale), unit, rtol=0, atol=2 * math.log(2))


def test_a_variance_that_rounding_made_negative_has_a_root_and_a_gradient():
    diagonal = torch.tensor([1.0, -1e-17, 0.0], dtype=torch.float64, requires_grad=True)
    deviation = PosteriorNormal(torch.zeros(3).double(), DiagLinearOperator(diagonal)).stddev
    assert (deviation > 0).all()
    assert deviation.max() == 1
    deviation.sum().backward()
    assert diagonal.grad is not None
    assert diagonal.grad.tolist() == [0.5, 0.0, 0.0]


def test_likelihoods_metrics_and_posteriors_of_others_take_it():
    scale = 1e-9
    mean, covariance = moments()
    ours, theirs = PosteriorNormal(mean * scale, covariance * scale**2), both()[1]
    likelihood = GaussianLikelihood().double()
    with gpytorch.settings.min_fixed_noise(double_value=scale**2):
        fixed = FixedNoiseGaussianLikelihood(torch.full((5,), scale**2, dtype=torch.float64))
    noisy = fixed(ours)
    assert type(noisy) is type(likelihood(ours)) is PosteriorNormal
    torch.testing.assert_close(noisy.variance / scale**2, theirs.variance + 1)
    y = mean + 0.3
    torch.testing.assert_close(
        mean_standardized_log_loss(ours, y * scale, y * scale),
        mean_standardized_log_loss(theirs, y, y),
    )
    torch.testing.assert_close(
        quantile_coverage_error(ours, y * scale), quantile_coverage_error(theirs, y)
    )
    posterior, expected = GPyTorchPosterior(ours), GPyTorchPosterior(theirs)
    torch.testing.assert_close(posterior.variance / scale**2, expected.variance)
    quantile = torch.tensor([0.1, 0.9]).double()
    torch.testing.assert_close(posterior.quantile(quantile) / scale, expected.quantile(quantile))
    base = torch.ones(2, 5, dtype=torch.float64)
    draws = posterior.rsample_from_base_samples(torch.Size([2]), base) / scale
    torch.testing.assert_close(draws, expected.rsample_from_base_samples(torch.Size([2]), base))
    assert posterior.rsample(torch.Size([7])).shape == (7, 5, 1)


@pytest.mark.parametrize("exponent", [-300, -41, 0, 17, 250])
def test_powers_of_two_change_no_digit(exponent):
    mean, covariance = moments()
    size = math.ldexp(1.0, exponent)
    normal = PosteriorNormal(mean * size, covariance * size**2)
    plain = PosteriorNormal(mean, covariance)
    torch.testing.assert_close(
        normal.log_prob(mean * 0) + 5 * math.log(size), plain.log_prob(mean * 0)
    )
    base = torch.ones(1, 5, dtype=torch.float64)
    draws = [q.rsample(torch.Size([1]), base) for q in (normal, plain)]
    assert torch.equal(draws[0], draws[1] * size)


@pytest.mark.parametrize("marginal", [True, False])
@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e10])
def test_variances_are_at_least_the_rounding_of_the_prior_variances_at_their_points(
    scale, marginal
):
    """Where nothing is left of a variance, in units of the targets that are large or small."""
    x = torch.linspace(0.0, 30.0, 31, dtype=torch.float64).unsqueeze(-1)
    noise = GreaterThan(1e-40, transform=None, initial_value=1e-18 * scale)
    near, growing = RBFKernel(), LinearKernel()  # independent points, variances that grow
    near.lengthscale, growing.variance = 0.05, 1e4
    kernel = ScaleKernel(near * (growing + ConstantKernel()))
    y, likelihood = torch.zeros(31).double(), GaussianLikelihood(noise_constraint=noise)
    model = PlainGP(x, y, kernel, likelihood, gpytorch.means.ZeroMean()).double().eval()
    model.covar_module.outputscale = scale
    with torch.no_grad():
        variance = exact_posterior(model, x, marginal).variance
        prior = model.covar_module(x, diag=True)
    assert prior.max() > 1e5 * prior.min()
    share = variance / prior
    eps = torch.finfo(torch.float64).eps
    assert (share >= eps * (1 - 1e-9)).all()
    assert (share < 1e3 * eps).all()
    assert (share < 1.5 * eps).any()  # the bound is reached
