"""Conditioning and fantasies of DeepKernelGP equal models of all the data, by brute force."""

from __future__ import annotations

import pytest
import torch
from botorch.acquisition import qKnowledgeGradient
from botorch.models.transforms import Normalize
from botorch.sampling import SobolQMCNormalSampler

from deep_kernel_cases import (
    BARE,
    KERNELS,
    SHAPES,
    data,
    make,
    members,
    noise_of,
    on_data,
    points,
)
from gpclml.models.botorch import DeepKernelGP

pytestmark = pytest.mark.filterwarnings(
    "ignore::botorch.exceptions.warnings.InputDataWarning",  # more data are not standardized
)
CASES = [("deep", False), ("deep_bottleneck", True)]


def check_same(found, expected, place=(), output=slice(None)):
    for name in ("mean", "variance"):
        part = getattr(found, name)[place][..., output]
        assert torch.allclose(part, getattr(expected, name).reshape_as(part), atol=1e-7)


@pytest.mark.parametrize(("kernel", "observed_noise"), CASES)
@pytest.mark.parametrize(("batch_shape", "m"), SHAPES)
def test_conditioning_is_a_model_of_all_data(batch_shape, m, kernel, observed_noise):
    model = make(batch_shape, m, kernel, observed_noise, **BARE)
    x, y = data(batch_shape, m)
    test = points(*batch_shape, 4, 2)
    model.posterior(test)
    new_x, new_y = points(*batch_shape, 3, 2, seed=2), points(*batch_shape, 3, m, seed=3)
    noise = {"noise": torch.full_like(new_y, 0.04)} if observed_noise else {}
    conditioned = model.condition_on_observations(new_x, new_y, **noise)
    every = torch.cat([noise_of(model), noise["noise"]], -2) if observed_noise else None
    fresh = on_data(model, torch.cat([x, new_x], -2), torch.cat([y, new_y], -2), every)
    check_same(conditioned.posterior(test), fresh.posterior(test))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m", [1, 2])
def test_conditioning_keeps_the_units(kernel, m):
    low, width = torch.tensor([-1.0, 0.0]).double(), torch.tensor([3.0, 4.0]).double()
    x, y = data((), m)
    model = make((), m, kernel)
    cube = Normalize(2, bounds=torch.stack([low, low + width]))
    scaled = DeepKernelGP(low + width * x, 3 * y + 2, kernel=kernel, input_transform=cube)
    with torch.no_grad():
        for own, given in zip(scaled.parameters(), model.parameters(), strict=True):
            own.copy_(given)
    test, new_x, new_y = points(4, 2), points(3, 2, seed=2), points(3, m, seed=3)
    scaled.posterior(low + width * test)
    conditioned = scaled.condition_on_observations(low + width * new_x, 3 * new_y + 2)
    found = conditioned.posterior(low + width * test)
    bare = on_data(model, torch.cat([x, new_x]), torch.cat([y, new_y]))
    expected = bare.posterior(test)
    assert torch.allclose(found.mean, 3 * expected.mean + 2)
    assert torch.allclose(found.variance, 9 * expected.variance)


@pytest.mark.parametrize(("kernel", "observed_noise"), CASES)
@pytest.mark.parametrize(("batch_shape", "m"), SHAPES)
def test_fantasies_are_exact_conditioning(batch_shape, m, kernel, observed_noise):
    model = make(batch_shape, m, kernel, observed_noise, **BARE)
    test, new_x = points(*batch_shape, 4, 2), points(*batch_shape, 2, 2, seed=4)
    fantasies = model.fantasize(new_x, SobolQMCNormalSampler(torch.Size([3]), seed=0))
    x, y = data(batch_shape, m)
    drawn = outcomes(fantasies)[..., -2:, :]
    assert drawn.shape == (3, *batch_shape, 2, m)
    assert float(drawn.std(0).min()) > 0
    found = fantasies.posterior(test)
    assert found.mean.shape == (3, *batch_shape, 4, m)
    known = noise_of(fantasies)
    for fantasy in range(3):
        every_y = torch.cat([y, drawn[fantasy]], -2)
        noise = None if known is None else known.expand(3, *every_y.shape)[fantasy]
        for place, output, alone in members(model, torch.cat([x, new_x], -2), every_y, noise):
            check_same(found, alone.posterior(test[place]), (fantasy, *place), output)


@pytest.mark.parametrize("m", [1, 2])
def test_fantasies_at_batches_of_points(m):
    model = make((), m, **BARE)
    x, test = points(5, 2, 2, seed=4), points(4, 2)
    fantasies = model.fantasize(x, SobolQMCNormalSampler(torch.Size([3]), seed=0))
    found = fantasies.posterior(test)
    assert found.mean.shape == (3, 5, 4, m)
    alone = model.condition_on_observations(x[1], outcomes(fantasies)[2, 1, -2:])
    check_same(found, alone.posterior(test), (2, 1))
    further = fantasies.condition_on_observations(points(1, 2), points(1, m))
    assert further.posterior(test).mean.shape == (3, 5, 4, m)


def test_gradients_through_fantasies():
    acquisition = qKnowledgeGradient(make(), num_fantasies=2)
    assert torch.autograd.gradcheck(acquisition, points(1, 3, 2).requires_grad_())


def outcomes(model):
    """All outcomes that a model holds, ``(*batch, n, m)``."""
    targets = model.train_targets.detach()
    return targets.mT if model.num_outputs > 1 else targets.unsqueeze(-1)
