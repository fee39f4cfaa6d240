"""Networks: their seeded start, stacks of them, and checks of what they give."""

import pickle

import pytest
import torch

from gpclml.errors import ArgumentError
from gpclml.kernels.networks import MLP, StackedNetwork, reset_network


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_reset_leaves_the_state_of_gpus_alone(name):
    network = torch.nn.Linear(3, 2).to(name)
    before = torch.cuda.get_rng_state()
    reset_network(network, generator(1))
    first = network.weight.clone()
    reset_network(network, generator(1))
    assert torch.equal(first, network.weight)
    assert torch.equal(before, torch.cuda.get_rng_state())


def plain():
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


@pytest.mark.parametrize("make", [lambda: MLP([3, 5, 2]), plain])
def test_a_start_follows_the_generator_and_leaves_the_global_ones_alone(make, monkeypatch):
    # ``torch.manual_seed`` calls this function, even where no tensor is on a GPU.
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("all are seeded"))
    network = make()
    before = torch.get_rng_state()
    starts = []
    for seed in (1, 2, 1):
        reset_network(network, generator(seed))
        starts.append([parameter.clone() for parameter in network.parameters()])
    assert torch.equal(before, torch.get_rng_state())
    for first, other, again in zip(*starts, strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    first, other = MLP([3, 5, 2], generator=generator(1)), MLP([3, 5, 2])
    other.reset_parameters(generator(1))
    assert torch.equal(first[0].weight, other[0].weight)
    assert torch.equal(before, torch.get_rng_state())


def test_float32_and_float64_share_a_start():
    single, double = MLP([3, 5, 2], dtype=torch.float32), MLP([3, 5, 2], dtype=torch.float64)
    for a, b in zip(single.parameters(), double.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


def test_scales_of_the_output_survive_a_reset():
    x = torch.randn(4, 3)
    zero, small = MLP([3, 5, 2], output_scale=0.0), MLP([3, 5, 2], output_scale=0.01)
    zero.reset_parameters(generator(3))
    assert torch.equal(zero(x), torch.zeros(4, 2))
    assert zero[0].weight.abs().max() > 0
    assert torch.allclose(small(x), 0.01 * MLP([3, 5, 2])(x))


@pytest.mark.parametrize("sizes", [[], [3], [3, 0], [3, 2.5, 1]])
def test_bad_sizes(sizes):
    with pytest.raises(ArgumentError, match="sizes"):
        MLP(sizes)


def test_pickle_and_activation():
    network = MLP([3, 5, 2], activation=torch.nn.Tanh)
    x = torch.randn(4, 3)
    assert torch.equal(pickle.loads(pickle.dumps(network))(x), network(x))
    assert isinstance(network[1], torch.nn.Tanh)


def test_stacked_networks_are_each_network_on_its_own_points():
    networks = [MLP([3, 6, 2], torch.nn.Tanh, generator=generator(k)).double() for k in range(4)]
    stack = StackedNetwork(networks)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    alone = torch.stack([network(points) for network, points in zip(networks, x, strict=True)])
    torch.testing.assert_close(stack(x), alone)
    stack(x).square().sum().backward()
    alone.square().sum().backward()
    for name, stacked in stack.named_stacks():
        single = torch.stack([network.get_parameter(name).grad for network in networks])
        torch.testing.assert_close(stacked.grad, single)
    with pytest.raises(ArgumentError, match="networks: got Linear, expected MLP, as the first"):
        StackedNetwork([networks[0], torch.nn.Linear(3, 2)])
    with pytest.raises(ArgumentError, match="networks: got none"):
        StackedNetwork([])


def test_a_stack_has_the_buffers_of_each_network():
    networks = [torch.nn.BatchNorm1d(2).double() for _ in range(3)]
    for seed, network in enumerate(networks):
        network.running_mean.fill_(float(seed))
        network.eval()
    x = torch.randn(3, 5, 2, dtype=torch.float64)
    alone = torch.stack([network(points) for network, points in zip(networks, x, strict=True)])
    torch.testing.assert_close(StackedNetwork(networks)(x), alone)
