"""Which modules a network may be made of, and what is refused."""

from __future__ import annotations

import pytest
import torch
from gpytorch.likelihoods import SoftmaxLikelihood

from gpclml.curvature import Diagonal, Full, FunctionSpace, Kronecker
from gpclml.errors import (
    ArgumentError,
    ModelModeError,
    NonFiniteError,
    ShapeError,
    UnsupportedError,
)
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork
from network_cases import (
    dense,
    eigenvalues,
    mlp,
    points,
    precisions,
    ratio,
    sizes_of,
    softmax_columns,
)  # fmt: skip


class Mixing(torch.nn.Module):
    """Outputs at a point are less the mean over all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        outputs = self.layer(x)
        return outputs - outputs.mean(0)


@pytest.mark.parametrize(
    ("network", "error", "text"),
    [
        (torch.nn.Identity(), ArgumentError, "without trainable parameters"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout()), ModelModeError, "Dropout"),
        (
            torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)),
            ModelModeError,
            "BatchNorm1d",
        ),
        (
            torch.nn.Sequential(
                torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, track_running_stats=False)
            ).eval(),
            ModelModeError,
            "without running statistics",
        ),
        (Mixing(), UnsupportedError, "changes with the other points"),
    ],
)
@pytest.mark.parametrize("structure", [Kronecker(), FunctionSpace(), Full()])
def test_networks_without_such_a_curvature(structure, network, error, text):
    with pytest.raises(error, match=text):
        structure.of(network, points((3,)).float(), softmax_columns)


def other_modules():
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.PReLU(2), ScaledTwice())
    return network.double()


class ScaledTwice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((), 1.3))

    def forward(self, x):
        return self.scale * (self.scale * x).tanh()


@pytest.mark.parametrize("structure", [Full(), FunctionSpace()])
def test_any_module_has_an_exact_curvature(structure):
    network = other_modules()
    x, delta = points((3,)), precisions(network)
    value = structure.of(network, x, softmax_columns).log_det_ratio(delta)
    torch.testing.assert_close(value, ratio(dense(network, x), delta, sizes_of(network)))


@pytest.mark.parametrize("outputs", ["single", "column"])
def test_one_drawn_output_is_that_of_all_modules(outputs):
    x, y = points((3,)), torch.arange(7) % 2
    for seed in range(6):
        values, network = [], other_modules()
        for structure in (Full(), FunctionSpace()):
            likelihood = SoftmaxLikelihood(num_classes=2, mixing_weights=False)
            mll = LaplaceMarginalLogLikelihood(
                likelihood, LinearizedNetwork(network), 7, structure, outputs=outputs, seed=seed
            )
            values.append(mll.evidence_of(x, y).log_det_ratio())
        torch.testing.assert_close(*values)


def test_kronecker_names_what_it_refuses():
    with pytest.raises(UnsupportedError, match=r"1 \(PReLU"):
        Kronecker().of(other_modules(), points((3,)), softmax_columns)


@pytest.mark.parametrize("others", ["diagonal", "full"])
def test_kronecker_beside_other_modules(others):
    network = other_modules()
    x, delta = points((3,)), precisions(network)
    curvature = Kronecker(others=others).of(network, x, softmax_columns)
    H, sizes = dense(network, x), sizes_of(network)
    linear = ["0.weight", "0.bias"]
    (layer,) = curvature.factors
    alone = eigenvalues(layer)
    assert set(alone) == set(linear)
    factors = sum((alone[name] / delta[name]).log1p().sum() for name in linear)
    places = torch.tensor([name in linear for name, size in sizes.items() for _ in range(size)])
    kept = torch.ones_like(H) if others == "full" else torch.eye(len(H)).double()
    outside = ~places[:, None] & ~places
    exact = ratio(H, delta, sizes, kept * outside)
    torch.testing.assert_close(curvature.log_det_ratio(delta), factors + exact)
    total = sum(
        (Kronecker(others=others).of(network, part, softmax_columns) for part in x[3:].split(2)),
        Kronecker(others=others).of(network, x[:3], softmax_columns),
    )
    torch.testing.assert_close(total.log_det_ratio(delta), curvature.log_det_ratio(delta))
    draws = curvature.sample(delta, count=3000)
    assert set(draws) == set(sizes)
    scale = draws["2.scale"].flatten()
    place = int(places.numel() - 1)
    inverse = torch.linalg.inv(H * kept * outside + torch.diag(
        torch.cat([delta[name].expand(size) for name, size in sizes.items()])
    ))  # fmt: skip
    assert float(scale.var()) == pytest.approx(float(inverse[place, place]), rel=0.12)
    weights = draws["0.weight"].flatten(1)
    together = torch.corrcoef(torch.cat([weights, scale.unsqueeze(-1)], 1).mT)[-1, :-1]
    assert float(together.abs().max()) < 0.1  # independent blocks, independent draws


class Places(torch.nn.Module):
    """Layers that are applied at four places of each point, one of a single output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 2).double()
        self.second = torch.nn.Linear(2, 1).double()

    def forward(self, x):
        return self.second(self.first(x).tanh()).squeeze(-1)[:, :2]


def test_layers_at_several_places():
    network = Places()
    x, delta = points((4, 3)), precisions(network)
    exact = ratio(dense(network, x), delta, sizes_of(network))
    for structure in (Full(), FunctionSpace()):
        value = structure.of(network, x, softmax_columns).log_det_ratio(delta)
        torch.testing.assert_close(value, exact)
    first, second = Kronecker().of(network, x, softmax_columns).factors
    flat = x.flatten(0, 1)
    torch.testing.assert_close(first.inputs.matrix(), flat.mT @ flat)
    assert (first.weight, second.bias, first.count) == ("first.weight", "second.bias", 28)
    mean = x.mean(1)
    reduced = Kronecker("reduce").of(network, x, softmax_columns).factors[0]
    torch.testing.assert_close(reduced.inputs.matrix(), mean.mT @ mean)


@pytest.mark.parametrize("structure", [Full(), FunctionSpace(), Kronecker(), Diagonal()])
def test_outputs_without_curvature(structure):
    network, event = mlp()
    x = points(event)
    with pytest.raises(NonFiniteError, match="output curvature"):
        structure.of(network, x, lambda f: f.unsqueeze(1) * torch.nan)
    with pytest.raises(ShapeError, match="module"):
        structure.of(Images(), x, softmax_columns)


class Images(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4).double()

    def forward(self, x):
        return self.layer(x).unflatten(-1, (2, 2))
