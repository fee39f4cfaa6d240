"""The starts of the kernel ``"deep"``: what the warm start is, and which fits begin with it."""

import copy

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood, LikelihoodList
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood
from gpytorch.models import IndependentModelList
from linear_operator.utils.errors import NotPSDError

from gpclml.conditioning import LastPoints, RandomHoldout
from gpclml.errors import UnsupportedError
from gpclml.fit import FitWarning, deep_kernel, fit_batch, fit_mll, fit_networks, warm_start
from gpclml.fit.deep_kernel import has_second_part, start_second_part
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression, find_networks


def rows(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, x.sum(-1).sin() + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kernel", ["rbf", "deep_bottleneck"])
def test_only_the_kernel_deep_has_a_second_part(kernel):
    assert not has_second_part(GPRegression(*rows(), kernel=kernel))
    assert has_second_part(GPRegression(*rows(), kernel="deep", warm_start=False))


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
    for a, b in zip(find_networks(warm)[0].parameters(), find_networks(cold)[0].parameters(),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)
    assert 0 < find_networks(warm)[0](x).abs().max() < 1e-2


def test_the_deep_kernel_learns_after_the_warm_start():
    x, y = rows()
    model = GPRegression(x, y, kernel="deep")
    warm_start(model)
    before, spread = lml(model).item(), find_networks(model)[0](x).std().item()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        (-lml(model)).backward()
        optimizer.step()
    assert find_networks(model)[0](x).std().item() > 1.05 * spread
    assert lml(model).item() > before


def test_warm_start_without_gradients_and_in_a_batch():
    x, y = rows()
    x, y = x.reshape(2, 20, 2), y.reshape(2, 20)
    warm, cold = GPRegression(x, y, kernel="deep"), GPRegression(x, y, kernel="deep")
    with torch.no_grad():
        warm_start(warm)
    assert (lml(warm) > lml(cold)).all()


FITS = {
    "mll": lambda mll: fit_mll(mll, "adam", steps=2, lr=1e-9, progress=False),
    "batch": lambda mll: fit_batch([mll], "adam", steps=2, lr=1e-9, progress=False),
}


@pytest.mark.parametrize("fit", FITS)
def test_fits_begin_with_the_warm_start(fit):
    x, y = rows()
    model, warm = GPRegression(x, y, kernel="deep"), GPRegression(x, y, kernel="deep")
    warm_start(warm)
    FITS[fit](objective(model))
    state = warm.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=1e-7)
    cold = GPRegression(x, y, kernel="deep", warm_start=False)
    start = copy.deepcopy(cold.state_dict())
    FITS[fit](objective(cold))
    for name, value in cold.state_dict().items():
        torch.testing.assert_close(value, start[name], rtol=0, atol=1e-7)


def test_fits_of_networks_and_of_sums_begin_with_the_warm_start():
    x, y = rows()
    model, warm = GPRegression(x, y, kernel="deep"), GPRegression(x, y, kernel="deep")
    warm_start(warm)
    results = [fit_networks(objective(one), steps=4, progress=False) for one in (model, warm)]
    assert equal(model, warm)
    assert results[0].gains == results[1].gains
    members = [GPRegression(x, y, kernel=kernel) for kernel in ("deep", "rbf")]
    likelihoods = LikelihoodList(*[member.likelihood for member in members])
    total = SumMarginalLogLikelihood(likelihoods, IndependentModelList(*members))
    fit_mll(total, "adam", steps=1, lr=1e-9, progress=False)
    again = GPRegression(x, y, kernel="deep")
    warm_start(again)
    torch.testing.assert_close(members[0].likelihood.noise, again.likelihood.noise)


def test_what_was_trained_or_loaded_is_not_started_again(tmp_path):
    x, y = rows()
    model = GPRegression(x, y, kernel="deep")
    with torch.no_grad():  # a step of the user's own
        model.covar_module.base_kernel.base_kernel.kernels[0].raw_lengthscale.add_(0.1)
    model.save(tmp_path / "a.pt")
    loaded = GPRegression.load(tmp_path / "a.pt")
    other = GPRegression(x, y, kernel="deep")
    other.load_state_dict(model.state_dict())
    for one in (model, loaded, other, copy.deepcopy(model)):
        before = copy.deepcopy(one.state_dict())
        fit_mll(objective(one), "adam", steps=1, lr=1e-9, progress=False)
        for name, value in one.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=1e-7)


def test_copies_and_stored_models_that_are_as_made_are_started(tmp_path):
    x, y = rows()
    model = GPRegression(x, y, kernel="deep")
    warm = copy.deepcopy(model)
    warm_start(warm)
    model.save(tmp_path / "a.pt")
    GPRegression(x, y, kernel="deep", warm_start=False).save(tmp_path / "cold.pt")
    for one in (copy.deepcopy(model), GPRegression.load(tmp_path / "a.pt")):
        fit_mll(objective(one), "adam", steps=1, lr=1e-9, progress=False)
        torch.testing.assert_close(one.likelihood.noise, warm.likelihood.noise)
    cold = GPRegression.load(tmp_path / "cold.pt")
    fit_mll(objective(cold), "adam", steps=1, lr=1e-9, progress=False)
    assert not torch.allclose(cold.likelihood.noise, warm.likelihood.noise)


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


def test_only_the_kernel_deep_has_a_warm_start():
    with pytest.raises(UnsupportedError, match="another kernel"):
        warm_start(GPRegression(*rows()))


def test_near_duplicates_do_not_take_the_noise_away():
    x, y = rows()
    x, y = torch.cat([x, x]), torch.cat([y, y])  # no noise at all between duplicates
    model = GPRegression(x, y, kernel="deep")
    likelihood = model.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    likelihood.noise = torch.tensor([0.05])
    start_second_part(model, torch.arange(80))
    assert likelihood.noise.min() >= 0.0149


def test_network_and_mixing_stay_and_the_data_are_kept():
    x, y = rows()
    model = GPRegression(x, y, kernel="deep")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    start_second_part(model, torch.arange(30))
    for name, parameter in model.named_parameters():
        still = ".network." in name or name.endswith("mixing")
        assert torch.equal(parameter, before[name]) == still, name
    targets = model.train_targets
    assert isinstance(targets, torch.Tensor)
    assert targets.shape == y.shape
