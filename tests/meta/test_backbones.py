from __future__ import annotations

import pytest
import torch

from gpclml.errors import ArgumentError, ShapeError
from gpclml.meta import Conv3, Conv4, ConvBlocks


@pytest.mark.parametrize(
    ("make", "shape", "features"), [(Conv4, (1, 28, 28), 64), (Conv3, (3, 100, 100), 2916)]
)
def test_features_and_their_start(make, shape, features):
    state = torch.get_rng_state()
    network = make()
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    assert network(x).shape == (2, features)
    same, other = make(), make(generator=torch.Generator().manual_seed(1))
    pairs = zip(network.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(next(iter(network.parameters())), next(iter(other.parameters())))


def test_the_order_of_operations_is_the_papers():
    network = Conv4(width=8).double()
    x = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    weights = dict(network.named_parameters())
    values = x
    for block in network.blocks:
        values = block[1](block[0](values.contiguous()))
        values = torch.nn.functional.max_pool2d(values.relu(), 2)
    expected = torch.autograd.grad(values.square().sum(), list(weights.values()))
    output = network(x)
    assert torch.allclose(output, values.flatten(1), atol=1e-12)
    gradients = torch.autograd.grad(output.square().sum(), list(weights.values()))
    for one, two in zip(gradients, expected, strict=True):
        assert torch.allclose(one, two, atol=1e-9)


@pytest.mark.parametrize(
    ("network", "shape", "side"),
    [
        (Conv4(), (2, 1, 15, 28), 16),
        (Conv4(), (2, 3, 28, 28), 16),
        (Conv4(), (2, 28, 28), 16),
        (Conv3(), (2, 3, 28, 28), 29),
        (ConvBlocks(1), (2, 1, 1, 1), 2),
    ],
)
def test_images_that_do_not_fit(network, shape, side):
    with pytest.raises(ShapeError, match=f"images: got shape .* sides of {side} pixels or more"):
        network(torch.zeros(shape))


@pytest.mark.parametrize("make", [Conv3, Conv4])
def test_bad_arguments(make):
    with pytest.raises(ArgumentError, match="channels"):
        make(channels=0)
    with pytest.raises(ArgumentError, match="width"):
        make(width=0)
