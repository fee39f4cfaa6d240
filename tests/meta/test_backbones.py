from __future__ import annotations

import pytest
import torch

from gpclml.errors import ArgumentError, ShapeError
from gpclml.meta import Conv3, Conv4, ConvBlocks, ResNet10


@pytest.mark.parametrize(
    ("make", "shape", "features"),
    [(Conv4, (1, 28, 28), 64), (Conv3, (3, 100, 100), 2916), (ResNet10, (3, 40, 40), 512)],
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
        (ResNet10(width=2), (2, 3, 15, 30), 16),
    ],
)
def test_images_that_do_not_fit(network, shape, side):
    with pytest.raises(ShapeError, match=f"images: got shape .* sides of {side} pixels or more"):
        network(torch.zeros(shape))


def test_a_residual_network_is_that_of_its_layers():
    network = ResNet10(width=4).double()
    x = torch.rand(5, 3, 33, 21, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    state = network.state_dict()
    convolutions = [entry for entry in state.values() if entry.ndim == 4]
    shapes = [tuple(entry.shape[:3]) for entry in convolutions]
    widths = [(4, 4), (8, 4), (16, 8), (32, 16)]
    expected = [(4, 3, 7)]
    for width, channels in widths:
        expected += [(width, channels, 3), (width, width, 3)]
        expected += [(width, channels, 1)] if width != channels else []
    assert shapes == expected

    def normalized(values):  # scale 1 and shift 0 at the start
        centred = values - values.mean((0, 2, 3), keepdim=True)
        return centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()

    def convolved(values, stride):
        kernel = convolutions.pop(0)
        padding = kernel.shape[-1] // 2
        return normalized(torch.conv2d(values, kernel, stride=stride, padding=padding))

    values = torch.nn.functional.max_pool2d(convolved(x, 2).relu(), 3, 2, 1)
    for width, channels in widths:
        stride = 1 if width == channels else 2
        added = convolved(convolved(values, stride).relu(), 1)
        values = (added + (values if stride == 1 else convolved(values, 2))).relu()
    torch.testing.assert_close(network(x), values.mean((2, 3)))


@pytest.mark.parametrize("make", [Conv3, Conv4, ResNet10])
def test_bad_arguments(make):
    with pytest.raises(ArgumentError, match="channels"):
        make(channels=0)
    with pytest.raises(ArgumentError, match="width"):
        make(width=0)
