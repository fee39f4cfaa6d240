from __future__ import annotations

import gpytorch
import pytest
import torch

from gpclml.conditioning import LastPoints
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit import fit_mll, fit_networks
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression


def objective(x, y, conditioning=None, **options):
    model = GPRegression(x, y, **{"kernel": "deep", **options})
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)


def step_data(n=80, seed=0):
    """A jump that a stationary kernel cannot follow and a network can."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 2
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sign(x[:, 0]) + 0.05 * noise


def noise_data(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, generator=generator, dtype=torch.float64)


def grouped_data(n=120, seed=0):
    """A wave in one input plus an offset for each value of another: a sum of two kernels."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    group = torch.randint(20, (n, 1), generator=generator)
    offsets = torch.randn(20, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, 0]) + offsets[group[:, 0]] + 0.1 * noise
    return torch.cat([x, group.double()], dim=-1), y


def densities(mll, x, y):
    with torch.no_grad():
        p = mll.model.predict(x, marginal=True)
    return torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(y)


def test_the_deep_kernel_is_trained_where_held_out_data_support_it():
    x, y = grouped_data()
    new_x, new_y = grouped_data(seed=1)
    mll = objective(x, y)
    start = densities(mll, new_x, new_y).mean()
    result = fit_networks(mll, steps=12, progress=False)
    assert result.chosen > 0
    assert result.message == ""
    assert result.gains[result.chosen] > result.standard_errors[result.chosen]
    assert result.error_gains[result.chosen] >= 0
    assert densities(mll, new_x, new_y).mean() > start + 0.2
    assert all(parameter.requires_grad for parameter in mll.parameters())
    assert not mll.training
    inputs, targets = mll.model.train_inputs, mll.model.train_targets
    assert isinstance(inputs, tuple)
    assert isinstance(targets, torch.Tensor)
    assert torch.equal(inputs[0], x)
    assert targets.shape == y.shape


@pytest.mark.parametrize("parts", [{"kernel": "rbf", "mean": "mlp"}, {"kernel": "deep_bottleneck"}])
def test_other_models_train_their_networks_and_hyperparameters_together(parts):
    x, y = step_data()
    new_x, new_y = step_data(seed=1)
    mll = objective(x, y, hidden=[20], **parts)
    noise = mll.model.likelihood.noise.item()  # at its start, 14 times the noise of the data
    start = densities(mll, new_x, new_y).mean()
    result = fit_networks(mll, steps=200, progress=False)
    assert result.chosen > 0
    assert mll.model.likelihood.noise.item() < noise / 2
    assert densities(mll, new_x, new_y).mean() > start + 0.5


@pytest.mark.parametrize("conditioning", [None, LastPoints(0)], ids=["clml", "lml"])
def test_it_is_the_ard_gp_where_they_do_not(conditioning):
    x, y = noise_data()
    mll = objective(x, y, conditioning)
    result = fit_networks(mll, steps=40, progress=False)
    assert result.chosen == 0
    assert result.steps[:2] == [0, 0]
    assert result.gains[0] == result.standard_errors[0] == result.error_gains[0] == 0
    assert result.num_held_out[0] == 60
    plain = objective(x, y, LastPoints(0), kernel="rbf")
    fit_mll(plain, progress=False)
    new_x, new_y = noise_data(seed=1)
    expected = densities(plain, new_x, new_y)
    torch.testing.assert_close(densities(mll, new_x, new_y), expected, rtol=0, atol=1e-9)
    # Not another fit that ends nearly there: the same numbers.
    deep, ard = mll.model.covar_module, plain.model.covar_module
    assert torch.equal(deep.raw_outputscale, ard.raw_outputscale)
    assert torch.equal(
        deep.base_kernel.base_kernel.kernels[0].raw_lengthscale, ard.base_kernel.raw_lengthscale
    )
    assert torch.equal(mll.likelihood.noise, plain.likelihood.noise)
    assert torch.equal(mll.model.mean_module.constant, plain.model.mean_module.constant)


def test_another_model_stays_as_it_was_where_they_do_not():
    mll = objective(*noise_data(), kernel="rbf", mean="mlp", hidden=[5])
    mll.model.covar_module.requires_grad_(False)
    mll.model.likelihood.requires_grad_(False)  # more noise would be a gain
    state = {name: value.clone() for name, value in mll.state_dict().items()}
    assert fit_networks(mll, steps=8, lr=1e-9, progress=False).chosen == 0
    for name, value in mll.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow, id="deep kernel"),
        pytest.param({"kernel": "rbf", "mean": "mlp", "hidden": [5]}, id="mean"),
    ],
)
def test_the_same_seed_gives_the_same_result(options):
    def fitted(seed):
        mll = objective(*step_data(n=40), **options)
        return fit_networks(mll, steps=8, seed=seed, progress=False)

    results = [fitted(2), fitted(2)]
    assert results[0].gains == results[1].gains
    assert fitted(3).gains != results[0].gains


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
def test_few_steps_and_float32():
    x, y = grouped_data(n=60)
    mll = objective(x.float(), y.float())
    result = fit_networks(mll, steps=2, progress=False)
    assert result.steps == [0, 0, 1, 2][: len(result.gains)]
    assert all(p.dtype == torch.float32 for p in mll.parameters())


def test_values_that_cannot_be_scored_are_not_chosen():
    mll = objective(*grouped_data(n=60))
    state = {name: value.clone() for name, value in mll.state_dict().items()}
    result = fit_networks(mll, steps=60, lr=1e6, progress=False)
    assert result.chosen < 2
    if result.chosen == 0:
        assert all(torch.equal(value, state[name]) for name, value in mll.state_dict().items())


def test_missing_targets_are_neither_trained_on_nor_scored():
    x, y = step_data(n=40)
    y[[3, 17]] = float("nan")
    with gpytorch.settings.observation_nan_policy("mask"):
        result = fit_networks(objective(x, y), steps=20, progress=False)
    assert all(torch.tensor(result.gains).isfinite())


def test_bad_arguments():
    x, y = step_data(n=20)
    with pytest.raises(UnsupportedError, match="network"):
        fit_networks(objective(x, y, kernel="rbf"))
    batch = objective(x.expand(2, 20, 1), y.expand(2, 20), warm_start=False)
    with pytest.raises(UnsupportedError, match="batch"):
        fit_networks(batch)
    with pytest.raises(ArgumentError, match="steps"):
        fit_networks(objective(x, y, warm_start=False), steps=0)
    with pytest.raises(ArgumentError, match="lr"):
        fit_networks(objective(x, y, warm_start=False), lr=0.0)
    with pytest.raises(ArgumentError, match="n_splits"):
        fit_networks(objective(x, y, warm_start=False), n_splits=1)
