from __future__ import annotations

import torch
from torch.distributions import Normal

from gpclml.meta import class_probabilities


def test_two_classes_are_the_probit_of_the_difference():
    mean = torch.tensor([[0.3, -2.0], [-0.4, 1.0]], dtype=torch.float64)  # (ways, q)
    scale = torch.tensor([[0.5, 1.0], [0.8, 0.2]], dtype=torch.float64)
    p = class_probabilities(Normal(mean, scale))
    difference = (mean[0] - mean[1]) / scale.square().sum(0).sqrt()
    expected = Normal(0.0, 1.0).cdf(difference)
    torch.testing.assert_close(p, torch.stack([expected, 1 - expected], -1), rtol=1e-4, atol=1e-4)


def test_many_classes_are_as_by_sampling():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    scale = 0.3 + torch.rand(2, 5, 3, generator=generator, dtype=torch.float64)
    p = class_probabilities(Normal(mean, scale))
    assert p.shape == (2, 3, 5)
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    draws = 40_000
    noise = torch.randn(draws, 2, 5, 3, generator=generator, dtype=torch.float64)
    winners = (mean + scale * noise).argmax(-2)
    shares = torch.nn.functional.one_hot(winners, 5).double().mean(0)
    assert float((p - shares).abs().max()) < 5 * 0.5 / draws**0.5


def test_sure_classes_and_equal_ones():
    mean = torch.tensor([30.0, -30.0, -30.0]).unsqueeze(-1)
    p = class_probabilities(Normal(mean, torch.ones(3, 1)))
    torch.testing.assert_close(p, torch.tensor([[1.0, 0.0, 0.0]]))
    equal = class_probabilities(Normal(torch.zeros(4, 1), torch.ones(4, 1)))
    torch.testing.assert_close(equal, torch.full((1, 4), 0.25))
