"""Backbones: their start, and the first block in one pass against its layers one by one."""

import copy

import pytest
import torch

from gpclml.errors import ArgumentError, ShapeError
from gpclml.meta import Conv4, ConvBlocks


def test_features_and_their_start():
    state = torch.get_rng_state()
    network = Conv4()
    assert torch.equal(torch.get_rng_state(), state)
    assert network(torch.rand(2, 1, 28, 28)).shape == (2, 64)
    same, other = Conv4(), Conv4(generator=torch.Generator().manual_seed(1))
    pairs = zip(network.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(next(network.parameters()), next(other.parameters()))


@pytest.mark.parametrize(
    ("network", "shape", "side"),
    [
        (Conv4(), (2, 1, 15, 28), 16),
        (Conv4(), (2, 3, 28, 28), 16),
        (Conv4(), (2, 28, 28), 16),
        (ConvBlocks(1), (2, 1, 1, 1), 2),
    ],
)
def test_images_that_do_not_fit(network, shape, side):
    with pytest.raises(ShapeError, match=f"images: got shape .* sides of {side} pixels or more"):
        network(torch.zeros(shape))


@pytest.mark.parametrize("name", ["channels", "width"])
def test_bad_arguments(name):
    with pytest.raises(ArgumentError, match=name):
        Conv4(**{name: 0})


def network_and_images(channels=1, sides=(12, 12), width=5, count=7, blocks=1):
    generator = torch.Generator().manual_seed(4)
    network = ConvBlocks(blocks, channels, width).double()
    for parameter in network.parameters():  # scales of both signs among them
        torch.nn.init.normal_(parameter, generator=generator)
    shape = count, channels, *sides
    return network, torch.randn(shape, generator=generator, dtype=torch.float64)


def layer_by_layer(network, images):
    """In the order of the paper: convolution, normalization, ReLU, pooling."""
    for convolution, normalization, _, _ in network.blocks:
        values = normalization(convolution(images)).relu()
        images = torch.nn.functional.max_pool2d(values, 2)
    return images.flatten(1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("channels", "sides", "width", "blocks"),
    [(1, (12, 12), 5, 1), (3, (13, 10), 7, 2), (2, (2, 3), 1, 1), (1, (70, 70), 64, 1)],
)
def test_values_gradients_and_statistics_are_those_of_the_layers(
    channels, sides, width, blocks, training
):
    network, images = network_and_images(channels, sides, width, blocks=blocks)
    network(images)  # running statistics that are not those of a start
    network.train(training)
    layers = copy.deepcopy(network)
    expected = layer_by_layer(layers, images)
    values = network(images)
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).double()
    expected.backward(weights)
    values.backward(weights)
    for (name, parameter), other in zip(
        network.named_parameters(), layers.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)
    torch.testing.assert_close(
        list(network.buffers()), list(layers.buffers()), rtol=1e-12, atol=1e-12
    )
    with torch.no_grad():
        for batch in (images, images[:1]):
            torch.testing.assert_close(network(batch), layer_by_layer(network, batch))


def test_windows_of_equal_values():
    network, images = network_and_images()
    images[:, :, 3:] = 0.0  # most windows have four equal values
    layers = copy.deepcopy(network)
    layer_by_layer(layers, images).sum().backward()
    network(images).sum().backward()
    for parameter, other in zip(network.parameters(), layers.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_second_derivatives_are_those_of_the_layers():
    network, images = network_and_images()
    weight = network.blocks[0][0].weight

    def second(values):
        (gradient,) = torch.autograd.grad(values.square().sum(), weight, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), weight)[0]

    torch.testing.assert_close(second(network(images)), second(layer_by_layer(network, images)))


def test_where_the_layers_are_run_one_by_one():
    """For gradients of images, and normalization of another kind."""
    network, images = network_and_images()
    images.requires_grad_()
    gradients = [
        torch.autograd.grad(values.square().sum(), images)
        for values in (network(images), layer_by_layer(network, images))
    ]
    torch.testing.assert_close(*gradients)
    unlike, images = network_and_images()
    unlike.blocks[0][1] = torch.nn.BatchNorm2d(5, track_running_stats=False).double()
    unlike.eval()
    torch.testing.assert_close(unlike(images), layer_by_layer(unlike, images))
    with pytest.raises(RuntimeError, match="type"):
        unlike(images.float())
