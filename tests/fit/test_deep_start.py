import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood

from gpclml.fit._deep_start import has_second_part, start_second_part
from gpclml.models import GPRegression


def rows(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, x.sum(-1).sin() + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kernel", ["rbf", "deep-bottleneck"])
def test_only_the_kernel_deep_has_a_second_part(kernel):
    assert not has_second_part(GPRegression(*rows(), kernel=kernel))
    assert has_second_part(GPRegression(*rows(), kernel="deep", warm_start=False))


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
