"""Laplace's approximation against quadrature, finite differences, and scikit-learn."""

import copy
import itertools
import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ConstantMean, ZeroMean
from linear_operator.utils.warnings import NumericalWarning

from gpclml import (
    ConditionalMarginalLogLikelihood,
    ExactMarginalLogLikelihood,
    GPRegression,
    KFold,
    LaplaceMarginalLogLikelihood,
    LastPoints,
    LeaveOneOut,
    RandomHoldout,
    fit_mll,
)
from gpclml.conditioning import NearestNeighbors
from gpclml.errors import ArgumentError, NonFiniteError, NotConvergedError, UnsupportedError
from gpclml.inference import training_observations
from gpclml.inference.laplace import find_mode, find_sites
from gpclml.likelihoods import (
    LogisticLikelihood,
    LogNegativeBinomialLikelihood,
    LogPoissonLikelihood,
    target_density,
)
from gpclml.models import LatentGP

LIKELIHOODS = {
    "probit": BernoulliLikelihood,
    "logistic": LogisticLikelihood,
    "poisson": LogPoissonLikelihood,
    "softplus-poisson": PoissonLikelihood,
    "negative-binomial": LogNegativeBinomialLikelihood,
    "softplus-negative-binomial": NegativeBinomialLikelihood,
    "student-t": StudentTLikelihood,
}
TARGETS = {
    "probit": [0.0, 1.0, 1.0], "logistic": [1.0, 0.0, 1.0], "student-t": [0.3, -0.2, 9.0],
}  # fmt: skip
COUNTS = [0.0, 3.0, 7.0]


CONCAVE = [name for name in LIKELIHOODS if name != "student-t"]
CONDITIONINGS = [LastPoints(m=0), LastPoints(m=4), KFold(4, seed=1)]
OBJECTIVES = [
    *itertools.product(LIKELIHOODS, ["laplace"], CONDITIONINGS),
    *itertools.product(["probit", "logistic"], ["ep"], CONDITIONINGS),
    ("softplus-negative-binomial", "ep", LastPoints(m=4)),
]


class Latent(LatentGP):
    def __init__(self, x, y, likelihood, outputscale=5.0, approximation="laplace"):
        super().__init__(x, y, likelihood.to(x))
        self.approximation = approximation
        self.mean_module = ConstantMean().to(x)
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=x.shape[-1])).to(x)
        self.covar_module.outputscale = outputscale


def targets_of(name):
    return torch.tensor(TARGETS.get(name, COUNTS), dtype=torch.float64)


def drawn(name, n=12, seed=0):
    """Points in two columns with targets of a smooth function; the last are outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    f = 3 * (4 * x[:, 0]).sin()
    if name in ("probit", "logistic"):
        return x, (f > 0).double()
    if name == "student-t":
        return x, f + 20 * (torch.arange(n) >= n - 2)
    return x, torch.poisson((f / 2).exp(), generator=generator)


def covariance(n, scale):
    x = torch.linspace(0, 1, n, dtype=torch.float64)
    return scale * (-2 * (x[:, None] - x).square()).exp() + 1e-6 * torch.eye(n, dtype=x.dtype)


def quadrature(K, density, y):
    """Log joint densities on a grid of latent values, that of a whitened prior, and its volume."""
    z = torch.linspace(-6.5, 6.5, 66, dtype=torch.float64)
    grid = torch.cartesian_prod(*[z] * len(y)).reshape(-1, len(y))
    f = grid @ torch.linalg.cholesky(K).mT
    log_prior = (-0.5 * grid.square() - 0.5 * math.log(2 * math.pi)).sum(-1)
    with torch.no_grad():
        return f, density.log_prob(f, y).sum(-1) + log_prior, (z[1] - z[0]).item() ** len(y)


def log_evidence(K, density, y):
    _, log_joint, volume = quadrature(K, density, y)
    return torch.logsumexp(log_joint, 0).item() + math.log(volume)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_derivatives_are_those_of_the_log_density(name):
    density = target_density(LIKELIHOODS[name]().double())
    f = torch.tensor([-7.0, -2.0, 0.1, 3.0], dtype=torch.float64, requires_grad=True)
    for y in targets_of(name):
        given = density.derivatives(f.detach(), y.expand_as(f))
        value = density.log_prob(f, y.expand_as(f))
        for order, derivative in enumerate(given):
            np.testing.assert_allclose(derivative, value.detach(), rtol=1e-9, atol=1e-11)
            if order < 3:
                (value,) = torch.autograd.grad(value.sum(), f, create_graph=True)


@pytest.mark.parametrize("name", ["probit", "logistic", "poisson", "negative-binomial"])
def test_log_densities_are_those_of_the_distribution_and_finite_far_away(name):
    likelihood = LIKELIHOODS[name]().double()
    density, f = target_density(likelihood), torch.linspace(-3, 3, 7, dtype=torch.float64)
    for y in targets_of(name):
        expected = likelihood(f).log_prob(y)
        np.testing.assert_allclose(
            density.log_prob(f, y).detach(), expected.detach(), rtol=1e-6, atol=1e-6
        )
    far = torch.tensor([-600.0], dtype=torch.float64)
    assert all(term.isfinite().all() for term in density.derivatives(far, torch.ones_like(far)))


def test_a_negative_binomial_of_a_large_size_is_poisson():
    likelihood = LogNegativeBinomialLikelihood().double()
    likelihood.size = 1e13
    f = torch.tensor([0.0, 2.0, 9.0], dtype=torch.float64)
    y = torch.tensor([0.0, 12.0, 8000.0], dtype=torch.float64)
    poisson = target_density(LogPoissonLikelihood()).log_prob(f, y)
    value = target_density(likelihood).log_prob(f, y)
    np.testing.assert_allclose(value.detach(), poisson, rtol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_evidence_and_conditional_are_near_those_by_quadrature(name, scale):
    density, y = target_density(LIKELIHOODS[name]().double()), targets_of(name)
    K, zeros = covariance(3, scale), torch.zeros(3, dtype=torch.float64)
    whole, others = find_mode(K, zeros, density, y), find_mode(K[:2, :2], zeros[:2], density, y[:2])
    exact, exact_others = log_evidence(K, density, y), log_evidence(K[:2, :2], density, y[:2])
    # Nats a target: with a scale of 100 the posteriors of classes are far from normal.
    tolerance = 0.05 if scale == 1 else 0.22
    assert whole.log_evidence.item() == pytest.approx(exact, abs=3 * tolerance)
    conditional = (whole.log_evidence - others.log_evidence).item()
    assert conditional == pytest.approx(exact - exact_others, abs=2 * tolerance)
    if name in CONCAVE:
        sites = find_sites(K, zeros, density, y, None, whole.start)
        others_evidence = find_sites(K[:2, :2], zeros[:2], density, y[:2], None, others.start)
        # Of counts with a scale of 100 the grid is too wide to be exact.
        assert sites.log_evidence.item() == pytest.approx(exact, abs=0.05)
        conditional = (sites.log_evidence - others_evidence.log_evidence).item()
        assert conditional == pytest.approx(exact - exact_others, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "approximation", "conditioning"), OBJECTIVES)
def test_gradients_are_those_of_finite_differences(name, approximation, conditioning):
    x, y = drawn(name, n=8)
    model = Latent(x, y, LIKELIHOODS[name](), approximation=approximation)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
    parameters = list(mll.parameters())
    gradients = torch.autograd.grad(mll(model(x), y), parameters)

    def value_at(numbers, index, step):
        with torch.no_grad():
            numbers[index] += step
            value = mll(model(x), y).item()
            numbers[index] -= step
        return value

    for parameter, gradient in zip(parameters, gradients, strict=True):
        numbers = parameter.detach().view(-1)
        for index, slope in enumerate(gradient.flatten().tolist()):
            near, far = (
                value_at(numbers, index, h) - value_at(numbers, index, -h) for h in (1e-4, 2e-4)
            )
            assert slope == pytest.approx((8 * near - far) / 12e-4, abs=1e-7)


def test_gradients_flow_to_points_and_through_other_kernels():
    x, y = drawn("probit")
    x.requires_grad_()
    model = Latent(x, y, BernoulliLikelihood())
    model.covar_module = ScaleKernel(gpytorch.kernels.RFFKernel(8, 2)).to(y)
    mll = LaplaceMarginalLogLikelihood(model.likelihood, model)
    assert mll.road().reason
    (gradient,) = torch.autograd.grad(mll(model(x), y), x)
    moved = x.detach().clone()
    moved[3, 1] += 1e-5
    model.set_train_data(moved)
    ahead = mll(model(moved), y).item()
    moved[3, 1] -= 2e-5
    behind = mll(model(moved), y).item()
    assert gradient[3, 1].item() == pytest.approx((ahead - behind) / 2e-5, rel=1e-5)


@pytest.mark.parametrize("ard", [False, True])
def test_evidence_is_that_of_scikit_learn(ard):
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    x, y = drawn("logistic", 40)
    lengthscale = np.array([0.4, 1.3]) if ard else 0.7
    kernel = ConstantKernel(3.0) * RBF(lengthscale)
    reference = GaussianProcessClassifier(kernel, optimizer=None).fit(x.numpy(), y.numpy())
    model = Latent(x, y, LogisticLikelihood(), outputscale=3.0)
    model.mean_module = ZeroMean()
    model.covar_module.base_kernel.lengthscale = torch.as_tensor(lengthscale)
    mll = LaplaceMarginalLogLikelihood(model.likelihood, model)
    expected = reference.log_marginal_likelihood_value_ / 40
    assert mll(model(x), y).item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "approximation"),
    [("probit", "laplace"), ("student-t", "laplace"), ("negative-binomial", "laplace"),
     ("probit", "ep"), ("negative-binomial", "ep")],
)  # fmt: skip
def test_a_batch_is_a_stack_of_singles(name, approximation):
    pairs = [drawn(name, seed=seed) for seed in range(3)]
    x, y = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
    batch = torch.Size([3])
    model = Latent(x, y, LIKELIHOODS[name](), approximation=approximation)
    model.mean_module = ConstantMean(batch_shape=batch).to(x)
    model.covar_module = ScaleKernel(RBFKernel(batch_shape=batch), batch_shape=batch).to(x)
    model.covar_module.outputscale = torch.tensor([1.0, 5.0, 50.0])
    conditioning = KFold(3, seed=0)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
    values = mll(model(x), y)
    values.sum().backward()
    for index, (single_x, single_y) in enumerate(pairs):
        single = Latent(single_x, single_y, LIKELIHOODS[name](), approximation=approximation)
        single.covar_module = ScaleKernel(RBFKernel()).to(x)
        single.covar_module.outputscale = model.covar_module.outputscale[index].detach()
        objective = ConditionalMarginalLogLikelihood(single.likelihood, single, conditioning)
        value = objective(single(single_x), single_y)
        assert values[index].item() == pytest.approx(value.item(), rel=1e-9)
        value.backward()
        slope = single.covar_module.raw_outputscale.grad
        expected = model.covar_module.raw_outputscale.grad[index]
        # Sites end where they change by 1e-8 deviations at most.
        atol = 1e-8 if approximation == "ep" else 1e-10
        torch.testing.assert_close(slope, expected, rtol=1e-7, atol=atol)


def test_single_precision_has_the_value_of_double():
    x, y = drawn("probit", 60)
    values = []
    for dtype in (torch.float64, torch.float32):
        model = Latent(x.to(dtype), y.to(dtype), BernoulliLikelihood())
        mll = LaplaceMarginalLogLikelihood(model.likelihood, model)
        values.append(mll(model(x.to(dtype)), y.to(dtype)))
    assert values[1].dtype == torch.float32
    assert values[1].item() == pytest.approx(values[0].item(), rel=1e-5)


@pytest.mark.parametrize("approximation", ["laplace", "ep"])
def test_learning_curves_add_up_to_the_evidence(approximation):
    x, y = drawn("logistic", 12)
    model = Latent(x, y, LogisticLikelihood(), 30.0, approximation)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    curve = training_observations(model).covariance.sequential(y, torch.randperm(12)[None])
    assert curve.sum().item() == pytest.approx(12 * mll(model(x), y).item(), rel=1e-9)
    laplace_evidence = LaplaceMarginalLogLikelihood(model.likelihood, model)(model(x), y)
    assert laplace_evidence.item() == pytest.approx(mll(model(x), y).item(), abs=0.1)
    assert torch.equal(laplace_evidence, mll(model(x), y)) == (approximation == "laplace")
    before = mll.compute_custom_loss().item()  # what is found starts the next search
    for model.approximation in ("laplace", "ep", "laplace", approximation):
        again = mll.compute_custom_loss().item()
    assert again == pytest.approx(before, rel=1e-9)


@pytest.mark.filterwarnings("ignore:The fit ended")
def test_a_search_stays_where_classes_have_probabilities():
    """Of separable classes without noise or priors the scale would grow without an end."""
    x, y = drawn("probit", 60)
    model = Latent(x, y, BernoulliLikelihood())
    folds = ConditionalMarginalLogLikelihood(model.likelihood, model, KFold(5))
    initial = copy.deepcopy(model.state_dict())
    model.covar_module.outputscale = 1e8
    model.covar_module.base_kernel.lengthscale = 0.3
    with pytest.raises(NotConvergedError, match="a log probability of"):
        folds(model(x), y)
    model.load_state_dict(initial)
    result = fit_mll(folds, progress=False)
    assert -0.1 < result.history[-1] < 0.01
    assert model.covar_module.outputscale.item() < 1e6
    model.covar_module.outputscale = 1e20
    model.covar_module.base_kernel.lengthscale = 100.0
    with pytest.warns(NumericalWarning), pytest.raises(NotConvergedError, match="a mode of the"):
        model.eval()(x)


@pytest.mark.parametrize("approximation", ["laplace", "ep"])
def test_missing_targets_count_nowhere(approximation):
    x, y = drawn("probit", 20)
    missing = torch.zeros(20, dtype=torch.bool)
    missing[[2, 11]] = True
    holed = torch.where(missing, torch.nan, y)
    with gpytorch.settings.observation_nan_policy("mask"):
        model = Latent(x, holed, BernoulliLikelihood(), approximation=approximation)
        kept = x[~missing]
        whole = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
        value = whole(model(x), holed)
        folds = ConditionalMarginalLogLikelihood(model.likelihood, model, KFold(4, seed=1))
        assert torch.isfinite(folds(model(x), holed))
        predicted = model.predict(x).probabilities
    with pytest.raises(NonFiniteError, match="mask"):
        whole(model(x), holed)
    without = Latent(kept, y[~missing], BernoulliLikelihood(), approximation=approximation)
    mll = ConditionalMarginalLogLikelihood(without.likelihood, without, LastPoints(m=0))
    assert value.item() == pytest.approx(mll(without(kept), y[~missing]).item(), rel=1e-10)
    torch.testing.assert_close(predicted, without.predict(x).probabilities)


def test_student_t_of_many_degrees_is_gaussian():
    x, y = drawn("student-t", 15)
    y = y / y.std()
    likelihood = StudentTLikelihood().double()
    likelihood.deg_free, likelihood.noise = 1e7, 0.3
    model = Latent(x, y, likelihood)
    exact = GPRegression(x, y, model.covar_module, model.mean_module, standardize=False)
    exact.likelihood.noise = 0.3
    expected = ExactMarginalLogLikelihood(exact.likelihood, exact)(exact(x), y)
    mll = LaplaceMarginalLogLikelihood(likelihood, model)
    assert mll(model(x), y).item() == pytest.approx(expected.item(), abs=1e-5)
    latent, reference = model.eval()(x[:4] + 0.1), exact.predict(x[:4] + 0.1, False)
    torch.testing.assert_close(latent.mean, reference.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        latent.covariance_matrix, reference.covariance_matrix, atol=1e-5, rtol=1e-3
    )


def test_the_posterior_with_negative_curvature_is_that_of_its_formula():
    x, y = drawn("student-t", 10)
    model = Latent(x, y, StudentTLikelihood())
    density = target_density(model.likelihood)
    with torch.no_grad():
        K = model.covar_module(x).to_dense()
        mode = find_mode(K, torch.zeros(10, dtype=K.dtype), density, y)
        W = -density.derivatives(mode.latent, y).second
        assert (W < 0).any()
        # The gradient vanishes, and the determinant is that of I + K W.
        first = density.derivatives(mode.latent, y).first
        torch.testing.assert_close(mode.latent, K @ first, rtol=1e-8, atol=1e-8)
        determinant = torch.linalg.det(torch.eye(10, dtype=K.dtype) + K * W)
        assert mode.curvature.log_det.item() == pytest.approx(determinant.log().item(), rel=1e-9)
        new = x[:3] + 0.05
        cross = model.covar_module(x, new).to_dense()
        prior = model.covar_module(new).to_dense()
        R = torch.linalg.inv(K + torch.diag(1 / W))
        posterior = model.eval()(new)
        torch.testing.assert_close(posterior.mean, cross.mT @ first, rtol=1e-6, atol=1e-6)
        expected = prior - cross.mT @ R @ cross
        torch.testing.assert_close(posterior.covariance_matrix, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("name", ["probit", "logistic", "negative-binomial"])
def test_expectation_propagation_has_the_moments_of_quadrature(name, scale):
    y = targets_of(name)
    density = target_density(LIKELIHOODS[name]().double())
    K = covariance(3, scale)
    f, log_joint, _ = quadrature(K, density, y)
    weights = log_joint.softmax(0).unsqueeze(-1)
    mean = (weights * f).sum(0)
    deviation = (weights * (f - mean).square()).sum(0).sqrt()
    zeros = torch.zeros(3, dtype=torch.float64)
    mode = find_mode(K, zeros, density, y)
    sites = find_sites(K, zeros, density, y, None, mode.start)
    posterior_mean = K @ sites.weights
    # In deviations of the posterior; the mode is much farther away where the scale is large.
    error = ((posterior_mean - mean) / deviation).abs().max().item()
    assert error < 0.05
    _, variance = sites.curvature.r_and_variance(K)
    torch.testing.assert_close(variance.sqrt(), deviation, rtol=0.1, atol=0.0)
    if scale == 100 and name != "negative-binomial":
        assert ((mode.latent - mean) / deviation).abs().max().item() > 5 * error


def test_sites_end_at_the_rounding_of_large_scales():
    x, _ = drawn("poisson", 60)
    y = torch.poisson(torch.full((60,), 300.0), generator=torch.Generator().manual_seed(0)).double()
    K = 5e3 * (-0.5 * torch.cdist(x, x).square() / 0.3**2).exp()
    density, zeros = target_density(LogPoissonLikelihood()), torch.zeros(60, dtype=torch.float64)
    mode = find_mode(K, zeros, density, y)
    sites = find_sites(K, zeros, density, y, None, mode.start)
    # So many counts make the posterior normal.
    torch.testing.assert_close(sites.latent, mode.latent, rtol=0.0, atol=0.01)


def test_what_is_not_taken_is_refused_by_name():
    x, y = drawn("probit")
    model = Latent(x, y, BernoulliLikelihood())
    for conditioning in (LeaveOneOut(), NearestNeighbors()):
        with pytest.raises(UnsupportedError, match="KFold"):
            ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
    with pytest.raises(UnsupportedError, match="LaplaceMarginalLogLikelihood"):
        ExactMarginalLogLikelihood(model.likelihood, model)
    with pytest.raises(UnsupportedError, match="SoftmaxLikelihood"):
        Latent(x, y, SoftmaxLikelihood(2, 3, mixing_weights=False))
    with pytest.raises(ArgumentError, match="zeros and ones"):
        Latent(x, 2 * y - 1, BernoulliLikelihood())
    exact = GPRegression(x, y)
    with pytest.raises(UnsupportedError, match="ExactMarginalLogLikelihood"):
        LaplaceMarginalLogLikelihood(exact.likelihood, exact)
    with pytest.raises(UnsupportedError, match="LatentGP"):
        ConditionalMarginalLogLikelihood(BernoulliLikelihood(), exact)
    heavy = Latent(*drawn("student-t"), StudentTLikelihood())
    heavy.approximation = "ep"
    with pytest.raises(UnsupportedError, match="laplace"):
        heavy.predict(x)


@pytest.mark.slow
def test_redrawn_blocks_average_to_folds():
    x, y = drawn("probit", 20)
    model = Latent(x, y, BernoulliLikelihood())
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, RandomHoldout(0.25))
    with torch.no_grad():
        draws = torch.stack([mll(model(x), y) for _ in range(200)])
    error = draws.std() / math.sqrt(200)
    blocks = KFold(4, seed=3)
    folds = ConditionalMarginalLogLikelihood(model.likelihood, model, blocks)(model(x), y)
    assert abs(draws.mean() - folds).item() < 5 * error.item() + 0.05
