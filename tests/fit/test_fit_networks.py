"""Networks that are trained as far as held-out data support it, and starts of ``"deep"``."""

import copy

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import LikelihoodList
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood
from gpytorch.models import IndependentModelList
from linear_operator.utils.errors import NotPSDError

from gpclml.conditioning import LastPoints, NearestNeighbors, RandomHoldout
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit import FitWarning, deep_kernel, fit_batch, fit_mll, fit_networks, warm_start
from gpclml.fit.deep_kernel import start_second_part
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression, find_networks


def rows(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, x.sum(-1).sin() + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)


def lml(model):
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    return mll(model.train()(*model.train_inputs), model.train_targets)


def objective(model, conditioning=None):
    return ConditionalMarginalLogLikelihood(
        model.likelihood, model, conditioning or RandomHoldout(0.2, seed=1)
    )


def equal(model, other):
    others = other.state_dict()
    return all(torch.equal(value, others[name]) for name, value in model.state_dict().items())


def test_warm_start_is_the_fit_of_the_ard_gp():
    x, y = rows()
    cold = GPRegression(x, y, kernel="deep", warm_start=False)
    warm = GPRegression(x, y, kernel="deep")
    assert equal(warm, cold)  # a constructor fits nothing
    result = warm_start(warm)
    ard = GPRegression(x, y, kernel="rbf")
    fit_mll(objective(ard, LastPoints(m=0)), progress=False)
    assert result.converged
    assert result.objective == pytest.approx(lml(ard).item(), abs=1e-9)
    assert torch.equal(warm.likelihood.noise, ard.likelihood.noise)
    inside = warm.covar_module.base_kernel.base_kernel.kernels[0]
    assert torch.equal(inside.lengthscale, ard.covar_module.base_kernel.lengthscale)
    # Beside it the second part has a ten thousandth of the variance.
    torch.testing.assert_close(lml(warm), lml(ard), rtol=0, atol=1e-2)
    torch.testing.assert_close(warm.predict(x[:5]).mean, ard.predict(x[:5]).mean, rtol=0, atol=0.05)
    assert warm.training
    assert all(parameter.requires_grad for parameter in warm.parameters())
    assert all(parameter.grad is None for parameter in warm.parameters())
    networks = find_networks(warm)[0], find_networks(cold)[0]
    assert all(map(torch.equal, *(network.parameters() for network in networks)))
    assert 0 < networks[0](x).abs().max() < 1e-2
    for kernel in ("rbf", "deep_bottleneck"):
        with pytest.raises(UnsupportedError, match="another kernel"):
            warm_start(GPRegression(x, y, kernel=kernel))


def test_of_many_points_the_warm_start_is_a_fit_given_neighbours():
    x, y = rows(5001)
    ard = GPRegression(x, y, kernel="rbf")
    fit_mll(objective(ard, NearestNeighbors()), progress=False)
    mll = regression(x, y, RandomHoldout(64 / 5001, condition_on=64), hidden=(8,), num_features=2)
    fit_mll(mll, "adam", steps=1, lr=1e-9, progress=False)
    inside = mll.model.covar_module.base_kernel.base_kernel.kernels[0]
    for fitted, start in (
        (inside.lengthscale, ard.covar_module.base_kernel.lengthscale),
        (mll.likelihood.noise, ard.likelihood.noise),
    ):
        torch.testing.assert_close(fitted, start, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "fit", [fit_mll, lambda mll, *args, **options: fit_batch([mll], **options)]
)
def test_fits_begin_with_the_warm_start(fit):
    x, y = rows()
    warm, cold = GPRegression(x, y, kernel="deep"), GPRegression(x, y, kernel="deep")
    warm_start(warm)
    for warms, expected in ((True, warm), (False, cold)):
        model = GPRegression(x, y, kernel="deep", warm_start=warms)
        fit(objective(model), "adam", steps=2, lr=1e-9, progress=False)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=1e-7)


@pytest.mark.slow
def test_fits_of_networks_and_of_sums_begin_with_the_warm_start():
    x, y = rows()
    model, warm = GPRegression(x, y, kernel="deep"), GPRegression(x, y, kernel="deep")
    warm_start(warm)
    results = [fit_networks(objective(m), steps=4, progress=False) for m in (model, warm)]
    assert equal(model, warm)
    assert results[0].gains == results[1].gains
    members = [GPRegression(x, y, kernel=kernel) for kernel in ("deep", "rbf")]
    likelihoods = LikelihoodList(*[member.likelihood for member in members])
    total = SumMarginalLogLikelihood(likelihoods, IndependentModelList(*members))
    fit_mll(total, "adam", steps=1, lr=1e-9, progress=False)
    again = GPRegression(x, y, kernel="deep")
    warm_start(again)
    torch.testing.assert_close(members[0].likelihood.noise, again.likelihood.noise)


def test_only_models_that_are_as_made_are_started(tmp_path):
    x, y = rows()
    model = GPRegression(x, y, kernel="deep")
    warm, path = copy.deepcopy(model), tmp_path / "a.pt"
    warm_start(warm)
    model.save(path)
    for fresh in (copy.deepcopy(model), GPRegression.load(path)):
        fit_mll(objective(fresh), "adam", steps=1, lr=1e-9, progress=False)
        torch.testing.assert_close(fresh.likelihood.noise, warm.likelihood.noise)
    GPRegression(x, y, kernel="deep", warm_start=False).save(path)
    stays = [GPRegression.load(path)]
    with torch.no_grad():  # a step of the user's own
        model.covar_module.base_kernel.base_kernel.kernels[0].raw_lengthscale.add_(0.1)
    model.save(path)
    other = GPRegression(x, y, kernel="deep")
    other.load_state_dict(model.state_dict())
    for trained in (*stays, model, GPRegression.load(path), other, copy.deepcopy(model)):
        before = copy.deepcopy(trained.state_dict())
        fit_mll(objective(trained), "adam", steps=1, lr=1e-9, progress=False)
        torch.testing.assert_close(trained.state_dict(), before, rtol=0, atol=1e-7)


def test_a_warm_start_that_fails_keeps_the_start_and_says_so(monkeypatch):
    def fails(*_):
        raise NotPSDError("no factor")

    model = GPRegression(*rows(), kernel="deep")
    before = copy.deepcopy(model)
    monkeypatch.setattr(deep_kernel, "search", fails)
    with pytest.warns(FitWarning, match=r"warm start failed and its start is kept \(no factor\)"):
        result = warm_start(model)
    assert result.problem == "stopped"
    assert equal(model, before)


# ------------------------------------------------------------------ training


def regression(x, y, conditioning=None, **options):
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


@pytest.mark.slow
def test_the_deep_kernel_is_trained_where_held_out_data_support_it():
    x, y = grouped_data()
    new_x, new_y = grouped_data(seed=1)
    mll = regression(x, y)
    start = densities(mll, new_x, new_y).mean()
    result = fit_networks(mll, steps=12, progress=False)
    assert result.chosen > 0
    assert result.message == ""
    assert result.gains[result.chosen] > result.standard_errors[result.chosen]
    assert densities(mll, new_x, new_y).mean() > start + 0.2
    assert all(parameter.requires_grad for parameter in mll.parameters())
    assert not mll.training
    assert torch.equal(mll.model.train_inputs[0], x)
    assert mll.model.train_targets.shape == y.shape


@pytest.mark.slow
def test_other_models_train_their_networks_and_hyperparameters_together():
    x, y = step_data()
    new_x, new_y = step_data(seed=1)
    mll = regression(x, y, hidden=[20], kernel="deep_bottleneck")
    noise = mll.model.likelihood.noise.item()  # at its start, 14 times the noise of the data
    start = densities(mll, new_x, new_y).mean()
    result = fit_networks(mll, steps=200, progress=False)
    assert result.chosen > 0
    assert mll.model.likelihood.noise.item() < noise / 2
    assert densities(mll, new_x, new_y).mean() > start + 0.5


@pytest.mark.slow
def test_it_is_the_ard_gp_where_they_do_not():
    x, y = noise_data()
    mll = regression(x, y)
    result = fit_networks(mll, steps=40, progress=False)
    assert result.chosen == 0
    assert result.steps[:2] == [0, 0]
    assert result.gains[0] == result.standard_errors[0] == 0
    plain = regression(x, y, LastPoints(0), kernel="rbf")
    fit_mll(plain, progress=False)
    new_x, new_y = noise_data(seed=1)
    expected = densities(plain, new_x, new_y)
    torch.testing.assert_close(densities(mll, new_x, new_y), expected, rtol=0, atol=1e-9)
    # Not another fit that ends nearly there: the same numbers.
    scales = [each.model.covar_module.raw_outputscale for each in (mll, plain)]
    assert torch.equal(*scales)
    assert torch.equal(mll.likelihood.noise, plain.likelihood.noise)


def test_another_model_stays_as_it_was_where_they_do_not():
    mll = regression(*noise_data(), kernel="rbf", mean="mlp", hidden=[5])
    mll.model.covar_module.requires_grad_(False)
    mll.model.likelihood.requires_grad_(False)  # more noise would be a gain
    before = copy.deepcopy(mll)
    assert fit_networks(mll, steps=8, lr=1e-9, progress=False).chosen == 0
    assert equal(mll, before)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_result():
    def fitted(seed):
        mll = regression(*step_data(n=40), kernel="rbf", mean="mlp", hidden=[5])
        return fit_networks(mll, steps=8, seed=seed, progress=False)

    results = [fitted(2), fitted(2)]
    assert results[0].gains == results[1].gains
    assert fitted(3).gains != results[0].gains


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
def test_few_steps_missing_targets_and_float32():
    x, y = grouped_data(n=60)
    y[[3, 17]] = float("nan")
    mll = regression(x.float(), y.float())
    with gpytorch.settings.observation_nan_policy("mask"):
        result = fit_networks(mll, steps=2, progress=False)
    assert result.steps == [0, 0, 1, 2][: len(result.gains)]
    assert all(torch.tensor(result.gains).isfinite())
    assert all(p.dtype == torch.float32 for p in mll.parameters())


@pytest.mark.slow
def test_warm_starts_in_a_batch_and_of_near_duplicates():
    """Without gradients; between duplicates there is no noise at all, which is not believed."""
    x, y = rows()
    members = x.reshape(2, 20, 2), y.reshape(2, 20)
    warm, cold = (GPRegression(*members, kernel="deep") for _ in range(2))
    with torch.no_grad():
        warm_start(warm)
    assert (lml(warm) > lml(cold)).all()
    model = GPRegression(torch.cat([x, x]), torch.cat([y, y]), kernel="deep")
    model.likelihood.noise = torch.tensor([0.05])
    start_second_part(model, torch.arange(80))
    assert model.likelihood.noise.min() >= 0.0149


@pytest.mark.slow
def test_values_that_cannot_be_scored_are_not_chosen():
    mll = regression(*grouped_data(n=60))
    state = {name: value.clone() for name, value in mll.state_dict().items()}
    result = fit_networks(mll, steps=60, lr=1e6, progress=False)
    assert result.chosen < 2
    if result.chosen == 0:
        assert all(torch.equal(value, state[name]) for name, value in mll.state_dict().items())


def test_bad_arguments():
    x, y = step_data(n=20)
    cold = regression(x, y, warm_start=False)
    batch = regression(x.expand(2, 20, 1), y.expand(2, 20), warm_start=False)
    for mll, options, error, match in (
        (regression(x, y, kernel="rbf"), {}, UnsupportedError, "network"),
        (batch, {}, UnsupportedError, "batch"),
        (regression(x, y, NearestNeighbors()), {}, UnsupportedError, "NearestNeighbors"),
        (cold, {"steps": 0}, ArgumentError, "steps"),
        (cold, {"lr": 0.0}, ArgumentError, "lr"),
    ):
        with pytest.raises(error, match=match):
            fit_networks(mll, progress=False, **options)
