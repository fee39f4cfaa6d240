"""Every structure of the curvature against dense references, in float64."""

import math

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
from gpclml.errors import (
    ArgumentError,
    ModelModeError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from network_cases import (
    NETWORKS,
    cnn,
    dense,
    layer,
    mask,
    mlp,
    points,
    precisions,
    ratio,
    sizes_of,
    softmax_columns,
)  # fmt: skip

EXACT = [Full("parameters"), Full("samples"), Full(), FunctionSpace()]
STRUCTURES = {
    "parameters": Full("parameters"),
    "samples": Full("samples"),
    "blocks": BlockDiagonal(),
    "diagonal": Diagonal(),
    "kernel": FunctionSpace(),
    "expand": Kronecker(),
    "reduce": Kronecker("reduce"),
}
SUMMABLE = {name: structure for name, structure in STRUCTURES.items() if name != "kernel"}


def value(structure, network, x, delta, scale=1.0):
    return structure.of(network, x, softmax_columns).log_det_ratio(delta, scale)


@pytest.mark.parametrize("make", NETWORKS)
def test_log_determinants_of_the_dense_matrix(make):
    network, event = make()
    x, delta, sizes = points(event), precisions(network), sizes_of(network)
    H = 2.5 * dense(network, x)
    full = ratio(H, delta, sizes)
    for structure in EXACT:
        torch.testing.assert_close(value(structure, network, x, delta, 2.5), full)
    keeps = {
        BlockDiagonal("layer"): mask(sizes, layer),
        BlockDiagonal("parameter"): mask(sizes, str),
        Diagonal(): torch.eye(len(H)).double(),
    }
    for structure, keep in keeps.items():  # each is looser: Immer et al. 2023, Theorem 1
        bound = value(structure, network, x, delta, 2.5)
        torch.testing.assert_close(bound, ratio(H, delta, sizes, keep))
        assert bound >= full
        full = bound


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_factors_of_explicit_sums(make, sharing):
    network, event = make()
    x, delta = points(event), precisions(network)
    columns = softmax_columns(network(x)).detach()
    total = 0.0
    for name, block in reference.kronecker_blocks(network, x, columns, sharing).items():
        total = total + torch.logdet(torch.eye(len(block)).double() + 1.7 * block / delta[name])
    torch.testing.assert_close(value(Kronecker(sharing), network, x, delta, 1.7), total)


def test_kronecker_is_no_bound():
    network = torch.nn.Linear(1, 1, bias=False).double()
    x = torch.tensor([[0.0], [2.0]]).double()
    given = torch.tensor([0.0, 2.0]).double().reshape(2, 1, 1)
    delta = {"weight": torch.ones(()).double()}
    kronecker, full = (
        float(structure.of(network, x, lambda _: given).log_det_ratio(delta))
        for structure in (Kronecker(), Full())
    )
    assert kronecker == pytest.approx(math.log(9))
    assert full == pytest.approx(math.log(17))


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize("make", [mlp, cnn])
def test_gradients_of_precisions_scale_and_what_moves_the_points(structure, make):
    network, event = make()
    base, direction = points(event), points(event, seed=2)
    delta = precisions(network)

    def function(shift, scale, *values):
        named = dict(zip(delta, values, strict=True))
        return value(structure, network, base + shift * direction, named, scale)

    inputs = [torch.tensor(0.1).double(), torch.tensor(1.3).double(), *delta.values()]
    inputs = [number.clone().requires_grad_() for number in inputs]
    assert torch.autograd.gradcheck(function, inputs, atol=1e-5)
    function(*inputs).backward()
    assert all(p.grad is None for p in network.parameters())


def test_frozen_parameters_have_no_part():
    network, event = mlp()
    network[0].bias.requires_grad_(False)
    x, delta = points(event), precisions(network)
    del delta["0.bias"]
    values = [value(structure, network, x, delta) for structure in (Full(), FunctionSpace())]
    torch.testing.assert_close(*values)
    assert set(Kronecker().of(network, x, softmax_columns).names) == set(delta)


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_float32_is_near_float64(structure):
    """Also with the scale of a regression whose noise has a deviation of 3e-4."""
    network, event = mlp()
    x, delta = points(event), precisions(network)
    single_delta = {name: number.float() for name, number in delta.items()}
    double = [float(value(structure, network, x, delta, scale)) for scale in (1.0, 1e7)]
    network.float()
    for scale, expected in zip((1.0, 1e7), double, strict=True):
        single = value(structure, network, x.float(), single_delta, scale)
        assert single.dtype == torch.float32
        dense_one = scale == 1 or not isinstance(structure, Diagonal | Kronecker)
        assert float(single) == pytest.approx(expected, rel=1e-4 if dense_one else 1e-2)


def test_rounding_does_not_fill_the_null_space_of_a_factor():
    network = torch.nn.Linear(600, 2).double()
    with torch.no_grad():
        network.weight.mul_(0.1)
    x = points((600,), n=50)
    delta = {name: torch.tensor(0.1).double() for name, _ in network.named_parameters()}
    double = value(Kronecker(), network, x, delta)
    delta = {name: number.float() for name, number in delta.items()}
    single = value(Kronecker(), network.float(), x.float(), delta)
    assert abs(float(single) - float(double)) < 0.02


@pytest.mark.parametrize("structure", SUMMABLE.values(), ids=SUMMABLE)
@pytest.mark.parametrize("make", [mlp, cnn])
def test_sums_over_batches(structure, make):
    network, event = make()
    x, delta = points(event), precisions(network)
    first, *others = (structure.of(network, batch, softmax_columns) for batch in x.split([3, 2, 2]))
    total = sum(others, first).log_det_ratio(delta)
    torch.testing.assert_close(total, value(structure, network, x, delta))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_full_curvature_of_a_linear_layer_is_that_of_its_gradients(bias, dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 3, bias=bias).to(dtype)
    x, columns = torch.randn(30, 4, dtype=dtype), torch.randn(30, 2, 3, dtype=dtype)
    made = Full().of(linear, x, lambda outputs: columns)
    rows = sample_gradients(linear, x, lambda outputs: columns)
    flat = torch.cat([g.flatten(2) for g in rows.values()], -1).flatten(0, 1).double()
    assert made.names == list(rows)
    torch.testing.assert_close(made.matrix, flat.mT @ flat, rtol=1e-5, atol=1e-5)
    few = Full().of(linear, x[:2], lambda outputs: columns[:2])
    assert few.is_rows
    both = (made + few).matrix
    torch.testing.assert_close(both, flat.mT @ flat + flat[:4].mT @ flat[:4], rtol=1e-5, atol=1e-5)


# Posteriors: draws and the covariance of linear outputs against the inverse.

COUNT, SCALE = 40_000, 1.7


def setting():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))
    return network.double(), points((2,)), precisions(network)


def posterior_covariance(structure, network, x, delta):
    H, sizes = dense(network, x), sizes_of(network)
    if isinstance(structure, Kronecker):
        columns = softmax_columns(network(x)).detach()
        blocks = reference.kronecker_blocks(network, x, columns, "expand")
        H = torch.block_diag(*[blocks[name] for name in sizes])
    if isinstance(structure, BlockDiagonal):
        H = H * mask(sizes, layer)
    if isinstance(structure, Diagonal):
        H = torch.diag(H.diagonal())
    prior = torch.cat([delta[name].expand(size) for name, size in sizes.items()])
    return torch.linalg.inv(SCALE * H + torch.diag(prior)).detach()


POSTERIORS = {name: structure for name, structure in SUMMABLE.items() if name != "reduce"}


@pytest.mark.parametrize("structure", POSTERIORS.values(), ids=POSTERIORS)
def test_covariances_of_draws_and_of_outputs(structure):
    network, x, delta = setting()
    curvature = structure.of(network, x, softmax_columns)
    expected = posterior_covariance(structure, network, x, delta)
    draws = curvature.sample(delta, SCALE, COUNT, torch.Generator().manual_seed(0))
    assert {name: draw.shape[1:] for name, draw in draws.items()} == {
        name: p.shape for name, p in network.named_parameters()
    }
    values = torch.cat([draws[name].flatten(1) for name in delta], dim=-1)
    deviation = expected.diagonal().sqrt()
    assert float((values.mean(0) / deviation).abs().max()) < 5 / COUNT**0.5
    # Entries of a sample covariance have a variance of (C_ii C_jj + C_ij²) / n.
    spread = (torch.outer(deviation**2, deviation**2) + expected**2) / COUNT
    error = values.mT @ values / COUNT - expected
    assert float((error / spread.sqrt()).abs().max()) < 5

    at, eye = points((2,), n=3, seed=2), torch.eye(2).double()
    gradients = sample_gradients(network, at, lambda outputs: eye.expand(len(outputs), 2, 2))
    function = curvature.output_covariance(delta, SCALE)
    covariance = function(gradients)
    J = torch.cat([gradients[name].flatten(2) for name in delta], dim=-1)
    torch.testing.assert_close(covariance, J @ expected @ J.mT, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(function(output_gradients(network, at)), covariance)

    single = structure.of(network.float(), x.float(), softmax_columns)
    delta = {name: number.float() for name, number in delta.items()}
    outputs = single.output_covariance(delta, SCALE)(output_gradients(network, at.float()))
    again = single.sample(delta, SCALE, 2, torch.Generator().manual_seed(0))
    assert {tensor.dtype for tensor in (outputs, *again.values())} == {torch.float32}
    torch.testing.assert_close(outputs.double(), covariance, atol=1e-4, rtol=1e-3)


def test_a_seed_gives_the_same_draws():
    network, x, delta = setting()
    curvature = Kronecker().of(network, x, softmax_columns)
    first, same, other, unseeded = (
        curvature.sample(delta, count=3, generator=generator)["0.weight"]
        for generator in (*(torch.Generator().manual_seed(seed) for seed in (0, 0, 1)), None)
    )
    assert torch.equal(first, same)
    assert torch.equal(first, unseeded)
    assert not torch.equal(first, other)


# What is refused.


class Mixing(torch.nn.Module):
    """Outputs at a point are less the mean over all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        outputs = self.layer(x)
        return outputs - outputs.mean(0)


def behind_linear(*layers):
    return torch.nn.Sequential(torch.nn.Linear(3, 2), *layers)


@pytest.mark.parametrize(
    ("network", "columns", "error", "text"),
    [
        (torch.nn.Identity(), None, ArgumentError, "without trainable parameters"),
        (behind_linear(torch.nn.Dropout()), None, ModelModeError, "Dropout"),
        (behind_linear(torch.nn.BatchNorm1d(2)), None, ModelModeError, "BatchNorm1d"),
        (behind_linear(torch.nn.BatchNorm1d(2, track_running_stats=False)).eval(), None,
         ModelModeError, "without running statistics"),
        (Mixing(), None, UnsupportedError, "changes with the other points"),
        (behind_linear(), lambda f: f.unsqueeze(1) * torch.nan, NonFiniteError,
         "output curvature"),
        (behind_linear(torch.nn.Unflatten(1, (2, 1))), None, ShapeError, "module"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("structure", [Kronecker(), FunctionSpace(), Full(), Diagonal()])
def test_networks_without_such_a_curvature(structure, network, columns, error, text):
    with pytest.raises(error, match=text):
        structure.of(network, points((3,)).float(), columns or softmax_columns)


def test_wrong_names_and_what_a_kernel_does_not_have():
    for call, text in [
        (lambda: Full("sample"), "form"),
        (lambda: BlockDiagonal("layers"), "by"),
        (lambda: Kronecker("expanded"), "Did you mean 'expand'"),
        (lambda: Kronecker(others="diag"), "others"),
    ]:
        with pytest.raises(UnknownNameError, match=text):
            call()
    network, x, delta = setting()
    kernel = FunctionSpace().of(network, x, softmax_columns)
    for call in (
        lambda: kernel + kernel,
        lambda: kernel.output_covariance(delta),
        lambda: kernel.sample(delta),
    ):
        with pytest.raises(UnsupportedError, match="Use Full"):
            call()
