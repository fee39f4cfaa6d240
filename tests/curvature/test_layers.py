"""Layers that inputs and gradients say all about; others are exact, or refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, prune

from gpclml.curvature import Diagonal, Full, FunctionSpace, Kronecker
from gpclml.errors import UnsupportedError
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork
from network_cases import (
    dense,
    eigenvalues,
    generator,
    points,
    precisions,
    ratio,
    sizes_of,
    softmax_columns,
)  # fmt: skip

# Torch has no batching rule for one function of weight_norm, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def stack(*layers):
    made = torch.nn.Sequential(*layers).double()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator(3), dtype=p.dtype) / 2)
    return made


def plain(layer=torch.nn.Linear):
    return stack(layer(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def tied():
    network = stack(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    network[2].weight = network[0].weight
    return network


class Reused(torch.nn.Module):
    """The weight of a layer is used by a function as well."""

    def __init__(self):
        super().__init__()
        self.layers = plain()

    def forward(self, x):
        return self.layers(linear(x, self.layers[0].weight).tanh())


class Twice(Reused):
    def forward(self, x):
        return self.layers(self.layers[0](x))


class OtherWeights(Reused):
    """A layer is called with a multiple of its weight."""

    def forward(self, x):
        weights = {"weight": 2 * self.layers[0].weight}
        hidden = torch.func.functional_call(self.layers[0], weights, (x,))
        return self.layers[2](hidden.tanh())


class Unused(Reused):
    """The output of a layer is not used, but its weight is."""

    def forward(self, x):
        self.layers[0](x)
        return self.layers[2](linear(x, self.layers[0].weight).tanh())


class PointsSecond(Reused):
    """A layer is given seven places of each point, which come before the points."""

    def forward(self, x):
        places = torch.stack([x * k for k in range(1, 8)])
        return self.layers[2](self.layers[0](places).tanh().mean(0))


class NoPoints(Reused):
    """A layer is given seven embeddings that all points share."""

    def forward(self, x):
        shared = self.layers[0](torch.ones(7, 3).to(x) * torch.arange(7).to(x)[:, None])
        return self.layers[2]((x + shared.sum(0)).tanh())


class Sorted(Reused):
    """A layer is given the points in an order of its own."""

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.layers[2](self.layers[0](x[order])[order.argsort()].tanh())


class Some(Reused):
    """A layer is given some of the points."""

    def forward(self, x):
        chosen = x[:, 0] > 0
        hidden = x.clone()
        hidden[chosen] = self.layers[0](x[chosen])
        return self.layers[2](hidden.tanh())


class OutsideTheGraph(Reused):
    def forward(self, x):
        with torch.no_grad():
            hidden = self.layers[0](x)
        return self.layers[2](hidden.tanh() + linear(x, self.layers[0].weight))


def pruned():
    network = plain()
    prune.random_unstructured(network[0], "weight", 0.4)
    return network


def of_old_pre_hooks():
    network = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(network[0])
    return network


def weight_norm():
    network = plain()
    parametrizations.weight_norm(network[0])
    return network


def spectral_norm():
    torch.manual_seed(0)
    network = plain()
    parametrizations.spectral_norm(network[0])
    return network.eval()


class LowRank(torch.nn.Linear):
    """A frozen weight and a trained product of two thin matrices (LoRA)."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.zeros(1, inputs))
        self.up = torch.nn.Parameter(torch.zeros(outputs, 1))

    def forward(self, x):
        return super().forward(x) + x @ self.down.mT @ self.up.mT


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def low_rank():
    return plain(LowRank)


def scaled():
    return plain(Scaled)


def hooked():
    network = plain()
    network[0].register_forward_hook(lambda layer, inputs, output: 3 * output)
    return network


def replaced():
    network = plain()
    layer = network[0]
    layer.forward = lambda x: 3 * linear(x, layer.weight, layer.bias)
    return network


ODD = {
    "tied": (tied, r"0 \(Linear.*whose parameters are used outside it"),
    "reused": (Reused, r"layers\.0 \(Linear.*whose parameters are used outside it"),
    "twice": (Twice, r"layers\.0 \(Linear.*applied twice"),
    "pruned": (pruned, r"0 \(Linear.*whose weight_orig makes its weights"),
    "weight norm": (weight_norm, r"0 \(Param(.|\n)*which is parametrized"),
    "old weight norm": (of_old_pre_hooks, r"0 \(Linear.*whose weight_g makes its weights"),
    "spectral norm": (spectral_norm, r"0 \(Param(.|\n)*which is parametrized"),
    "low rank": (low_rank, r"0 \(LowRank.*which is no linear layer"),
    "scaled": (scaled, r"0 \(Scaled.*which is no linear layer"),
    "hooks": (hooked, r"0 \(Linear.*which has hooks"),
    "replaced": (replaced, r"0 \(Linear.*whose forward is replaced"),
    "other weights": (OtherWeights, r"layers\.0 \(Linear.*whose gradient is another"),
    "unused": (Unused, r"layers\.0 \(Linear.*whose output is not used"),
    "points second": (PointsSecond, r"layers\.0 \(Linear.*whose rows are not those of points"),
    "sorted": (Sorted, r"layers\.0 \(Linear.*whose rows are not those of points"),
    "some": (Some, r"layers\.0 \(Linear.*whose rows are not those of points"),
    "no points": (NoPoints, r"layers\.0 \(Linear.*whose rows are not those of points"),
    "no graph": (OutsideTheGraph, r"layers\.0 \(Linear.*whose output is not used"),
}


@pytest.fixture(params=ODD)
def odd(request):
    return ODD[request.param]


def delta_of(network):
    names = [name for name, p in network.named_parameters() if p.requires_grad]
    given = precisions(network)
    return {name: given[name] for name in names}


def trained_sizes(network):
    return {name: size for name, size in sizes_of(network).items() if name in delta_of(network)}


def full(network, x):
    return Full().of(network, x, softmax_columns).log_det_ratio(delta_of(network))


def test_full_is_the_reference(odd):
    """By gradients of single points, one pass back each, of the network as it is."""
    network = odd[0]()
    x, delta = points((3,)), delta_of(network)
    trained = [network.get_parameter(name) for name in delta]
    rows = []
    for point in x:
        outputs = network(point.unsqueeze(0))
        for column in softmax_columns(outputs).detach()[0]:
            grads = torch.autograd.grad(
                outputs[0], trained, column, retain_graph=True, allow_unused=True
            )
            parts = zip(trained, grads, strict=True)
            rows.append(torch.cat([(p * 0 if g is None else g).flatten() for p, g in parts]))
    rows = torch.stack(rows).detach()
    expected = ratio(rows.mT @ rows, delta, trained_sizes(network))
    torch.testing.assert_close(full(network, x), expected)


def test_a_kernel_is_exact(odd):
    network = odd[0]()
    x = points((3,))
    value = FunctionSpace().of(network, x, softmax_columns).log_det_ratio(delta_of(network))
    torch.testing.assert_close(value, full(network, x))


def test_kronecker_refuses_by_name(odd):
    make, text = odd
    with pytest.raises(UnsupportedError, match=text) as error:
        Kronecker().of(make(), points((3,)), softmax_columns)
    for other in ("FunctionSpace", "Full", "Diagonal", 'others="diagonal"'):
        assert other in str(error.value)


@pytest.mark.parametrize("others", ["diagonal", "full"])
def test_kronecker_has_a_block_for_every_trained_parameter(odd, others):
    network = odd[0]()
    x, delta = points((3,)), delta_of(network)
    curvature = Kronecker(others=others).of(network, x, softmax_columns)
    draws = curvature.sample(delta, count=2)
    assert {name: tuple(draw.shape[1:]) for name, draw in draws.items()} == {
        name: tuple(network.get_parameter(name).shape) for name in delta
    }
    in_factors = [name for one in curvature.factors for name in one.eigenvalues]
    outside = [name for name in delta if name not in in_factors]
    assert outside
    assert all(("2." in name) for name in in_factors)
    exact = {"diagonal": Diagonal(), "full": Full()}[others]
    value = curvature.log_det_ratio(delta) - sum(
        (values / delta[name]).log1p().sum()
        for one in curvature.factors for name, values in eigenvalues(one).items()
    )  # fmt: skip
    for name, p in network.named_parameters():
        p.requires_grad_(name in outside)
    expected = exact.of(network, x, softmax_columns)
    rest = {name: delta[name] for name in outside}
    torch.testing.assert_close(value, expected.log_det_ratio(rest))


def test_draws_of_an_evidence_hold_every_trained_parameter(odd):
    network = odd[0]()
    x = points((3,))
    y = torch.arange(len(x)) % 2
    likelihood = SoftmaxLikelihood(
        num_classes=network(x[:1]).shape[-1], mixing_weights=False
    ).double()
    mll = LaplaceMarginalLogLikelihood(
        likelihood, LinearizedNetwork(network), len(x), Kronecker(others="diagonal")
    )
    weights = mll.evidence_of(x, y).sample_weights(3)
    assert set(weights) == set(delta_of(network))
    assert all(float(draw.var(0).min()) > 0 for draw in weights.values())


class Aliased(torch.nn.Module):
    """A layer with two names that is called once, by keyword."""

    def __init__(self):
        super().__init__()
        self.layers = plain()
        self.last = self.layers[2]

    def forward(self, x):
        return self.last(input=self.layers[:2](x))


@pytest.mark.parametrize("make", [plain, Aliased, lambda: torch.nn.LazyLinear(2)])
def test_layers_that_are_what_they_seem(make):
    network, x = make().double(), points((3,))
    network(x)  # a lazy layer becomes one
    assert len(Kronecker().of(network, x, softmax_columns).factors) in (1, 2)
    assert all(type(p) is torch.nn.Parameter for p in network.parameters())
    value = FunctionSpace().of(network, x, softmax_columns).log_det_ratio(precisions(network))
    torch.testing.assert_close(
        value, ratio(dense(network, x), precisions(network), sizes_of(network))
    )


def test_batches_of_other_layers_do_not_add_up():
    network, x = plain(), points((3,))
    first = Kronecker(others="diagonal").of(network, x, softmax_columns)
    network[0].register_forward_hook(lambda layer, inputs, output: output)
    other = Kronecker(others="diagonal").of(network, x, softmax_columns)
    with pytest.raises(UnsupportedError, match="factors of"):
        first + other


def test_a_hook_of_all_modules_is_seen_by_its_gradient():
    network, x = plain(), points((3,))
    before = full(network, x)

    def triple(layer, inputs, output):
        return 3 * output if layer is network[0] else output

    handle = torch.nn.modules.module.register_module_forward_hook(triple)
    try:
        expected = full(network, x)
        value = FunctionSpace().of(network, x, softmax_columns).log_det_ratio(precisions(network))
        with pytest.raises(UnsupportedError, match="whose gradient is another"):
            Kronecker().of(network, x, softmax_columns)
    finally:
        handle.remove()
    torch.testing.assert_close(value, expected)
    assert abs(float(value - before)) > 0.1
