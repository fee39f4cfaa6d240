"""Normalizations, convolutions, attention and recurrent layers, against gradients one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpclml.curvature import (
    Diagonal,
    Full,
    FunctionSpace,
    Kronecker,
    layers,
    output_gradients,
    sample_gradients,
)
from gpclml.curvature.gradients import dense_rows
from gpclml.errors import UnsupportedError
from network_cases import eigenvalues, points, precisions, ratio, sizes_of, softmax_columns


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.head = nn.Linear(4, 2)
        self.batch_first = batch_first

    def forward(self, x):
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(self.layer(x, x, x)[0].mean(int(self.batch_first)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(self.tokens(x)).mean(1))


def tokens():
    return torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(0))


def images(*event):
    return lambda: points(event, n=4)


def convolutional(*layers):
    return lambda: nn.Sequential(*(make() for make in layers), nn.Flatten(), nn.LazyLinear(2))


BLOCKS = {  # with factors and blocks, without asking
    "batch norm": (
        convolutional(lambda: nn.Conv2d(2, 3, 2), lambda: nn.BatchNorm2d(3), nn.Tanh),
        images(2, 3, 3),
    ),
    "batch norm of columns": (
        convolutional(lambda: nn.Linear(3, 3), lambda: nn.BatchNorm1d(3), nn.Tanh),
        images(3),
    ),
    "layer norm": (
        convolutional(lambda: nn.Linear(3, 4), lambda: nn.LayerNorm(4), nn.Tanh),
        images(2, 3),
    ),
    "RMS norm": (
        convolutional(lambda: nn.Linear(3, 4), lambda: nn.RMSNorm(4), nn.Tanh),
        images(2, 3),
    ),
    "group norm": (
        convolutional(lambda: nn.Conv2d(2, 4, 2), lambda: nn.GroupNorm(2, 4), nn.Tanh),
        images(2, 3, 3),
    ),
    "one dimension": (
        convolutional(lambda: nn.Conv1d(2, 4, 2, stride=2, padding=1), nn.Tanh),
        images(2, 5),
    ),
    "three dimensions": (
        convolutional(lambda: nn.Conv3d(2, 2, 2, dilation=(1, 2, 1)), nn.Tanh),
        images(2, 3, 4, 3),
    ),
    "groups": (
        convolutional(lambda: nn.Conv2d(4, 6, 2, groups=2), nn.Tanh),
        images(4, 3, 3),
    ),
    "circular": (
        convolutional(lambda: nn.Conv2d(2, 3, 2, padding=1, padding_mode="circular"), nn.Tanh),
        images(2, 3, 3),
    ),
}
OTHERS = {
    "transposed": (
        convolutional(lambda: nn.ConvTranspose2d(2, 3, 2), nn.Tanh),
        images(2, 2, 2),
    ),
    "embedding": (convolutional(lambda: nn.Embedding(7, 3), nn.Tanh), tokens),
    "bag": (convolutional(lambda: nn.EmbeddingBag(7, 3), nn.Tanh), tokens),
    "attention": (lambda: Attention(True), images(3, 4)),
    "attention, points second": (lambda: Attention(False), images(3, 4)),
    "encoder": (Encoder, tokens),
    "LSTM": (lambda: Recurrent(nn.LSTM), images(3, 3)),
    "GRU": (lambda: Recurrent(nn.GRU), images(3, 3)),
}
CASES = BLOCKS | OTHERS


def made(case):
    make, points_of = case
    torch.manual_seed(0)
    network, x = make().double(), points_of()
    network(x)
    with torch.no_grad():
        for p in network.parameters():  # no scale is one and no shift zero
            p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
    return network.eval(), x


def rows_of(network, x):
    trained, rows = list(network.parameters()), []
    for point in x:
        outputs = network(point.unsqueeze(0))
        for column in softmax_columns(outputs).detach()[0]:
            parts = torch.autograd.grad(
                outputs[0], trained, column, retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_structures_that_are_exact(name):
    network, x = made(CASES[name])
    delta, sizes, rows = precisions(network), sizes_of(network), rows_of(network, x)
    H = rows.mT @ rows
    for structure in (Full(), FunctionSpace()):
        value = structure.of(network, x, softmax_columns).log_det_ratio(delta)
        torch.testing.assert_close(value, ratio(H, delta, sizes), rtol=1e-8, atol=1e-8)
    diagonal = Diagonal().of(network, x, softmax_columns).log_det_ratio(delta)
    exact = ratio(H, delta, sizes, torch.eye(len(H)).double())
    torch.testing.assert_close(diagonal, exact, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", OTHERS)
def test_kronecker_has_blocks_of_others_if_asked(name):
    network, x = made(OTHERS[name])
    with pytest.raises(UnsupportedError, match="which is no linear layer"):
        Kronecker().of(network, x, softmax_columns)
    curvature = Kronecker(others="diagonal").of(network, x, softmax_columns)
    draws = curvature.sample(precisions(network))
    assert {k: draw.shape[1:] for k, draw in draws.items()} == {
        k: p.shape for k, p in network.named_parameters()
    }


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_outputs(name):
    network, x = made(CASES[name])
    eye = torch.eye(2).double()
    exact = sample_gradients(network, x, lambda f: eye.expand(len(f), 2, 2))
    found = output_gradients(network, x, 2)
    assert set(found) == set(exact)
    for kind, rows in exact.items():
        flat = dense_rows(found[kind], slice(None))
        torch.testing.assert_close(flat, rows.reshape(*rows.shape[:2], -1))


NORMS = [name for name in BLOCKS if "norm" in name]


@pytest.mark.parametrize("name", NORMS)
def test_scale_and_shift_have_an_exact_block(name):
    network, x = made(BLOCKS[name])
    delta, rows = precisions(network), rows_of(network, x)
    curvature = Kronecker().of(network, x, softmax_columns)
    (block,) = curvature.others
    assert set(block.names) <= {"1.weight", "1.bias"}
    of_norm = {k: delta[k] for k in block.names}
    H = rows.mT @ rows
    places = [k for k, size in sizes_of(network).items() for _ in range(size)]
    kept = torch.tensor([k in of_norm for k in places])
    exact = ratio(H[kept][:, kept], of_norm, {k: sizes_of(network)[k] for k in of_norm})
    torch.testing.assert_close(block.log_det_ratio(delta), exact)
    parts = [Kronecker().of(network, part, softmax_columns) for part in (x[:1], x[1:])]
    added = (parts[0] + parts[1]).log_det_ratio(delta)
    torch.testing.assert_close(added, curvature.log_det_ratio(delta))


def test_a_group_of_a_convolution_has_the_factors_of_a_convolution_of_its_own():
    network, x = made(BLOCKS["groups"])
    delta = {name: torch.tensor(0.7).double() for name in precisions(network)}
    factor = Kronecker().of(network, x, softmax_columns).factors[0]
    total = {"weight": 0.0, "bias": 0.0}

    class Alone(nn.Module):
        """The second of two groups is a constant."""

        def __init__(self, group):
            super().__init__()
            self.group, self.own = group, nn.Conv2d(2, 3, 2).double()
            with torch.no_grad():
                rows = slice(3 * group, 3 * group + 3)
                self.own.weight.copy_(network[0].weight[rows])
                self.own.bias.copy_(network[0].bias[rows])

        def forward(self, x):
            both = list(network[0](x).detach().split(3, dim=1))
            both[self.group] = self.own(x[:, 2 * self.group : 2 * self.group + 2])
            return network[1:](torch.cat(both, dim=1))

    for group in range(2):
        alone = Alone(group)
        (own,) = Kronecker().of(alone, x, softmax_columns).factors
        for kind in total:
            name = f"own.{kind}"
            total[kind] += (eigenvalues(own)[name] / 0.7).log1p().sum()
    for kind, value in total.items():
        found = (eigenvalues(factor)[f"0.{kind}"] / delta[f"0.{kind}"]).log1p().sum()
        torch.testing.assert_close(found, value)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_draws_of_grouped_factors(sharing):
    network, x = made(BLOCKS["groups"])
    delta = precisions(network)
    curvature = Kronecker(sharing).of(network, x, softmax_columns)
    factor, count = curvature.factors[0], 20_000
    draws = curvature.sample(delta, 1.3, count)
    for group in range(2):
        B, A = factor.gradients.matrix()[group], factor.inputs.matrix()[group] / factor.count
        for name, block in (("0.weight", torch.kron(B, A)), ("0.bias", B)):
            exact = torch.linalg.inv(1.3 * block + delta[name] * torch.eye(len(block)))
            values = draws[name][:, 3 * group : 3 * group + 3].flatten(1)
            deviation = exact.diagonal().sqrt()
            error = (values.mT @ values / count - exact) / torch.outer(deviation, deviation)
            assert float(error.abs().max()) < 7 / count**0.5
            rows = {k: torch.zeros(1, 2, *p.shape).double() for k, p in network.named_parameters()}
            drawn = torch.randn(1, 2, 3, *rows[name].shape[3:], dtype=torch.float64)
            rows[name][:, :, 3 * group : 3 * group + 3] = drawn
            covariance = curvature.output_covariance(delta, 1.3)(rows)
            flat = drawn.flatten(2)
            torch.testing.assert_close(covariance, flat @ exact @ flat.mT)


@pytest.mark.parametrize("structure", [FunctionSpace(), Kronecker(), Diagonal()])
@pytest.mark.parametrize("name", ["batch norm", "layer norm", "groups"])
def test_gradients_of_what_moves_the_points(structure, name):
    network, x = made(BLOCKS[name])
    delta, away = precisions(network), points(x.shape[1:], n=4, seed=2)

    def function(shift):
        return structure.of(network, x + shift * away, softmax_columns).log_det_ratio(delta)

    assert torch.autograd.gradcheck(function, [torch.tensor(0.1).double().requires_grad_()])


@pytest.mark.parametrize("name", ["groups", "layer norm", "three dimensions"])
def test_chunks_of_points(name, monkeypatch):
    network, x = made(BLOCKS[name])
    values, sizes = [], []
    network.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    for chunk, memory in ((2**20, 2**26), (1, 2**26), (1, 1)):
        monkeypatch.setattr(layers, "_CHUNK", chunk)
        monkeypatch.setattr(layers, "_BYTES", memory)
        sizes.clear()
        curvature = Kronecker().of(network, x, softmax_columns)
        assert (max(sizes) < len(x)) == (memory == 1)
        diagonal = Diagonal().of(network, x, softmax_columns).diagonal
        factors = [(one.inputs.matrix(), one.count) for one in curvature.factors]
        values.append((diagonal, factors, curvature.log_det_ratio(precisions(network))))
    for other in values[1:]:
        torch.testing.assert_close(values[0], other)


CONVOLUTIONS = {
    "lines": (nn.Conv1d, dict(kernel_size=3, padding=2, dilation=2)),
    "images": (nn.Conv2d, dict(kernel_size=3, padding=1)),
    "even": (nn.Conv2d, dict(kernel_size=(4, 2), groups=2, bias=False)),
    "reflected": (nn.Conv2d, dict(kernel_size=(3, 1), padding=(2, 0), padding_mode="reflect")),
    "wide steps": (nn.Conv2d, dict(kernel_size=3, stride=(1, 2), dilation=(2, 1))),
    "high steps": (nn.Conv2d, dict(kernel_size=3, stride=(2, 1), padding=1)),
    "few lines": (nn.Conv2d, dict(kernel_size=(6, 2))),
    "volumes": (nn.Conv3d, dict(kernel_size=(2, 3, 2), padding=(1, 0, 1), groups=2)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_products_of_patches(name):
    # The gradient of an output by the weight of its channel is the patch of its place.
    kind, options = CONVOLUTIONS[name]
    layer = kind(2, 2, **options).double()
    event = (2, 7, 6, 3)[: layer.weight.ndim - 1]
    x = points(event, n=20).requires_grad_()

    def outputs(weight):
        return (
            torch.func.functional_call(layer, {"weight": weight}, (x,)).transpose(0, 1).flatten(1)
        )

    patches = torch.func.jacrev(outputs)(layer.weight).flatten(3)
    own = torch.stack([patches[k, :, k] for k in range(0, 2, 2 // layer.groups)])
    expected = own.mT @ own
    record = layers.LinearRecord(layer, "weight", None, len(x), x, [layer(x)])
    products, count = record.input_products(reduce=False)
    found = products.matrix().view_as(expected)
    assert count == own.shape[1]
    assert not products.is_rows
    torch.testing.assert_close(found, expected)
    weights = points(expected.shape[1:], n=len(expected), seed=1)
    gradients = [torch.autograd.grad((one * weights).sum(), x)[0] for one in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_factors_of_fewer_points_than_inputs_stay_rows():
    network = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, delta = points((9,), n=12), precisions(network)
    whole = Kronecker().of(network, x, softmax_columns)
    parts = [Kronecker().of(network, some, softmax_columns) for some in x.split((2, 3, 7))]
    rows = [one.factors[0].inputs.is_rows for one in (*parts, parts[0] + parts[1], whole)]
    assert rows == [True, True, True, True, False]
    few = parts[0] + parts[1]
    for curvature in (whole, few, few + parts[2]):
        total = sum(
            (torch.kron(B, A / one.count) / delta[one.weight] + torch.eye(len(A) * len(B))).logdet()
            + (B / delta[one.bias] + torch.eye(len(B))).logdet()
            for one in curvature.factors
            for B, A in [(one.gradients.matrix(), one.inputs.matrix())]
        )
        torch.testing.assert_close(curvature.log_det_ratio(delta), total)
    draws, again = (one.sample(delta, count=2) for one in (whole, few + parts[2]))
    torch.testing.assert_close(draws, again)
