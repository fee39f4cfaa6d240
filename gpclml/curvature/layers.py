"""Gradients at single points, of plain layers as products of inputs and output gradients.

A layer is recorded only if its input and the gradient of its output determine the gradient of its
parameters: it is a linear layer, a convolution or a normalization itself, nothing changes its
weights or its output, its parameters are used once, and its rows are those of points. The
parameters of all other modules are returned by name.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.nn.utils.parametrize import is_parametrized

from gpclml.curvature.structure import (
    Cotangents,
    call_with,
    check_cotangents,
    check_network,
    check_own_outputs,
    differing,
    fresh_parameters,
    in_single,
    layer_of,
    probe_weights,
    twice_differentiable,
)
from gpclml.errors import UnsupportedError
from gpclml.linalg import symmetric_product

_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_CHANNEL_NORMS = (
    torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.GroupNorm,
)  # fmt: skip
_NORMS = (*_CHANNEL_NORMS, torch.nn.LayerNorm, torch.nn.RMSNorm)
_SUPPORTED = (torch.nn.Linear, *_CONVOLUTIONS, *_NORMS)
_KINDS = ("weight", "bias")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_ROWS = "whose rows are not those of points in their order"
_CHUNK = 2**20  # numbers of the inputs of places of a chunk of points
_BYTES = 2**26  # of what layers return, and of gradients by it, in memory at a time
_NUMBERS = 2**24  # of products of points or of pairs of them in memory at a time


@dataclass(frozen=True)
class OuterProducts:
    r"""Gradients :math:`g a^\top` of the weight of a layer that is applied once to each point.

    Attributes:
        gradients: g of each output, ``(N, C, out)``.
        inputs: a, ``(N, in)``; of a convolution with one place ``(N, in, *kernel)``.
    """

    gradients: Tensor
    inputs: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the gradients, ``(N, C, out, *in)``."""
        return torch.Size((*self.gradients.shape, *self.inputs.shape[1:]))

    def __getitem__(self, points: slice) -> OuterProducts:
        return OuterProducts(self.gradients[points], self.inputs[points])

    def dense(self) -> Tensor:
        """The gradients, ``(N, C, out, *in)``."""
        products = self.gradients.unsqueeze(-1) * self.inputs.flatten(1)[:, None, None]
        return products.reshape(self.shape)

    def weighted_products(self, weights: Tensor, together: int = 1) -> Tensor:
        """Inner products ``(N / q, q C, q C)`` with a weight for each entry, ``(out, *in)``.

        No gradient is formed: sums over inputs come first, for each pair of points of a group.
        """
        a, g = (v.unflatten(0, (-1, together)) for v in (self.inputs.flatten(1), self.gradients))
        (groups, q, c, out), weights = g.shape, weights.flatten(1).mT
        step = max(1, _NUMBERS // max(1, groups * q * (a.shape[-1] + c * out)))
        rows = []
        for first in range(0, q, step):
            some = slice(first, first + step)
            sums = (a[:, some].unsqueeze(2) * a.unsqueeze(1)) @ weights  # (groups, rows, q, out)
            scaled = g[:, some].unsqueeze(2) * sums.unsqueeze(3)
            products = scaled @ g.unsqueeze(1).mT  # (groups, rows, q, C, C)
            rows.append(products.transpose(2, 3).reshape(groups, -1, q * c))
        return torch.cat(rows, dim=1)


@dataclass(frozen=True)
class LayerRecord:
    """Inputs and output gradients of a layer that is linear in its weight and bias.

    It is applied at T places of each point, one in a plain layer. Versions of a point that a
    network averages over count as places. Rows are those of the points, one after the other.

    Attributes:
        layer: The layer.
        weight: Name of its weight in the network; None if it is not trained.
        bias: Name of its bias; None if it is not trained, or there is none.
        num_points: Number of points N.
        raw_inputs: Inputs of the layer, in its own layout.
        raw_gradients: Gradients of its outputs, one for each column of output curvature.
    """

    layer: torch.nn.Module
    weight: str | None
    bias: str | None
    num_points: int
    raw_inputs: Tensor
    raw_gradients: Sequence[Tensor]

    def gradients(self) -> dict[str, Tensor | OuterProducts]:
        """Gradients at each point by the parameter's name, ``(N, K, *shape)``."""
        raise NotImplementedError

    def _sum_versions(self, rows: Tensor) -> Tensor:
        """Rows summed over versions of a point."""
        return rows.unflatten(0, (self.num_points, -1)).sum(1)


class NormRecord(LayerRecord):
    """A normalization: its scale and shift."""

    def gradients(self) -> dict[str, Tensor | OuterProducts]:
        """Gradients at each point by the parameter's name, ``(N, K, *shape)``."""
        # With a scale of one and no shift the layer returns what multiplies its scale.
        plain = {
            kind: torch.full_like(p, float(kind == "weight"))
            for kind, p in self.layer.named_parameters()
        }
        normalized = functional_call(self.layer, plain, (self.raw_inputs,))
        return {
            name: torch.stack([self._sum_places(g * value) for g in self.raw_gradients], dim=1)
            for name, value in ((self.weight, normalized), (self.bias, 1.0)) if name is not None
        }  # fmt: skip

    def _sum_places(self, values: Tensor) -> Tensor:
        """Sums over places, ``(N, *shape)``."""
        # These have a scale for each channel, the others for each entry of the last dimensions.
        if isinstance(self.layer, _CHANNEL_NORMS):
            return self._sum_versions(values.flatten(2).sum(2) if values.ndim > 2 else values)
        shape = next(p.shape for p in self.layer.parameters())
        return values.reshape(self.num_points, -1, *shape).sum(1)


class LinearRecord(LayerRecord):
    """A linear map of G groups of inputs, applied at T places: ``Linear`` or a convolution."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return cast(Tensor, self.layer.weight).shape

    def gradients(self) -> dict[str, Tensor | OuterProducts]:
        """Gradients at each point by the parameter's name; of a plain weight as products."""
        columns, sums = list(self._gradients()), self._summed_gradients()
        gradients: dict[str, Tensor | OuterProducts] = {}
        rows, groups, _, places = columns[0].shape
        if self.weight is not None and groups == 1 and rows * places == self.num_points:
            gradients[self.weight] = OuterProducts(
                sums, self._mean_inputs().reshape(-1, *self.shape[1:])
            )
        elif self.weight is not None:
            gradients[self.weight] = self._weight_gradients(columns)
        return gradients if self.bias is None else gradients | {self.bias: sums}

    def _weight_gradients(self, columns: Sequence[Tensor]) -> Tensor:
        """Gradients of the weight of a layer with several places, ``(N, K, *shape)``."""
        # Patches and gradients of few points stay in the caches.
        versions = len(self.raw_inputs) // self.num_points
        input_size = math.prod(self.shape[1:]) * self._groups * columns[0].shape[-1]
        step = versions * max(1, _CHUNK // (versions * max(math.prod(self.shape), input_size)))
        chunks = []
        for start in range(0, len(self.raw_inputs), step):
            chunk = slice(start, start + step)
            inputs = self._inputs_of(self.raw_inputs[chunk]).mT
            products = [(g[chunk] @ inputs).unflatten(0, (-1, versions)).sum(1) for g in columns]
            chunks.append(torch.stack(products, 1))
        return torch.cat(chunks).flatten(2).unflatten(2, self.shape)

    def _mean_inputs(self) -> Tensor:
        """Inputs of the map, their mean over places, ``(N, G, in)``."""
        inputs = self._inputs_of(self.raw_inputs).mean(3)
        return inputs.unflatten(0, (self.num_points, -1)).mean(1)

    def _summed_gradients(self) -> Tensor:
        """Gradients of its outputs, summed over places, ``(N, K, out)``: those of the bias."""
        columns = [self._sum_versions(g.sum(3)).flatten(1) for g in self._gradients()]
        return torch.stack(columns, 1)

    def input_products(self, reduce: bool) -> tuple[Products, int]:
        r"""The sum of :math:`a a^\top`, float64, for each of several groups; number of its terms.

        With ``reduce`` a is the mean over places, else each place is a term.
        """
        # In float64, so that rounding does not fill the null space of many inputs; some rows at a
        # time, since patches of images take many times the memory of images.
        if reduce:
            products = Products.of(self._mean_inputs().double().unsqueeze(-1))
            return products, self.num_points
        places = next(self._gradients()).shape[-1]
        channels, count = math.prod(self.shape[1:]), len(self.raw_inputs) * places
        shifts = self._moves_by_lines and count >= channels
        numbers = channels * self._groups * places // (self.shape[2] if shifts else 1)
        products = (
            _products_of_shifts(self.layer, rows.double())
            if shifts else Products.of(self._inputs_of(rows.double()))
            for rows in self.raw_inputs.split(max(1, _CHUNK // numbers))
        )  # fmt: skip
        return functools.reduce(operator.add, products), count

    @property
    def _moves_by_lines(self) -> bool:
        """Whether it is a convolution for which :func:`_products_of_shifts` is of use."""
        if not isinstance(self.layer, _CONVOLUTIONS) or self.layer.stride[0] > 1:
            return False
        # The ends take gap (size - 1) lines of outputs, and all others share one product.
        size, gap = self.layer.kernel_size[0], self.layer.dilation[0]
        return size > 1 and self.raw_gradients[0].shape[2] > gap * (size - 1)

    def gradient_products(self, reduce: bool) -> Products:
        r"""The sum of :math:`g g^\top` over points and columns, float64, for each group.

        With ``reduce`` g is the sum over places, else each place is a term.
        """
        if not reduce:
            return functools.reduce(operator.add, map(Products.of, self._gradients()))
        rows = self._summed_gradients().flatten(0, 1)
        return Products.of(rows.unflatten(1, (self._groups, -1)).unsqueeze(-1))

    @property
    def _groups(self) -> int:
        return getattr(self.layer, "groups", 1)

    def _inputs_of(self, rows: Tensor) -> Tensor:
        """Inputs, ``(R, G, in, T)``, of R points or versions of them."""
        if isinstance(self.layer, _CONVOLUTIONS):
            return _patches(self.layer, rows).unflatten(1, (self._groups, -1))
        return _channels_first(rows)

    def _gradients(self) -> Iterator[Tensor]:
        """Gradients of the outputs, ``(R, G, out, T)``, for each column."""
        for gradient in self.raw_gradients:
            if isinstance(self.layer, _CONVOLUTIONS):
                yield gradient.flatten(2).unflatten(1, (self._groups, -1))
            else:
                yield _channels_first(gradient)


def _channels_first(values: Tensor) -> Tensor:
    """``(R, T, channels)`` of any number of places as ``(R, 1, channels, T)``."""
    return values.reshape(len(values), -1, values.shape[-1]).mT.unsqueeze(1)


@dataclass(frozen=True)
class Products:
    r"""The sum of :math:`v v^\top` over vectors, or one sum for each of G groups.

    Attributes:
        values: The sum, ``(p, p)`` or ``(G, p, p)``, float64; of fewer than p vectors these as
            rows, ``(n, p)``, whose inner products have the same eigenvalues other than zero.
        is_rows: Whether they are rows.
    """

    values: Tensor
    is_rows: bool = False

    @classmethod
    def of(cls, values: Tensor) -> Products:
        """The sum over vectors ``(R, G, p, T)`` of R points and T places."""
        count, groups, channels, places = values.shape
        # Summed in the type of the vectors, and converted as one matrix.
        if groups > 1:
            rows = values.permute(1, 2, 0, 3).flatten(2)
            return cls(torch.bmm(rows, rows.mT).double())
        values = values[:, 0]
        if places > 1 and channels <= places:  # point by point, without a transposed copy
            return cls(torch.bmm(values, values.mT).sum(0, dtype=torch.float64))
        rows = values.mT.flatten(0, 1)
        if count * places < channels:
            return cls(rows, is_rows=True)
        return cls(symmetric_product(rows.mT, rows.mT).double())

    def matrix(self) -> Tensor:
        """The sum, ``(p, p)`` or ``(G, p, p)``, float64."""
        rows = self.values.mT
        return symmetric_product(rows, rows).double() if self.is_rows else self.values

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the sum, without some that are zero; those below zero are set to zero."""
        # v vᵀ and vᵀ v have the same eigenvalues but for zeros, which add nothing to log |I + A|.
        values = self.values.double()
        matrix = values @ values.mT if self.is_rows else values
        return torch.linalg.eigvalsh(matrix).clamp_min(0.0)

    def __add__(self, other: Products) -> Products:
        rows, channels = len(self.values) + len(other.values), self.values.shape[-1]
        if self.is_rows and other.is_rows and rows < channels:
            return Products(torch.cat([self.values, other.values]), is_rows=True)
        return Products(self.matrix() + other.matrix())


def _patches(layer: torch.nn.Module, inputs: Tensor) -> Tensor:
    """Inputs of each place of a convolution's output, ``(R, in, T)``."""
    views = _windows(layer, inputs, first=0)
    count = (views.ndim - 2) // 2
    order = 0, 1, *range(2 + count, 2 + 2 * count), *range(2, 2 + count)
    return views.permute(order).flatten(1, 1 + count).flatten(2)


def _windows(layer: torch.nn.Module, inputs: Tensor, first: int) -> Tensor:
    """Views of padded inputs, ``(R, channels, *places, *kernel)``, windows from a dimension on."""
    assert isinstance(layer, _CONVOLUTIONS)
    padding = layer._reversed_padding_repeated_twice  # before and after, the last dimension first
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    # Copied once, from views: several times faster on a CPU than torch's unfold.
    views = torch.nn.functional.pad(inputs, padding, mode) if any(padding) else inputs
    steps = list(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True))
    for dim, (size, stride, gap) in enumerate(steps[first:], start=2 + first):
        views = views.unfold(dim, gap * (size - 1) + 1, stride)[..., ::gap]
    return views


def _products_of_shifts(layer: torch.nn.Module, inputs: Tensor) -> Products:
    r"""Products of the patches of a convolution that moves by one line at a time.

    Two patches' lines i and i' of all outputs are lines of the inputs with the distance i' - i, but
    for some at both ends. Their products are therefore computed for each distance, rather than for
    each pair: a third of the operations and of the copies if the kernel has three lines.
    """
    assert isinstance(layer, _CONVOLUTIONS)
    size, gap, groups = layer.kernel_size[0], layer.dilation[0], layer.groups
    views = _windows(layer, inputs, first=1)
    count = (views.ndim - 3) // 2
    order = 1, *range(3 + count, 3 + 2 * count), 2, 0, *range(3, 3 + count)
    lines = views.permute(order).flatten(0, count).flatten(2).unflatten(0, (groups, -1))
    height = lines.shape[2] - gap * (size - 1)

    def product(start: int, stop: int, distance: int) -> Tensor:
        left, right = (lines[:, :, start + by : stop + by].flatten(2) for by in (0, distance))
        return left @ right.mT

    # Block (i, j) sums line i of one patch times line j: a common sum, and lines at the ends.
    blocks = {}
    for step in range(size):
        last, distance = size - 1 - step, gap * step
        before = [product(gap * i, gap * (i + 1), distance) for i in range(last)]
        after = [product(height + gap * i, height + gap * (i + 1), distance) for i in range(last)]
        common = product(gap * last, height, distance)
        for i in range(last + 1):  # of lines that follow line i of the kernel
            block = sum([*before[i:], *after[:i]], common)
            blocks[i, i + step], blocks[i + step, i] = block, block.mT
    sizes = inputs.shape[1] // groups, -1  # channels, and places of the kernel within a line
    pairs = torch.stack([blocks[i, j] for i in range(size) for j in range(size)])
    pairs = pairs.unflatten(3, sizes).unflatten(2, sizes).unflatten(0, (size, size))
    whole = pairs.permute(2, 3, 0, 4, 5, 1, 6).flatten(4).flatten(1, 3)
    return Products(whole if groups > 1 else whole[0])


def sum_over_chunks(
    of: Callable[[torch.nn.Module, Tensor, Cotangents], Any],
    module: torch.nn.Module,
    x: Tensor,
    cotangents: Cotangents,
    *,
    all_columns: bool = False,
    dense: bool = False,
) -> Any:
    """The curvature of chunks of points, added up; in memory are the passes of one chunk.

    Chunks follow from the sizes of what layers return, and from the number of columns if ``of``
    keeps gradients of all at a time, in ``dense`` form if it asks for rows of every layer together.
    Points that require a gradient need all passes at once.
    """
    check_network(module)
    probe, sizes = x[:2].detach(), [0, 0]

    def count(layer: torch.nn.Module, _: Any, output: Any) -> None:
        size = output.numel() if isinstance(output, Tensor) else 0
        sizes[0] += size
        sizes[1] += size * (type(layer) in _SUPPORTED)

    leaves = [layer for layer in module.modules() if not any(layer.children())]
    handles = [layer.register_forward_hook(count) for layer in leaves]
    try:
        with torch.no_grad():
            outputs = module(probe)
    finally:
        for handle in handles:
            handle.remove()
    # Outputs and what gradients are computed from, gradients of the layers that are recorded, and
    # those of other parameters at single points: of all together, or of one layer after another.
    kept_types = (torch.nn.Linear,) if all_columns else _SUPPORTED
    sizes_of_rows = [
        sum(p.numel() for p in layer.parameters(recurse=False) if p.requires_grad)
        for layer in module.modules() if dense or type(layer) not in kept_types
    ]  # fmt: skip
    columns = outputs[0].numel()
    numbers = (2 * sizes[0] + (columns if all_columns else 1) * sizes[1]) / len(probe)
    numbers += columns * (max if all_columns and not dense else sum)([0, *sizes_of_rows])
    size = numbers * next(module.parameters()).element_size()
    # A point is not alone: others are needed to see that its gradients are its own.
    chunks = min(math.ceil(len(x) * size / _BYTES), len(x) // 2)
    if x.requires_grad or chunks < 2:
        return of(module, x, cotangents)
    points = x.tensor_split(chunks)
    with torch.no_grad():
        outputs = in_single(torch.cat([module(chunk) for chunk in points]))
    # Columns may be drawn at random, for all points at once: they are asked for only here.
    vectors = cotangents(outputs)
    check_cotangents(vectors, outputs)
    pairs = zip(points, vectors.detach().tensor_split(chunks), strict=True)
    curvatures = (of(module, chunk, lambda _, v=v: v) for chunk, v in pairs)
    return functools.reduce(operator.add, curvatures)


def record_columns(
    module: torch.nn.Module,
    x: Tensor,
    cotangents: Cotangents,
    *,
    only: bool = True,
    probed: dict[Any, dict[str, str]] | None = None,
) -> tuple[Iterator[list[LayerRecord]], list[str]]:
    """The records of layers for each column, and the names of trained parameters without one.

    It takes one forward pass, a pass of three points, and a backward pass for each column when its
    records are asked for: those of one column are in memory at a time. Records are in the order
    of the network's parameters, and differentiable in points that require a gradient. With
    ``only`` an UnsupportedError names the first layer of parameters without a record. What the
    pass of three points showed is put into ``probed``, and not asked again for points of the same
    shape: it holds until the weights change.
    """
    check_network(module)
    parameters = {name: p.requires_grad_() for name, p in fresh_parameters(module).items()}
    trained: dict[str, list[str]] = {}
    for name in parameters:
        trained.setdefault(layer_of(name), []).append(name)
    layers = {name: module.get_submodule(name) for name in trained}
    excluded = {
        name: reason
        for name, layer in layers.items() if (reason := _reason_of_build(layer, trained[name]))
    }  # fmt: skip
    layers = {name: layer for name, layer in layers.items() if name not in excluded}
    outputs, calls = _pass(module, x, parameters, layers)
    with torch.enable_grad():
        columns = cotangents(outputs)
    check_cotangents(columns, outputs)
    # What the structure of the network does not tell is read from the graph, then from a probe:
    # a comparison with the network's own gradient alone would need a tolerance.
    nodes, uses = _graph(outputs)
    for name, call in calls.items():
        if call.count > 1:
            excluded[name] = "applied twice"
        elif call.count == 0 or call.output.grad_fn not in nodes:
            excluded[name] = "whose output is not used"
        elif any(uses[id(parameters[key])] > 1 for key in trained[name]):
            excluded[name] = "whose parameters are used outside it"
        elif len(call.output) % len(x) or not len(call.output):
            excluded[name] = _ROWS
    layers = {name: layer for name, layer in layers.items() if name not in excluded}
    key, probed = (x.shape[1:], x.dtype, tuple(layers)), {} if probed is None else probed
    if key not in probed:
        probed[key] = _excluded_by_probe(module, x, parameters, layers, outputs)
    excluded |= probed[key]
    if only and excluded:
        name, reason = next(iter(excluded.items()))
        raise UnsupportedError(
            "module",
            f"{name or 'the module'} ({module.get_submodule(name)}), {reason}",
            "trained parameters of linear layers, convolutions and normalizations, each with "
            "weights of its own and applied once to the rows of all points",
            'Use FunctionSpace, Kronecker(others="diagonal"), Full, BlockDiagonal or Diagonal, or '
            "freeze its parameters.",
        )
    recorded = [name for name in layers if name not in excluded]
    graph = x.requires_grad
    columns = columns if graph else columns.detach()

    def records() -> Iterator[list[LayerRecord]]:
        for k in range(columns.shape[1] if recorded else 0):
            gradients = torch.autograd.grad(
                outputs, [calls[name].output for name in recorded], columns[:, k],
                retain_graph=True, create_graph=graph,
            )  # fmt: skip
            yield [
                _record(name, layers[name], parameters, len(x),
                        calls[name].inputs if graph else calls[name].inputs.detach(), [gradient])
                for name, gradient in zip(recorded, gradients, strict=True)
            ]  # fmt: skip

    return records(), [name for name in parameters if layer_of(name) in excluded]


def _reason_of_build(layer: torch.nn.Module, trained: Sequence[str]) -> str:
    """Why a layer with these trained parameters has no record, or nothing."""
    others = {name.rpartition(".")[2] for name in trained}.difference(_KINDS)
    if is_parametrized(layer):
        return "which is parametrized"
    if type(layer) not in _SUPPORTED:
        return "which is no linear layer, convolution or normalization itself"
    if others:
        return f"whose {min(others)} makes its weights"
    if "forward" in vars(layer):
        return "whose forward is replaced"
    return "which has hooks" if any(getattr(layer, hooks, None) for hooks in _HOOKS) else ""


class _Calls:
    """Calls of a layer in one pass: their number, inputs and output of the last one."""

    count: int = 0
    inputs: Tensor
    output: Tensor


def _graph(outputs: Tensor) -> tuple[set[object], Counter[int]]:
    """The nodes of a graph, and how often it uses each of its leaves."""
    nodes: set[object] = set()
    uses: Counter[int] = Counter()
    waiting = [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)  # of a node that adds its gradient up
            if leaf is not None:
                uses[id(leaf)] += 1
            else:
                waiting.append(following)
    return nodes, uses


def _pass(
    module: torch.nn.Module,
    x: Tensor,
    parameters: Mapping[str, Tensor],
    layers: Mapping[str, torch.nn.Module],
) -> tuple[Tensor, dict[str, _Calls]]:
    """Outputs, and the calls of the layers; both have a graph."""
    all_calls = {name: _Calls() for name in layers}

    def recorder(calls: _Calls) -> Callable[..., Tensor]:
        def hook(_: torch.nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            calls.count += 1
            calls.inputs, calls.output = args[0] if args else kwargs["input"], output
            return output.clone()  # later operations in place do not change the record

        return hook

    handles = [
        layer.register_forward_hook(recorder(all_calls[name]), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with torch.enable_grad(), twice_differentiable(module, x.requires_grad):
            outputs = in_single(call_with(module, parameters, x))
    finally:
        for handle in handles:
            handle.remove()
    return outputs, all_calls


def _excluded_by_probe(
    module: torch.nn.Module,
    x: Tensor,
    parameters: Mapping[str, Tensor],
    layers: Mapping[str, torch.nn.Module],
    outputs: Tensor,
) -> dict[str, str]:
    """Layers that three points, the first twice, show to be others than they seem, and why.

    Only the middle third of a layer's rows may influence the outputs at the second point. This
    excludes layers that get ``(T, N, features)``, no rows of points, only some of them, or rows in
    an order that depends on the points. Gradients from records are compared with those of autograd.
    """
    # Two equal points about the second: sorted rows have it at an end, never in the middle.
    points, alone = (torch.cat([v[:1], v[-1:], v[:1]]).detach() for v in (x[:2], outputs[:2]))
    values, calls = _pass(module, points, parameters, layers)
    check_own_outputs(values, alone)
    excluded = {name: _ROWS for name in layers if calls[name].count != 1}
    layers = {name: layer for name, layer in layers.items() if name not in excluded}
    if not layers:
        return excluded
    # Weights of all outputs, lest a layer of which one output knows nothing seem unused.
    cotangent = torch.zeros_like(values)
    cotangent[1] = probe_weights(values[1])
    names = [name for name in parameters if layer_of(name) in layers]
    leaves = [calls[name].output for name in layers] + [parameters[name] for name in names]
    gradients = torch.autograd.grad(values, leaves, cotangent, materialize_grads=True)
    expected = dict(zip(names, gradients[len(layers) :], strict=True))
    # Read at once: on an accelerator each reading waits for all queued work.
    pairs = zip(layers, gradients, strict=False)
    elsewhere = torch.stack([_is_elsewhere(g, calls[name].inputs) for name, g in pairs]).tolist()
    sums: dict[str, Tensor] = {}
    for (name, layer), gradient, wrong in zip(layers.items(), gradients, elsewhere, strict=False):
        if wrong:
            excluded[name] = _ROWS
            continue
        inputs = calls[name].inputs
        record = _record(name, layer, parameters, 1, inputs.chunk(3)[1], [gradient.chunk(3)[1]])
        for key, rows in record.gradients().items():
            sums[key] = (rows if isinstance(rows, Tensor) else rows.dense())[0, 0]
    for name in differing(sums, {name: in_single(expected[name]) for name in sums}):
        excluded[layer_of(name)] = "whose gradient is another than that of its class"
    return excluded


def _is_elsewhere(gradient: Tensor, inputs: Tensor) -> Tensor:
    """Whether rows beside the middle third are not zero, or inputs have other rows."""
    third, remainder = divmod(len(gradient), 3)
    if remainder or not third or len(inputs) != len(gradient):
        return gradient.new_ones((), dtype=torch.bool)
    return torch.cat([gradient[:third], gradient[2 * third :]]).ne(0).any()


def _record(
    name: str,
    layer: torch.nn.Module,
    parameters: Mapping[str, Tensor],
    num_points: int,
    inputs: Tensor,
    gradients: Sequence[Tensor],
) -> LayerRecord:
    keys = (f"{name}.{kind}".removeprefix(".") for kind in _KINDS)
    weight, bias = (key if key in parameters else None for key in keys)
    kind = NormRecord if isinstance(layer, _NORMS) else LinearRecord
    inputs, *gradients = map(in_single, (inputs, *gradients))
    return kind(layer, weight, bias, num_points, inputs, gradients)


def sample_gradients(
    module: torch.nn.Module, x: Tensor, cotangents: Cotangents, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    r"""Gradients at single points: the rows :math:`J_n^\top v_{nk}` of each parameter.

    Args:
        module: Maps ``(N, *event)`` to ``(N, C)``, each point independently.
        x: Points, ``(N, *event)``.
        cotangents: Maps outputs to the columns v of their curvature.
        names: Names of trained parameters; all if None.

    Returns:
        Rows by the parameter's name, ``(N, K, *shape)``; differentiable in ``x``.

    Note:
        N K P numbers in memory.
    """
    check_network(module)
    every = fresh_parameters(module)
    parameters = every if names is None else {name: every[name] for name in names}

    def outputs(values: Mapping[str, Tensor], points: Tensor) -> Tensor:
        return in_single(call_with(module, {**every, **values}, points))

    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad(), twice_differentiable(module, x.requires_grad):
        values_at_x = outputs(leaves, x)
        columns = cotangents(values_at_x)
    check_cotangents(columns, values_at_x)
    columns = columns if x.requires_grad else columns.detach()

    if not values_at_x.requires_grad:  # outputs do not depend on these parameters
        shape = columns.shape[:2]
        return {name: columns.new_zeros(*shape, *p.shape) for name, p in parameters.items()}
    # A weighted sum of all rows is known from one backward pass of all points.
    weights = probe_weights(columns[..., 0])
    total = torch.einsum("nk,nkc->nc", weights, columns).detach()
    sums = torch.autograd.grad(
        values_at_x, list(leaves.values()), total,
        retain_graph=x.requires_grad, materialize_grads=True,
    )  # fmt: skip

    def add_up(rows: Mapping[str, Tensor]) -> bool:
        if any(rows[name].shape != (*columns.shape[:2], *p.shape) for name, p in leaves.items()):
            return False
        weighted = {
            name: torch.einsum("nk,nk...->...", weights, in_single(row))
            for name, row in rows.items()
        }
        return not differing(weighted, dict(zip(leaves, map(in_single, sums), strict=True)))

    def point_gradients(point: Tensor, vectors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, pull, *_ = vjp(lambda p: outputs(p, point.unsqueeze(0)).squeeze(0), parameters)
        return value, vmap(pull)(vectors)[0]

    result = None
    try:
        with warnings.catch_warnings(), twice_differentiable(module, x.requires_grad):
            warnings.filterwarnings("ignore", "There is a performance drop")
            result = vmap(point_gradients)(x, columns)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError):  # it has no rule for a module
        pass
    # It has a wrong rule for some modules: ``prelu`` of one column at several points.
    if result is None or not add_up(result[1]):
        with twice_differentiable(module, x.requires_grad):
            result = _point_by_point(outputs, leaves, x, columns)
    check_own_outputs(result[0], values_at_x)
    return {name: in_single(rows) for name, rows in result[1].items()}


def _point_by_point(
    outputs: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    leaves: Mapping[str, Tensor],
    x: Tensor,
    columns: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs and gradients at single points, by a backward pass for each column of each."""
    graph = x.requires_grad
    values, rows = [], []
    for point, vectors in zip(x, columns, strict=True):
        with torch.enable_grad():
            value = outputs(leaves, point.unsqueeze(0)).squeeze(0)
        for vector in vectors:  # the graph is kept for the next column
            rows += torch.autograd.grad(
                value, list(leaves.values()), vector,
                retain_graph=True, create_graph=graph, materialize_grads=True,
            )  # fmt: skip
        values.append(value if graph else value.detach())
    gradients = {
        name: torch.stack(rows[k :: len(leaves)]).unflatten(0, columns.shape[:2])
        for k, name in enumerate(leaves)
    }
    return torch.stack(values), gradients


def layer_gradients(
    module: torch.nn.Module,
    x: Tensor,
    cotangents: Cotangents,
    probed: dict[Any, dict[str, str]] | None = None,
) -> Iterator[tuple[str, Tensor | OuterProducts]]:
    """What :func:`sample_gradients` returns, layer after layer, faster where layers are recorded.

    One backward pass a column serves all points. Weights of plain layers have
    :class:`OuterProducts`. What is known of the layers is kept in ``probed``.
    """
    columns, others = record_columns(module, x, cotangents, only=False, probed=probed)
    # Each column has records of all layers; here all columns of a layer are needed at a time.
    for records in zip(*columns, strict=True):
        columns_of_layer = [g for record in records for g in record.raw_gradients]
        record: LayerRecord = replace(records[0], raw_gradients=columns_of_layer)
        yield from record.gradients().items()
    if others:
        yield from sample_gradients(module, x, cotangents, others).items()


def output_gradients(module: torch.nn.Module, x: Tensor) -> dict[str, Tensor | OuterProducts]:
    """Gradients of all outputs at points, by the names of trained parameters.

    Args:
        module: Maps ``(N, *event)`` to ``(N, C)``, each point independently.
        x: Points, ``(N, *event)``.

    Returns:
        Gradients, ``(N, C, *shape)``, or :class:`OuterProducts`.

    Note:
        C backward passes, and N C P numbers for layers without outer products.
    """
    return outputs_and_gradients(module, x)[1]


def outputs_and_gradients(
    module: torch.nn.Module, x: Tensor, probed: dict[Any, dict[str, str]] | None = None
) -> tuple[Tensor, dict[str, Tensor | OuterProducts]]:
    """Outputs at points, ``(N, C)``, and what :func:`output_gradients` returns, in one pass.

    What is known of the layers is kept in ``probed``, for further points of the same weights.
    """
    seen: list[Tensor] = []

    def columns(values: Tensor) -> Tensor:
        seen.append(values if x.requires_grad else values.detach())
        eye = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
        return eye.expand(len(values), *eye.shape)

    gradients = dict(layer_gradients(module, x, columns, probed))
    return seen[0], gradients


def layer_products(rows: OuterProducts, bias: bool) -> Tensor:
    """The sum of products of a layer's gradients over points and columns, ``(p, p)``, float64.

    Weights come first, then biases. The layer is applied once to each point; from products of
    inputs and of gradients N points take N (in out)² operations, K times fewer than from rows.
    """
    gradients, inputs = rows.gradients, rows.inputs.flatten(1)
    out = gradients.shape[-1]
    if bias:  # the weight of an input that is one
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=-1)
    width = inputs.shape[-1]
    # The sum over n of (g gᵀ)_ij (a aᵀ)_kl is one product of two tall matrices.
    step = max(1, _NUMBERS // (out**2 + width**2))
    total = torch.zeros(out**2, width**2, dtype=torch.float64, device=inputs.device)
    for gradient, values in zip(gradients.split(step), inputs.split(step), strict=True):
        g, a = gradient.double(), values.double()
        products = (a.unsqueeze(-1) * a.unsqueeze(-2)).flatten(1)
        total = total + (g.mT @ g).flatten(1).mT @ products
    blocks = total.unflatten(0, (out, out)).unflatten(2, (width, width))
    matrix = blocks.permute(0, 2, 1, 3).reshape(out * width, out * width)
    # From (output, input and bias) to all weights, then all biases, as parameters are ordered.
    index = torch.arange(out * width, device=matrix.device).reshape(out, width)
    order = torch.cat([index[:, :-1].flatten(), index[:, -1]]) if bias else index.flatten()
    return matrix[order][:, order]
