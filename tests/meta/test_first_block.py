"""The first block of a network in one pass: against its layers one after the other."""

from __future__ import annotations

import copy

import pytest
import torch

from gpclml.meta import ConvBlocks
from gpclml.meta.backbones import first_block


def block_and_images(channels=1, sides=(12, 12), width=5, count=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    block = ConvBlocks(1, channels, width).blocks[0].to(dtype)
    for parameter in block.parameters():  # scales of both signs among them
        torch.nn.init.normal_(parameter, generator=generator)
    return block, torch.randn(count, channels, *sides, generator=generator, dtype=dtype)


CASES = [(1, (12, 12), 5), (3, (13, 10), 7), (2, (2, 3), 1), (1, (70, 70), 64)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("channels", "sides", "width"), CASES)
def test_values_gradients_and_statistics_are_those_of_the_layers(channels, sides, width, training):
    block, images = block_and_images(channels, sides, width)
    images = images.contiguous(memory_format=torch.channels_last)
    block(images)  # running statistics that are not those of a start
    block.train(training)
    layers = copy.deepcopy(block)
    expected, values = layers(images), first_block(block, images)
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).double()
    expected.backward(weights)
    values.backward(weights)
    for (name, one), other in zip(block.named_parameters(), layers.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)
    for one, other in zip(block.buffers(), layers.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_values_are_the_same(training, count):
    block, images = block_and_images(1, (70, 70), 64, count)
    block.train(training)
    layers = copy.deepcopy(block)
    with torch.no_grad():
        torch.testing.assert_close(first_block(block, images), layers(images))


def test_background_is_one_place_of_its_windows():
    block, images = block_and_images()
    images[:, :, 3:] = 0.0  # most windows have four equal values
    layers = copy.deepcopy(block)
    layers(images).sum().backward()
    first_block(block, images).sum().backward()
    torch.testing.assert_close(block[0].weight.grad, layers[0].weight.grad, rtol=1e-9, atol=1e-9)


def test_second_derivatives_are_those_of_the_layers():
    block, images = block_and_images()

    def second(values):
        weight = values[0]
        (gradient,) = torch.autograd.grad(values[1].square().sum(), weight, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), weight)[0]

    expected = second((block[0].weight, block(images)))
    torch.testing.assert_close(second((block[0].weight, first_block(block, images))), expected)


def test_what_is_left_to_the_layers():
    block, images = block_and_images()
    assert first_block(block, images.clone().requires_grad_()) is None
    assert first_block(block, images.float()) is None
    assert first_block(block, images.repeat(1, 5, 1, 1)) is None
    without = copy.deepcopy(block).eval()
    without[1].track_running_stats = False
    assert first_block(without, images) is None
    hooked = copy.deepcopy(block)
    hooked[0].register_forward_hook(lambda module, args, output: None)
    assert first_block(hooked, images) is None


@pytest.mark.parametrize("training", [True, False])
def test_a_network_takes_it(training):
    network = ConvBlocks(2, width=3).double().train(training)
    layers = copy.deepcopy(network)
    _, images = block_and_images()
    torch.testing.assert_close(network(images), layers.blocks(images).flatten(1))
    assert network(images).grad_fn is not None
    gradient = images.clone().requires_grad_()
    network(gradient).sum().backward()
    assert gradient.grad.abs().sum() > 0
