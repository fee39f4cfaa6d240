"""Draws of weights: their covariance is the inverse of curvature and prior."""

from __future__ import annotations

import pytest
import torch

import reference
from gpclml.curvature import (
    BlockDiagonal,
    Diagonal,
    Full,
    FunctionSpace,
    Kronecker,
    output_gradients,
    sample_gradients,
)
from gpclml.errors import UnsupportedError
from gpclml.kernels.networks import MLP

N, COUNT, SCALE = 7, 40_000, 1.7


def columns(outputs):
    p = outputs.softmax(-1)
    return p.sqrt().unsqueeze(-1) * (torch.eye(p.shape[-1]).double() - p.unsqueeze(-2))


def setting():
    network = MLP([2, 2, 2], torch.nn.Tanh).double()
    x = torch.randn(N, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    names = [name for name, _ in network.named_parameters()]
    return network, x, {name: torch.tensor(0.5 + 0.3 * i).double() for i, name in enumerate(names)}


def flat(draws):
    return torch.cat([part.flatten(1) for part in draws.values()], dim=-1)


def precision_matrix(structure, network, x, delta):
    H = reference.weight_curvature(network, x, columns(network(x)).detach())
    if isinstance(structure, Kronecker):
        blocks = reference.kronecker_blocks(network, x, columns(network(x)).detach(), "expand")
        H = torch.block_diag(*[blocks[name] for name, _ in network.named_parameters()])
    places = [name for name, p in network.named_parameters() for _ in range(p.numel())]
    if isinstance(structure, BlockDiagonal):
        layers = [name.rpartition(".")[0] for name in places]
        H = H * torch.tensor([[float(a == b) for b in layers] for a in layers]).double()
    if isinstance(structure, Diagonal):
        H = torch.diag(H.diagonal())
    return SCALE * H + torch.diag(torch.stack([delta[name] for name in places]))


@pytest.mark.parametrize(
    "structure",
    [Full("parameters"), Full("samples"), BlockDiagonal(), Diagonal(), Kronecker()],
    ids=["parameters", "samples", "blocks", "diagonal", "kronecker"],
)
def test_the_covariance_of_draws(structure):
    network, x, delta = setting()
    curvature = structure.of(network, x, columns)
    draws = curvature.sample(delta, SCALE, COUNT, torch.Generator().manual_seed(0))
    assert {name: part.shape[1:] for name, part in draws.items()} == {
        name: p.shape for name, p in network.named_parameters()
    }
    expected = torch.linalg.inv(precision_matrix(structure, network, x, delta)).detach()
    values = flat({name: draws[name] for name in delta})
    deviation = expected.diagonal().sqrt()
    assert float((values.mean(0) / deviation).abs().max()) < 5 / COUNT**0.5
    # Entries of a sample covariance have a variance of (C_ii C_jj + C_ij²) / n.
    spread = (torch.outer(deviation**2, deviation**2) + expected**2) / COUNT
    error = values.mT @ values / COUNT - expected
    assert float((error / spread.sqrt()).abs().max()) < 5


def test_a_seed_gives_the_same_draws():
    network, x, delta = setting()
    curvature = Kronecker().of(network, x, columns)
    one, same, other = (
        flat(curvature.sample(delta, count=3, generator=torch.Generator().manual_seed(seed)))
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(one, flat(curvature.sample(delta, count=3)))


@pytest.mark.parametrize(
    "structure",
    [Full("parameters"), Full("samples"), BlockDiagonal(), Diagonal(), Kronecker()],
    ids=["parameters", "samples", "blocks", "diagonal", "kronecker"],
)
def test_the_covariance_of_outputs(structure):
    network, x, delta = setting()
    at = torch.randn(3, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    eye = torch.eye(2).double()
    gradients = sample_gradients(network, at, lambda outputs: eye.expand(len(outputs), 2, 2))
    function = structure.of(network, x, columns).output_covariance(delta, SCALE)
    value = function(gradients)
    torch.testing.assert_close(function(output_gradients(network, at, 2)), value)
    J = torch.cat([gradients[name].flatten(2) for name in delta], dim=-1)
    expected = J @ torch.linalg.inv(precision_matrix(structure, network, x, delta)) @ J.mT
    torch.testing.assert_close(value, expected.detach())


def test_function_space_has_no_posterior():
    network, x, delta = setting()
    with pytest.raises(UnsupportedError, match="Use Full"):
        FunctionSpace().of(network, x, columns).output_covariance(delta)
