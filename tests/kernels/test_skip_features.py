import pytest
import torch

from gpclml.errors import ArgumentError
from gpclml.kernels import SkipFeatures
from gpclml.kernels.networks import reset_network


def test_features_are_the_linear_map_beside_the_network():
    features = SkipFeatures([3, 5, 2]).double()
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    with torch.no_grad():
        features.log_scale.copy_(torch.tensor([0.0, 1.0, -1.0]))
        features.mixing.copy_(torch.arange(9.0).reshape(3, 3))
    matrix = torch.diag(features.log_scale.exp()) + features.mixing
    output = features(x)
    torch.testing.assert_close(output[:, :3], x @ matrix)
    torch.testing.assert_close(output[:, 3:], features.network(x))
    torch.testing.assert_close(features(x.expand(2, 4, 3)), output.expand(2, 4, 5))


def test_it_starts_small_and_is_reset_to_its_start():
    features = SkipFeatures([3, 5, 2], start=1e-3)
    x = torch.ones(1, 3)
    assert 0 < features(x).abs().max() < 2e-3
    start = features(x).detach().clone()
    with torch.no_grad():
        for parameter in features.parameters():
            parameter.add_(1.0)
    features.reset_parameters()
    assert torch.equal(features(x), start)
    reset_network(features, torch.Generator().manual_seed(5))
    assert torch.equal(features(x)[:, :3], start[:, :3])
    assert not torch.equal(features(x)[:, 3:], start[:, 3:])


def test_sizes_are_checked():
    with pytest.raises(ArgumentError, match="sizes"):
        SkipFeatures([3])
