import copy
import itertools

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood

from gpclml.inference import posterior
from gpclml.models import GPClassification, GPCounts, GPRegression


def sample(n, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x.to(dtype), (torch.sin(4 * x.sum(-1)) + 0.2 * noise).to(dtype)


def changed_noise(model):
    model.likelihood.noise = 0.5


def changed_through_data(model):
    model.covar_module.base_kernel.raw_lengthscale.data.add_(1.0)


def changed_mean(model):
    with torch.no_grad():
        model.mean_module.constant.fill_(1.5)


def changed_setting(model):
    model.covar_module.base_kernel.nu = 0.5


def changed_kernel(model):
    model.covar_module = ScaleKernel(RBFKernel()).to(model.train_targets)


def changed_targets(model):
    model.train_targets[3] += 1.0


def changed_inputs(model):
    model.train_inputs[0][3] += 1.0


def changed_data(model):
    model.set_train_data(model.train_inputs[0][:-5], model.train_targets[:-5], strict=False)


def missing_target(model):
    model.train_targets[3] = torch.nan


@pytest.mark.parametrize(
    "change",
    [
        changed_noise, changed_through_data, changed_mean, changed_setting, changed_kernel,
        changed_targets, changed_inputs, changed_data, missing_target,
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_predictions_follow_every_change_of_the_model(change, dtype):
    x, y = sample(30, dtype=dtype)
    model, points = GPRegression(x, y, "matern"), x[:4] + 0.1
    before = model.predict(points)
    assert torch.equal(model.predict(points).mean, before.mean)
    change(model)
    after, fresh = model.predict(points), copy.deepcopy(model).predict(points)
    assert torch.equal(after.mean, fresh.mean)
    assert torch.equal(after.covariance_matrix, fresh.covariance_matrix)
    assert not torch.allclose(after.mean, before.mean) or change is changed_noise
    assert not torch.allclose(after.covariance_matrix, before.covariance_matrix) or (
        change in (changed_mean, changed_targets)
    )


def test_predictions_follow_fixed_noise_and_the_type_of_the_model():
    x, y = sample(30)
    noise = torch.full_like(y, 0.1)
    model = GPRegression(x, y, likelihood=FixedNoiseGaussianLikelihood(noise))
    points = x[:4] + 0.1
    before = model.predict(points, False).mean
    model.likelihood.noise_covar.noise = 10 * noise
    after = model.predict(points, False).mean
    assert torch.equal(after, copy.deepcopy(model).predict(points, False).mean)
    assert not torch.allclose(after, before)
    model = GPRegression(x, y)
    double = model.predict(points).mean
    single = copy.deepcopy(model).float().predict(points.float()).mean
    assert single.dtype == torch.float32
    assert torch.equal(model.float().predict(points.float()).mean, single)
    assert torch.allclose(single.double(), double, atol=1e-4)


def test_many_models_in_turn_predict_what_each_predicts_alone(monkeypatch):
    monkeypatch.setattr(posterior, "_KEPT_BYTES", 2 * 30**2 * 8)  # factors of two of the three
    x, y = sample(30)
    models = [GPRegression(x, factor * y, "matern") for factor in (1.0, 2.0, 3.0)]
    for _ in range(2):
        for model in models:
            alone = copy.deepcopy(model).predict(x[:4]).mean
            assert torch.equal(model.predict(x[:4]).mean, alone)


@pytest.mark.parametrize("kernel", ["matern", "deep_joint"])
@pytest.mark.parametrize("batch", [(), (2,), (3, 2)])
def test_posteriors_of_batches_of_points_are_those_of_each(batch, kernel):
    x, y = sample(20)
    y[3] = torch.nan
    model = GPRegression(x, y, kernel)
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(*batch, 2, x.shape[-1], generator=generator, dtype=x.dtype)
    together = model.posterior(points).distribution
    marginal = model.predict(points, observation_noise=False, marginal=True)
    assert torch.allclose(marginal.variance, together.variance, atol=1e-10)
    for index in itertools.product(*map(range, batch)):
        alone = model.predict(points[index], observation_noise=False)
        assert torch.allclose(together.mean[index], alone.mean, atol=1e-10)
        actual = together.covariance_matrix[index]
        assert torch.allclose(actual, alone.covariance_matrix, atol=1e-10)


@pytest.mark.parametrize("batch", [(), (2,), (1,), (3, 2), (4, 3, 1)])
def test_batches_of_models_meet_points_of_any_batch(batch, monkeypatch):
    x, y = sample(20)
    x, y = torch.stack([x, x.flip(0) ** 2]), torch.stack([y, y.flip(0)])
    y[1, 3] = torch.nan
    model = GPRegression(x, y, "deep_joint")
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(*batch, 2, x.shape[-1], generator=generator, dtype=x.dtype)
    together = model.posterior(points).distribution
    assert together.mean.shape == (*torch.broadcast_shapes(batch, (2,)), 2)
    monkeypatch.setattr(posterior, "_CHUNK", 1)  # marginals in parts, as of many points
    marginal = model.predict(points, observation_noise=False, marginal=True)
    assert torch.allclose(marginal.variance, together.variance, atol=1e-10)
    points = points.expand(*together.mean.shape, x.shape[-1])
    for index in itertools.product(*map(range, points.shape[:-2])):
        alone = GPRegression(x[index[-1]], y[index[-1]], "deep_joint")
        with torch.no_grad():  # a network is that of all members
            for name, value in model.named_parameters():
                single = alone.get_parameter(name)
                single.copy_(value if value.shape == single.shape else value[index[-1]])
        alone = alone.predict(points[index], observation_noise=False)
        assert torch.allclose(together.mean[index], alone.mean, atol=1e-10)
        actual = together.covariance_matrix[index]
        assert torch.allclose(actual, alone.covariance_matrix, atol=1e-10)


def test_what_is_kept_in_inference_mode_is_used_outside_of_it():
    x, y = sample(20)
    model = GPRegression(x, y, "matern")
    with torch.inference_mode():
        mean = model.predict(x[:3] + 0.1).mean
    points = (x[:3] + 0.1).requires_grad_()
    actual = model.posterior(points).distribution.mean
    (gradient,) = torch.autograd.grad(actual.sum(), points)
    assert torch.allclose(actual, mean)
    assert bool((gradient != 0).any())


def test_hyperparameters_with_a_batch_of_their_own_meet_points_of_any_batch(monkeypatch):
    x, y = sample(20)
    kernel = ScaleKernel(RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2]))
    kernel.base_kernel.lengthscale = torch.tensor([0.3, 2.0]).reshape(2, 1, 1)
    model = GPRegression(x, y, kernel)
    points = (x[:6] + 0.1).reshape(3, 1, 2, 2)
    monkeypatch.setattr(posterior, "_CHUNK", 1)  # marginals in parts, as of many points
    marginal = model.predict(points, marginal=True)
    together = model.predict(points)
    assert together.mean.shape == (3, 2, 2)
    assert torch.allclose(marginal.variance, together.variance)
    for member, lengthscale in enumerate((0.3, 2.0)):
        single = GPRegression(x, y, ScaleKernel(RBFKernel()))
        single.covar_module.base_kernel.lengthscale = lengthscale
        for group in range(3):
            alone = single.predict(points[group, 0])
            assert torch.allclose(together.mean[group, member], alone.mean, atol=1e-9)
            actual = together.covariance_matrix[group, member]
            assert torch.allclose(actual, alone.covariance_matrix, atol=1e-9)
            marginals = single.predict(points, marginal=True)
            assert torch.allclose(marginals.variance[group, 0], alone.variance, atol=1e-9)


def test_posteriors_have_gradients_of_points_alone_unless_asked():
    x, y = sample(20)
    model = GPRegression(x, y, "matern")
    points = (x[:6] + 0.1).reshape(3, 2, -1).requires_grad_()

    def numbers(points):
        actual = model.posterior(points).distribution
        return actual.mean, actual.covariance_matrix

    model.posterior(points.detach())  # keeps a factor, which the gradients do not depend on
    assert torch.autograd.gradcheck(numbers, points)
    sum(value.sum() for value in numbers(points)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with gpytorch.settings.detach_test_caches(False):
        sum(value.sum() for value in numbers(points)).backward()
    actual = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(actual) >= 4
    model.zero_grad()
    predicted = model.predict(points, observation_noise=False, grad=True)
    (predicted.mean.sum() + predicted.covariance_matrix.sum()).backward()
    for name, gradient in actual.items():
        assert torch.allclose(model.get_parameter(name).grad, gradient, atol=1e-8)


@pytest.mark.parametrize("approximation", ["laplace", "ep"])
def test_latent_posteriors_follow_changes_and_batches_are_those_of_each(approximation):
    x, y = sample(20)
    model = GPClassification(x, y > 0).eval()
    points = (x[:6] + 0.1).reshape(3, 2, -1)
    before = model.predict(points[0]).mean
    assert torch.equal(model.predict(points[0]).mean, before)
    model.approximation = approximation
    actual = model(points)
    for index in range(3):
        alone = copy.deepcopy(model)(points[index])
        assert torch.allclose(actual.mean[index], alone.mean, atol=1e-9)
        assert torch.allclose(actual.covariance_matrix[index], alone.covariance_matrix, atol=1e-9)
    assert torch.equal(model.predict(points[0]).mean, before) == (approximation == "ep")
    moved = points.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: model(x).mean, moved)


def test_counts_follow_their_offset():
    x, y = sample(20)
    model = GPCounts(x, (5 + 3 * y).round().clamp_min(0))
    before = model.predict(x[:3]).mean
    model.train_offset = torch.linspace(0, 1, 20, dtype=x.dtype)
    after = model.predict(x[:3]).mean
    assert not torch.allclose(after, before)
    assert torch.equal(after, copy.deepcopy(model).predict(x[:3]).mean)
