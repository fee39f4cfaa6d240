import warnings

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.means import LinearMean
from gpytorch.utils.warnings import GPInputWarning

from gpclml.errors import ArgumentError
from gpclml.inference import IterativePosterior
from gpclml.kernels import DeepKernel
from gpclml.kernels.networks import MLP
from gpclml.models import GPRegression, find_networks
from regression_cases import KERNELS, lml, steps


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_trains_in_a_plain_loop_and_predicts(kernel, train, new_x):
    model = GPRegression(*train, kernel=kernel, warm_start=False)
    before = lml(model).item()
    steps(model)
    assert lml(model).item() > before
    prediction = model.predict(new_x)
    assert model.training
    assert prediction.mean.shape == (10,)
    assert prediction.variance.min() > 0
    assert 50 < prediction.mean.mean() < 300  # original units


@pytest.mark.parametrize("kernel", ["rbf", "deep_bottleneck"])
def test_prediction_is_gpytorchs(kernel, train, new_x):
    model = GPRegression(*train, kernel=kernel)
    steps(model)
    ours, latent = model.predict(new_x), model.predict(new_x, observation_noise=False)
    marginal = model.predict(new_x, marginal=True)
    model.eval()
    reference = model.likelihood(model(new_x))
    scale = model.target_scale
    mean = reference.mean * scale + train[1].mean()
    torch.testing.assert_close(ours.mean, mean)
    torch.testing.assert_close(ours.covariance_matrix, reference.covariance_matrix * scale**2)
    noise = model.likelihood.noise * scale**2
    torch.testing.assert_close(latent.variance + noise, ours.variance)
    torch.testing.assert_close(marginal.mean, ours.mean)
    torch.testing.assert_close(marginal.variance, ours.variance)
    assert marginal.covariance_matrix.count_nonzero() == 10


def test_prediction_at_the_training_points_does_not_warn(train):
    model = GPRegression(*train)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GPInputWarning)
        model.predict(train[0])


def test_prediction_keeps_the_mode_of_every_module(train, new_x):
    network = torch.nn.Sequential(MLP([10, 4]), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4))
    model = GPRegression(*train, kernel=ScaleKernel(DeepKernel(network, RBFKernel(), False)))
    network[2].eval()
    modes = [module.training for module in model.modules()]
    first, second = model.predict(new_x), model.predict(new_x)
    assert torch.equal(first.mean, second.mean)  # no dropout
    assert [module.training for module in model.modules()] == modes
    model.eval()
    model.predict(new_x)
    assert not any(module.training for module in model.modules())


def test_batch_is_the_stack_of_singles(diabetes):
    x, y = diabetes[0][:60].reshape(3, 20, 10), diabetes[1][:60].reshape(3, 20)
    new = diabetes[0][60:68]
    for kernel in ["rbf", "deep_bottleneck", "spectral_mixture"]:
        model = GPRegression(x, y, kernel=kernel, mean="mlp" if kernel == "rbf" else "constant")
        assert model.target_scale.shape == (3,)
        value, prediction = lml(model), model.predict(new)
        marginal = model.predict(new, marginal=True)
        assert prediction.mean.shape == (3, 8)
        for i in range(3):
            single = GPRegression(x[i], y[i], kernel=kernel, mean=model._config["mean"])
            state = {
                k: v[i] if v.shape != single.state_dict()[k].shape else v
                for k, v in model.state_dict().items()
            }
            single.load_state_dict(state)
            torch.testing.assert_close(value[i], lml(single))
            alone = single.predict(new)
            torch.testing.assert_close(prediction.mean[i], alone.mean)
            torch.testing.assert_close(prediction.covariance_matrix[i], alone.covariance_matrix)
            torch.testing.assert_close(marginal.variance[i], alone.variance)


@pytest.mark.parametrize("kernel", KERNELS)
def test_constant_columns_duplicates_and_float32(kernel, train, new_x):
    x, y = train[0].float(), train[1].float()
    x[:, 3], x[:, 7] = 288.15, 0.0
    x[10:15] = x[0]
    new = new_x.float()
    new[:, 3], new[:, 7] = 288.15, 0.0
    model = GPRegression(x, y, kernel=kernel)
    steps(model)
    prediction = model.predict(new)
    assert prediction.mean.dtype == torch.float32
    assert prediction.mean.isfinite().all()
    assert prediction.variance.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_and_two_points(kernel, train, new_x):
    for n in (1, 2):
        model = GPRegression(train[0][:n], train[1][:n], kernel=kernel)
        assert model.predict(new_x).mean.isfinite().all()


def test_the_seed_decides_and_the_global_rng_is_untouched(train):
    before = torch.get_rng_state()
    values = [
        lml(GPRegression(*train, kernel="deep_bottleneck", seed=seed)).item() for seed in (0, 0, 1)
    ]
    GPRegression(*train, kernel="spectral_mixture")
    assert torch.equal(before, torch.get_rng_state())
    assert values[0] == values[1] != values[2]


def test_given_parts_are_used_in_the_data_dtype(train, new_x):
    kernel, mean = ScaleKernel(RBFKernel()), LinearMean(10)
    likelihood = FixedNoiseGaussianLikelihood(torch.full((60,), 0.2))
    model = GPRegression(*train, kernel=kernel, mean=mean, likelihood=likelihood)
    assert model.covar_module is kernel
    assert model.mean_module is mean
    assert kernel.raw_outputscale.dtype == torch.float64
    steps(model)
    latent = model.predict(new_x, observation_noise=False)
    model.eval()
    torch.testing.assert_close(latent.variance, model(new_x).variance * model.target_scale**2)


@pytest.mark.parametrize("additional", [False, True])
@pytest.mark.parametrize("count", [1, 60])
def test_new_points_have_no_fixed_noise_of_training_points(count, additional, train):
    likelihood = FixedNoiseGaussianLikelihood(
        torch.linspace(0.1, 1, 60, dtype=torch.float64), learn_additional_noise=additional
    )
    model = GPRegression(*train, likelihood=likelihood)
    x = train[0][:1].expand(count, -1)
    with pytest.raises(ArgumentError, match=r"observation_noise.*noise variances of the new"):
        model.predict(x)
    with pytest.raises(ArgumentError, match="observation_noise"):
        IterativePosterior(model).variance(x)
    latent, unit = model.predict(x, observation_noise=False).variance, model.target_scale**2
    given = torch.linspace(1, 2, count, dtype=torch.float64)
    added = given + likelihood.second_noise
    torch.testing.assert_close(model.predict(x, given).variance, latent + added * unit)
    torch.testing.assert_close(IterativePosterior(model).variance(x, given), latent + added * unit)
    torch.testing.assert_close(
        model.posterior(x, observation_noise=given.unsqueeze(-1)).variance.squeeze(-1),
        latent + added * unit,
    )
    mean = 0.55 + likelihood.second_noise  # BoTorch's models take the mean over training points
    noisy = model.posterior(x, observation_noise=True).variance.squeeze(-1)
    torch.testing.assert_close(noisy, latent + mean * unit)


@pytest.mark.parametrize("ard", [True, False])
@pytest.mark.parametrize("kernel", ["rbf", "rq", "matern"])
def test_lengthscales_start_at_the_root_of_the_number_of_columns(kernel, ard, train):
    x, y = train
    for d in (1, 4, 10):
        base = GPRegression(x[:, :d], y, kernel=kernel, ard=ard).covar_module.base_kernel
        expected = torch.full((1, d if ard else 1), d**0.5, dtype=torch.float64)
        torch.testing.assert_close(base.lengthscale.detach(), expected, rtol=1e-6, atol=0)
    plain = GPRegression(x, y, kernel=kernel, ard=ard, standardize=False)
    start = plain.covar_module.base_kernel.lengthscale.detach()
    torch.testing.assert_close(start, torch.full_like(start, 2.0).log())  # GPyTorch's


def test_ard_is_a_choice(train):
    model = GPRegression(*train, kernel="deep-bottleneck", mean="mlp", ard=False)
    assert model.covar_module.base_kernel.base_kernel.lengthscale.shape == (1, 1)
    networks = model.covar_module.base_kernel.feature_extractor, model.mean_module.network
    assert {*find_networks(model)} == {*networks}
    deep = GPRegression(*train, kernel="deep", num_features=3, hidden=[7], warm_start=False)
    assert find_networks(deep)[0].sizes == (10, 7, 3)
    assert deep.covar_module.base_kernel.base_kernel.kernels[0].lengthscale.shape == (1, 10)
