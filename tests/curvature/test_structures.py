"""Every structure of the curvature against dense references, in float64."""

from __future__ import annotations

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
from gpclml.errors import UnknownNameError, UnsupportedError
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


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_log_determinants_of_the_dense_matrix(make, scale):
    network, event = make()
    x, delta, sizes = points(event), precisions(network), sizes_of(network)
    H = scale * dense(network, x)

    def value(structure):
        return structure.of(network, x, softmax_columns).log_det_ratio(delta, scale)

    full = ratio(H, delta, sizes)
    for structure in (Full("parameters"), Full("samples"), Full(), FunctionSpace()):
        torch.testing.assert_close(value(structure), full)
    by_layer = ratio(H, delta, sizes, mask(sizes, layer))
    torch.testing.assert_close(value(BlockDiagonal("layer")), by_layer)
    by_parameter = ratio(H, delta, sizes, mask(sizes, str))
    torch.testing.assert_close(value(BlockDiagonal("parameter")), by_parameter)
    diagonal = ratio(H, delta, sizes, torch.eye(len(H)).double())
    torch.testing.assert_close(value(Diagonal()), diagonal)
    assert full <= by_layer <= by_parameter <= diagonal  # Immer et al. 2023, Theorem 1


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_factors_of_explicit_sums(make, sharing):
    network, event = make()
    x, delta = points(event), precisions(network)
    columns = softmax_columns(network(x)).detach()
    expected = reference.kronecker_blocks(network, x, columns, sharing)
    curvature = Kronecker(sharing).of(network, x, softmax_columns)
    total = 0.0
    for name, block in expected.items():
        eye = torch.eye(len(block)).double()
        total = total + torch.logdet(eye + 1.7 * block / delta[name])
    assert {name for one in curvature.factors for name in one.eigenvalues} == set(delta)
    torch.testing.assert_close(curvature.log_det_ratio(delta, 1.7), total)


def test_kronecker_is_exact_for_one_point_of_a_plain_layer():
    network = torch.nn.Linear(3, 2).double()
    x, delta = points((3,), n=1), precisions(network)
    one, other = (
        structure.of(network, x, softmax_columns).log_det_ratio(delta)
        for structure in (Kronecker(), BlockDiagonal("parameter"))
    )
    torch.testing.assert_close(one, other)


def test_kronecker_is_no_bound():
    network = torch.nn.Linear(1, 1, bias=False).double()
    x = torch.tensor([[0.0], [2.0]]).double()
    given = torch.tensor([0.0, 2.0]).double().reshape(2, 1, 1)
    delta = {"weight": torch.ones(()).double()}
    one, full = (
        float(structure.of(network, x, lambda _: given).log_det_ratio(delta))
        for structure in (Kronecker(), Full())
    )
    assert one == pytest.approx(math.log(9))
    assert full == pytest.approx(math.log(17))


STRUCTURES = {
    "parameters": Full("parameters"),
    "samples": Full("samples"),
    "blocks": BlockDiagonal(),
    "diagonal": Diagonal(),
    "kernel": FunctionSpace(),
    "expand": Kronecker(),
    "reduce": Kronecker("reduce"),
}


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize("make", [mlp, cnn])
def test_gradients_of_precisions_scale_and_what_moves_the_points(structure, make):
    network, event = make()
    base, direction = points(event), points(event, seed=2)
    delta = precisions(network)

    def function(shift, scale, *values):
        named = dict(zip(delta, values, strict=True))
        x = base + shift * direction
        return structure.of(network, x, softmax_columns).log_det_ratio(named, scale)

    inputs = [torch.tensor(0.1).double(), torch.tensor(1.3).double(), *delta.values()]
    inputs = [one.clone().requires_grad_() for one in inputs]
    assert torch.autograd.gradcheck(function, inputs, atol=1e-5)
    function(*inputs).backward()
    assert all(p.grad is None for p in network.parameters())


def test_frozen_parameters_have_no_part():
    network, event = mlp()
    network[0].bias.requires_grad_(False)
    x, delta = points(event), precisions(network)
    keep = [name for name in delta if name != "0.bias"]
    values = [
        structure.of(network, x, softmax_columns).log_det_ratio({k: delta[k] for k in keep})
        for structure in (Full(), FunctionSpace())
    ]
    torch.testing.assert_close(*values)
    factors = Kronecker().of(network, x, softmax_columns).factors
    assert {name for one in factors for name in one.eigenvalues} == set(keep)


@pytest.mark.parametrize("structure", [Full(), FunctionSpace(), Kronecker(), Diagonal()])
def test_float32_is_near_float64(structure):
    network, event = mlp()
    x, delta = points(event), precisions(network)
    double = structure.of(network, x, softmax_columns).log_det_ratio(delta)
    single = structure.of(network.float(), x.float(), softmax_columns).log_det_ratio(
        {name: value.float() for name, value in delta.items()}
    )
    assert single.dtype == torch.float32
    assert abs(float(single) - float(double)) < 1e-3


@pytest.mark.parametrize("structure", [
    Full("parameters"), Full("samples"), BlockDiagonal(), FunctionSpace(),
])  # fmt: skip
def test_float32_keeps_what_weakly_determined_weights_have(structure):
    network, event = mlp()
    x, delta = points(event), precisions(network)
    scale = 1e7  # of a regression whose noise has a deviation of 3e-4

    def value(dtype):
        curvature = structure.of(network.to(dtype), x.to(dtype), softmax_columns)
        of_weights = {name: precision.to(dtype) for name, precision in delta.items()}
        return curvature.log_det_ratio(of_weights, scale)

    double, single = value(torch.float64), value(torch.float32)
    assert single.dtype == torch.float32
    assert abs(float(single) - float(double)) < 1e-4 * float(double)


@pytest.mark.parametrize("structure", [Full("parameters"), Full("samples")])
def test_float32_posteriors_are_near_float64(structure):
    network, event = mlp()
    x, delta = points(event), precisions(network)
    found = []
    for dtype in (torch.float64, torch.float32):
        curvature = structure.of(network.to(dtype), x.to(dtype), softmax_columns)
        of_weights = {name: precision.to(dtype) for name, precision in delta.items()}
        covariance = curvature.output_covariance(of_weights, 50.0)
        rows = output_gradients(network, x.to(dtype), 2)
        draws = curvature.sample(of_weights, 50.0, 2, torch.Generator().manual_seed(0))
        assert {value.dtype for value in (covariance(rows), *draws.values())} == {dtype}
        found.append(covariance(rows))
    torch.testing.assert_close(found[1].double(), found[0], atol=1e-4, rtol=1e-3)


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="form"):
        Full("sample")
    with pytest.raises(UnknownNameError, match="by"):
        BlockDiagonal("layers")
    with pytest.raises(UnknownNameError, match="Did you mean 'expand'"):
        Kronecker("expanded")
    with pytest.raises(UnknownNameError, match="others"):
        Kronecker(others="diag")


def test_rounding_does_not_fill_the_null_space_of_a_factor():
    network = torch.nn.Linear(600, 2).double()
    with torch.no_grad():
        network.weight.mul_(0.1)
    x = points((600,), n=50)
    delta = {name: torch.tensor(0.1).double() for name, _ in network.named_parameters()}
    double = Kronecker().of(network, x, softmax_columns).log_det_ratio(delta)
    single = (
        Kronecker()
        .of(network.float(), x.float(), softmax_columns)
        .log_det_ratio({name: value.float() for name, value in delta.items()})
    )
    assert abs(float(single) - float(double)) < 0.02


SUMMABLE = {name: one for name, one in STRUCTURES.items() if name != "kernel"}


@pytest.mark.parametrize("structure", SUMMABLE.values(), ids=SUMMABLE)
@pytest.mark.parametrize("make", [mlp, cnn])
def test_sums_over_batches(structure, make):
    network, event = make()
    x, delta = points(event), precisions(network)
    whole = structure.of(network, x, softmax_columns).log_det_ratio(delta)
    first, *rest = (structure.of(network, part, softmax_columns) for part in x.split([3, 2, 2]))
    total = sum(rest, first)
    torch.testing.assert_close(total.log_det_ratio(delta), whole)


def test_a_kernel_is_of_one_batch():
    network, event = mlp()
    one = FunctionSpace().of(network, points(event), softmax_columns)
    with pytest.raises(UnsupportedError, match="Use Full"):
        one + one


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_full_curvature_of_a_linear_layer_is_that_of_its_gradients(bias, dtype):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3, bias=bias).to(dtype)
    x, columns = torch.randn(30, 4, dtype=dtype), torch.randn(30, 2, 3, dtype=dtype)
    made = Full().of(layer, x, lambda outputs: columns)
    rows = sample_gradients(layer, x, lambda outputs: columns)
    flat = torch.cat([one.flatten(2) for one in rows.values()], -1).flatten(0, 1).double()
    assert made.names == list(rows)
    torch.testing.assert_close(made.blocks[0].matrix, flat.mT @ flat, rtol=1e-5, atol=1e-5)
    few = Full().of(layer, x[:2], lambda outputs: columns[:2])
    assert few.blocks[0].is_rows
    both = (made + few).blocks[0].matrix
    torch.testing.assert_close(both, flat.mT @ flat + flat[:4].mT @ flat[:4], rtol=1e-5, atol=1e-5)
