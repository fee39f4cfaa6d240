import copy
import pickle

import pytest
import torch

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.kernels.networks import MLP, StackedNetwork, apply_network, reset_network


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_construction_and_reset_leave_the_global_rng_alone():
    before = torch.get_rng_state()
    network = MLP([3, 5, 2])
    network.reset_parameters(generator(1))
    reset_network(torch.nn.Sequential(torch.nn.Identity(), network), generator(2))
    assert torch.equal(before, torch.get_rng_state())


def test_a_reset_leaves_the_generators_of_gpus_alone(monkeypatch):
    """``torch.manual_seed`` calls this function, even where no tensor is on a GPU."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("all are seeded"))
    reset_network(torch.nn.Linear(3, 2), generator(1))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_reset_leaves_the_state_of_gpus_alone(place):
    network = torch.nn.Linear(3, 2).to(place)
    before = torch.cuda.get_rng_state()
    reset_network(network, generator(1))
    first = network.weight.clone()
    reset_network(network, generator(1))
    assert torch.equal(first, network.weight)
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_the_generator_decides_the_start():
    x = torch.randn(4, 3)
    first, same, other = (MLP([3, 5, 2], generator=generator(s))(x) for s in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)


def test_reset_draws_anew_from_the_generator():
    network = MLP([3, 5, 2], generator=generator(1))
    state = copy.deepcopy(network.state_dict())
    network.reset_parameters(generator(2))
    assert not torch.equal(state["0.weight"], network.state_dict()["0.weight"])
    network.reset_parameters(generator(1))
    assert all(torch.equal(v, network.state_dict()[k]) for k, v in state.items())


def test_float32_and_float64_share_a_start():
    single, double = MLP([3, 5, 2], dtype=torch.float32), MLP([3, 5, 2], dtype=torch.float64)
    for a, b in zip(single.parameters(), double.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


def test_the_start_has_the_spread_of_torch_linear():
    layer = MLP([400, 300])[0]
    assert layer.weight.abs().max() <= 400**-0.5
    assert layer.weight.std().item() == pytest.approx(400**-0.5 / 3**0.5, rel=0.02)
    assert layer.bias.abs().max() > 0


def test_zero_output_is_zero_and_survives_a_reset():
    network = MLP([3, 5, 2], zero_output=True)
    network.reset_parameters(generator(3))
    assert torch.equal(network(torch.randn(4, 3)), torch.zeros(4, 2))
    assert network[0].weight.abs().max() > 0


def test_output_scale_scales_the_output():
    x = torch.randn(4, 3)
    assert torch.allclose(MLP([3, 5, 2], output_scale=0.01)(x), 0.01 * MLP([3, 5, 2])(x))


def test_reset_of_a_torch_network_follows_the_generator():
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    before = torch.get_rng_state()
    reset_network(network, generator(1))
    first = network[0].weight.clone()
    reset_network(network, generator(2))
    assert not torch.equal(first, network[0].weight)
    reset_network(network, generator(1))
    assert torch.equal(first, network[0].weight)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sizes", [[], [3], [3, 0], [3, 2.5, 1]])
def test_bad_sizes(sizes):
    with pytest.raises(ArgumentError, match="sizes"):
        MLP(sizes)


def test_pickle_and_activation():
    network = MLP([3, 5, 2], activation=torch.nn.Tanh)
    x = torch.randn(4, 3)
    assert torch.equal(pickle.loads(pickle.dumps(network))(x), network(x))
    assert isinstance(network[1], torch.nn.Tanh)


def test_apply_network_checks_rows_and_values():
    x = torch.randn(4, 3)
    with pytest.raises(ShapeError, match="network output"):
        apply_network(torch.nn.Flatten(0), x)
    network = MLP([3, 2])
    with torch.no_grad():
        network[0].bias[0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"4 non-finite of 8 .*\(4, 2\).*float32"):
        apply_network(network, x)


def test_stacked_networks_are_each_network_on_its_own_points():
    networks = [
        MLP([3, 6, 2], torch.nn.Tanh, generator=torch.Generator().manual_seed(seed)).double()
        for seed in range(4)
    ]
    stack = StackedNetwork(networks)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    alone = torch.stack([network(own) for network, own in zip(networks, x, strict=True)])
    torch.testing.assert_close(stack(x), alone)
    stack(x).square().sum().backward()
    alone.square().sum().backward()
    for name, stacked in stack.named_stacks():
        own = torch.stack([network.get_parameter(name).grad for network in networks])
        torch.testing.assert_close(stacked.grad, own)
