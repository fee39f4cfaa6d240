"""Layers of all kinds against gradients one by one: recorded, exact by other ways, or refused."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, prune

from gpclml.curvature import (
    Diagonal,
    Full,
    FunctionSpace,
    Kronecker,
    OuterProducts,
    layers,
    output_gradients,
    sample_gradients,
)
from gpclml.curvature.blocks import Block, Factors
from gpclml.errors import UnsupportedError
from network_cases import (
    generator,
    points,
    precisions,
    ratio,
    sizes_of,
    softmax_columns,
)  # fmt: skip

# Torch has no batching rule for one function of weight_norm, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def plain(layer=nn.Linear, outputs=2):
    made = nn.Sequential(layer(3, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator(3), dtype=p.dtype) / 2)
    return made


def tied():
    network = plain(outputs=3)
    network[2].weight = network[0].weight
    return network


class Using(nn.Module):
    """A network whose first layer is used by a function of the two layers and the points."""

    def __init__(self, function):
        super().__init__()
        self.layers, self.function = plain(), function

    def forward(self, x):
        return self.function(self.layers[0], self.layers[2], x)


def without_graph(first, last, x):
    with torch.no_grad():
        hidden = first(x)
    return last(hidden.tanh() + linear(x, first.weight))


def doubled_weight(first, last, x):
    return last(torch.func.functional_call(first, {"weight": 2 * first.weight}, (x,)).tanh())


def points_second(first, last, x):
    return last(first(torch.stack([x * k for k in range(1, 8)])).tanh().mean(0))


def in_another_order(first, last, x):
    order = x[:, 0].argsort()
    return last(first(x[order])[order.argsort()].tanh())


def some_points(first, last, x):
    hidden = x.clone()
    hidden[x[:, 0] > 0] = first(x[x[:, 0] > 0])
    return last(hidden.tanh())


def pruned():
    network = plain()
    prune.random_unstructured(network[0], "weight", 0.4)
    return network


def spectral_norm():
    torch.manual_seed(0)
    network = plain()
    parametrizations.spectral_norm(network[0])
    return network.eval()


class LowRank(nn.Linear):
    """A frozen weight and a trained product of two thin matrices (LoRA)."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(1, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, 1))

    def forward(self, x):
        return super().forward(x) + x @ self.down.mT @ self.up.mT


def hooked():
    network = plain()
    network[0].register_forward_hook(lambda layer, inputs, output: 3 * output)
    return network


def replaced():
    network = plain()
    layer = network[0]
    layer.forward = lambda x: 3 * linear(x, layer.weight, layer.bias)
    return network


ROWS = "Linear.*whose rows are not those of points"
ODD = {
    "tied": (tied, r"0 \(Linear.*whose parameters are used outside it"),
    "twice": (lambda: Using(lambda a, b, x: b(a(a(x)).tanh())), "Linear.*applied twice"),
    "pruned": (pruned, r"0 \(Linear.*whose weight_orig makes its weights"),
    "spectral norm": (spectral_norm, r"0 \(Param(.|\n)*which is parametrized"),
    "low rank": (lambda: plain(LowRank), r"0 \(LowRank.*which is no linear layer"),
    "hooks": (hooked, r"0 \(Linear.*which has hooks"),
    "replaced": (replaced, r"0 \(Linear.*whose forward is replaced"),
    "other weights": (lambda: Using(doubled_weight), "Linear.*whose gradient is another"),
    "no graph": (lambda: Using(without_graph), "Linear.*whose output is not used"),
    "points second": (lambda: Using(points_second), ROWS),
    "another order": (lambda: Using(in_another_order), ROWS),
    "some points": (lambda: Using(some_points), ROWS),
}  # fmt: skip


def rows_of(network, x, columns=softmax_columns):
    """Gradients of columns at single points, one pass back each, of the network as it is."""
    trained, rows = [p for p in network.parameters() if p.requires_grad], []
    for point in x:
        outputs = network(point.unsqueeze(0))
        for column in columns(outputs).detach()[0]:
            grads = torch.autograd.grad(
                outputs[0], trained, column, retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).detach()


def check_exact(network, x, columns=softmax_columns):
    """All exact structures against rows; returns the precisions of trained parameters."""
    trained = [name for name, p in network.named_parameters() if p.requires_grad]
    delta, sizes = ({k: of(network)[k] for k in trained} for of in (precisions, sizes_of))
    rows = rows_of(network, x, columns)
    H = rows.mT @ rows
    diagonal = torch.eye(len(H)).double()
    for structure, keep in ((Full(), None), (FunctionSpace(), None), (Diagonal(), diagonal)):
        value = structure.of(network, x, columns).log_det_ratio(delta)
        torch.testing.assert_close(value, ratio(H, delta, sizes, keep), rtol=1e-8, atol=1e-8)
    return delta


def check_other_blocks(network, x, delta):
    """Parameters without factors have their exact diagonal."""
    curvature = Kronecker(others="diagonal").of(network, x, softmax_columns)
    assert {k: draw.shape[1:] for k, draw in curvature.sample(delta).items()} == {
        k: network.get_parameter(k).shape for k in delta
    }
    block = curvature.blocks[-1]
    outside = {name: delta[name] for name in block.names}
    for name, p in network.named_parameters():
        p.requires_grad_(name in outside)
    exact = Diagonal().of(network, x, softmax_columns)
    torch.testing.assert_close(block.log_det_ratio(outside), exact.log_det_ratio(outside))
    return curvature


@pytest.mark.parametrize(("make", "text"), ODD.values(), ids=ODD)
@pytest.mark.parametrize("n", [7, 1])
def test_layers_that_are_not_what_they_seem(make, text, n):
    network, x = make(), points((3,))[:n]
    delta = check_exact(network, x)
    if n == 1:
        return
    with pytest.raises(UnsupportedError, match=text) as error:
        Kronecker().of(network, x, softmax_columns)
    for other in ("FunctionSpace", "Full", "Diagonal", 'others="diagonal"'):
        assert other in str(error.value)
    curvature = check_other_blocks(network, x, delta)
    in_factors = [k for b in curvature.blocks if isinstance(b, Factors) for k in b.names]
    assert all("2." in name for name in in_factors)


class Aliased(nn.Module):
    """A layer with two names that is called once, by keyword."""

    def __init__(self):
        super().__init__()
        self.layers = plain()
        self.last = self.layers[2]

    def forward(self, x):
        return self.last(input=self.layers[:2](x))


@pytest.mark.parametrize("make", [plain, Aliased, lambda: nn.LazyLinear(2)])
def test_layers_that_are_what_they_seem(make):
    network, x = make().double(), points((3,))
    network(x)  # a lazy layer becomes one
    assert all(isinstance(b, Factors) for b in Kronecker().of(network, x, softmax_columns).blocks)
    assert all(type(p) is nn.Parameter for p in network.parameters())
    check_exact(network, x)


def test_a_hook_is_seen_by_sums_and_one_of_all_modules_by_its_gradient():
    network, x = plain(), points((3,))
    first = Kronecker(others="diagonal").of(network, x, softmax_columns)
    handle = network[0].register_forward_hook(lambda layer, inputs, output: output)
    other = Kronecker(others="diagonal").of(network, x, softmax_columns)
    with pytest.raises(UnsupportedError, match="factors of"):
        first + other
    handle.remove()

    def triple(layer, inputs, output):
        return 3 * output if layer is network[0] else output

    handle = nn.modules.module.register_module_forward_hook(triple)
    try:
        check_exact(network, x)
        with pytest.raises(UnsupportedError, match="whose gradient is another"):
            Kronecker().of(network, x, softmax_columns)
    finally:
        handle.remove()


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
        self.head, self.batch_first = nn.Linear(4, 2), batch_first

    def forward(self, x):
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(self.layer(x, x, x)[0].mean(int(self.batch_first)))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.3))

    def forward(self, x):
        return self.scale * (self.scale * x).tanh()


def tokens():
    return torch.randint(7, (4, 3), generator=generator())


def images(*event, n=4):
    return lambda: points(event, n=n)


def behind(*modules):
    return lambda: nn.Sequential(*(make() for make in modules), nn.Flatten(), nn.LazyLinear(2))


BLOCKS = {  # with factors and blocks, without asking
    "batch norm": (
        behind(lambda: nn.Conv2d(2, 3, 2), lambda: nn.BatchNorm2d(3), nn.Tanh), images(2, 3, 3)),
    "batch norm of columns": (
        behind(lambda: nn.Linear(3, 3), lambda: nn.BatchNorm1d(3), nn.Tanh), images(3)),
    "layer norm": (behind(lambda: nn.Linear(3, 4), lambda: nn.LayerNorm(4), nn.Tanh), images(2, 3)),
    "RMS norm": (behind(lambda: nn.Linear(3, 4), lambda: nn.RMSNorm(4), nn.Tanh), images(2, 3)),
    "group norm": (
        behind(lambda: nn.Conv2d(2, 4, 2), lambda: nn.GroupNorm(2, 4), nn.Tanh), images(2, 3, 3)),
    "one dimension": (
        behind(lambda: nn.Conv1d(2, 4, 2, stride=2, padding=1), nn.Tanh), images(2, 5)),
    "three dimensions": (
        behind(lambda: nn.Conv3d(2, 2, 2, dilation=(1, 2, 1)), nn.Tanh), images(2, 3, 4, 3)),
    "one place": (behind(lambda: nn.Conv2d(2, 3, 3), nn.Tanh), images(2, 3, 3)),
    "groups": (behind(lambda: nn.Conv2d(4, 6, 2, groups=2), nn.Tanh), images(4, 3, 3)),
    "circular": (behind(lambda: nn.Conv2d(2, 3, 2, padding=1, padding_mode="circular"), nn.Tanh),
                 images(2, 3, 3)),
}  # fmt: skip
OTHERS = {
    "transposed": (behind(lambda: nn.ConvTranspose2d(2, 3, 2), nn.Tanh), images(2, 2, 2)),
    "embedding": (behind(lambda: nn.Embedding(7, 3), nn.Tanh), tokens),
    "bag": (behind(lambda: nn.EmbeddingBag(7, 3), nn.Tanh), tokens),
    "attention": (lambda: Attention(True), images(3, 4)),
    "attention, points second": (lambda: Attention(False), images(3, 4)),
    "encoder": (
        behind(lambda: nn.Embedding(7, 4),
               lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)), tokens),
    "LSTM": (lambda: Recurrent(nn.LSTM), images(3, 3)),
    "GRU": (lambda: Recurrent(nn.GRU), images(3, 3)),
    "PReLU": (behind(lambda: nn.Linear(3, 2), lambda: nn.PReLU(2), Scaled), images(3)),
}  # fmt: skip
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


@pytest.mark.parametrize("name", CASES)
def test_structures_that_are_exact_and_gradients_of_outputs(name):
    network, x = made(CASES[name])
    delta = check_exact(network, x)
    eye = torch.eye(2).double()
    exact = sample_gradients(network, x, lambda f: eye.expand(len(f), 2, 2))
    outer = output_gradients(network, x)
    assert set(outer) == set(exact)
    for kind, rows in exact.items():
        gradients = outer[kind]
        gradients = gradients.dense() if isinstance(gradients, OuterProducts) else gradients
        torch.testing.assert_close(gradients, rows)
    draws = Diagonal().of(network, x, softmax_columns).sample(delta)
    assert {k: v.shape[1:] for k, v in draws.items()} == {
        k: p.shape for k, p in network.named_parameters()
    }
    if name in OTHERS:  # vmap has a wrong rule for the PReLU of one column
        check_exact(network, x, lambda f: softmax_columns(f)[:, :1])
        with pytest.raises(UnsupportedError, match="which is no linear layer"):
            Kronecker().of(network, x, softmax_columns)
        check_other_blocks(network, x, delta)


@pytest.mark.parametrize("name", [name for name in BLOCKS if "norm" in name])
def test_scale_and_shift_have_an_exact_block(name):
    network, x = made(BLOCKS[name])
    delta, rows = precisions(network), rows_of(network, x)
    curvature = Kronecker().of(network, x, softmax_columns)
    (block,) = [b for b in curvature.blocks if isinstance(b, Block)]
    assert set(block.names) <= {"1.weight", "1.bias"}
    sizes = {k: sizes_of(network)[k] for k in block.names}
    names = [k for k, size in sizes_of(network).items() for _ in range(size)]
    rows = rows[:, torch.tensor([k in sizes for k in names])]
    exact = ratio(rows.mT @ rows, {k: delta[k] for k in sizes}, sizes)
    torch.testing.assert_close(block.log_det_ratio(delta), exact)
    first, other = (Kronecker().of(network, batch, softmax_columns) for batch in (x[:1], x[1:]))
    torch.testing.assert_close((first + other).log_det_ratio(delta), curvature.log_det_ratio(delta))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_groups_of_a_convolution_are_convolutions_of_their_own(sharing):
    network, x = made(BLOCKS["groups"])
    delta, count = precisions(network), 20_000
    curvature = Kronecker(sharing).of(network, x, softmax_columns)
    factor, draws = curvature.blocks[0], curvature.sample(delta, 1.3, count)

    class Alone(nn.Module):
        """The second of two groups is a constant."""

        def __init__(self, group):
            super().__init__()
            self.group, self.layer = group, nn.Conv2d(2, 3, 2).double()
            with torch.no_grad():
                rows = slice(3 * group, 3 * group + 3)
                self.layer.weight.copy_(network[0].weight[rows])
                self.layer.bias.copy_(network[0].bias[rows])

        def forward(self, x):
            both = list(network[0](x).detach().split(3, dim=1))
            both[self.group] = self.layer(x[:, 2 * self.group : 2 * self.group + 2])
            return network[1:](torch.cat(both, dim=1))

    for group in range(2):
        (alone,) = Kronecker(sharing).of(Alone(group), x, softmax_columns).blocks
        B, A = alone.gradients.matrix(), alone.inputs.matrix() / alone.count
        torch.testing.assert_close(factor.gradients.matrix()[group], B)
        torch.testing.assert_close(factor.inputs.matrix()[group] / factor.count, A)
        for name, block in (("0.weight", torch.kron(B, A)), ("0.bias", B)):
            exact = torch.linalg.inv(1.3 * block + delta[name] * torch.eye(len(block)))
            values = draws[name][:, 3 * group : 3 * group + 3].flatten(1)
            deviation = exact.diagonal().sqrt()
            error = (values.mT @ values / count - exact) / torch.outer(deviation, deviation)
            assert float(error.abs().max()) < 7 / count**0.5
            rows = {k: torch.zeros(1, 2, *p.shape).double() for k, p in network.named_parameters()}
            drawn = torch.randn(1, 2, 3, *rows[name].shape[3:], dtype=torch.float64)
            rows[name][:, :, 3 * group : 3 * group + 3] = drawn
            flat = drawn.flatten(2)
            covariance = curvature.output_covariance(delta, 1.3)(rows)
            torch.testing.assert_close(covariance, flat @ exact @ flat.mT)


@pytest.mark.parametrize("structure", [FunctionSpace(), Kronecker(), Diagonal()])
@pytest.mark.parametrize("name", ["batch norm", "layer norm", "groups"])
def test_gradients_of_what_moves_the_points(structure, name):
    network, x = made(BLOCKS[name])
    delta, away = precisions(network), points(x.shape[1:], n=4, seed=2)

    def function(shift):
        return structure.of(network, x + shift * away, softmax_columns).log_det_ratio(delta)

    assert torch.autograd.gradcheck(function, [torch.tensor(0.1).double().requires_grad_()])


@pytest.mark.parametrize("name", ["groups", "layer norm"])
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
        factor = curvature.blocks[0]
        values.append((diagonal, factor.inputs.matrix(), factor.count,
                       curvature.log_det_ratio(precisions(network))))  # fmt: skip
    for other in values[1:]:
        torch.testing.assert_close(values[0], other)


CONVOLUTIONS = {
    "lines": (nn.Conv1d, dict(kernel_size=3, padding=2, dilation=2)),
    "even": (nn.Conv2d, dict(kernel_size=(4, 2), groups=2, bias=False)),
    "reflected": (nn.Conv2d, dict(kernel_size=(3, 1), padding=(2, 0), padding_mode="reflect")),
    "wide steps": (nn.Conv2d, dict(kernel_size=3, stride=(1, 2), dilation=(2, 1))),
    "high steps": (nn.Conv2d, dict(kernel_size=3, stride=(2, 1), padding=1)),
    "few lines": (nn.Conv2d, dict(kernel_size=(6, 2))),
    "volumes": (nn.Conv3d, dict(kernel_size=(2, 3, 2), padding=(1, 0, 1), groups=2)),
}


@pytest.mark.parametrize(("kind", "options"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_products_of_patches(kind, options):
    # The gradient of an output by the weight of its channel is the patch of its place.
    layer = kind(2, 2, **options).double()
    x = points((2, 7, 6, 3)[: layer.weight.ndim - 1], n=20).requires_grad_()

    def outputs(weight):
        made = torch.func.functional_call(layer, {"weight": weight}, (x,))
        return made.transpose(0, 1).flatten(1)

    patches = torch.func.jacrev(outputs)(layer.weight).flatten(3)
    patches = torch.stack([patches[k, :, k] for k in range(0, 2, 2 // layer.groups)])
    expected = patches.mT @ patches
    record = layers.LinearRecord(layer, "weight", None, len(x), x, [layer(x)])
    products, count = record.input_products(reduce=False)
    assert (count, products.is_rows) == (patches.shape[1], False)
    matrix = products.matrix().view_as(expected)
    torch.testing.assert_close(matrix, expected)
    weights = points(expected.shape[1:], n=len(expected), seed=1)
    gradients = [torch.autograd.grad((m * weights).sum(), x)[0] for m in (matrix, expected)]
    torch.testing.assert_close(*gradients)


def test_factors_of_fewer_points_than_inputs_stay_rows():
    network = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, delta = points((9,), n=12), precisions(network)
    whole = Kronecker().of(network, x, softmax_columns)
    batches = [Kronecker().of(network, batch, softmax_columns) for batch in x.split((2, 3, 7))]
    few = batches[0] + batches[1]
    assert [c.blocks[0].inputs.is_rows for c in (*batches, few, whole)] == [True] * 4 + [False]
    for curvature in (whole, few, few + batches[2]):
        exact = sum(
            (torch.kron(B, A / f.count) / delta[f.weight] + torch.eye(len(A) * len(B))).logdet()
            + (B / delta[f.bias] + torch.eye(len(B))).logdet()
            for f in curvature.blocks for B, A in [(f.gradients.matrix(), f.inputs.matrix())]
        )  # fmt: skip
        torch.testing.assert_close(curvature.log_det_ratio(delta), exact)
    draws = [c.sample(delta, count=2) for c in (whole, few + batches[2])]
    torch.testing.assert_close(*draws)
