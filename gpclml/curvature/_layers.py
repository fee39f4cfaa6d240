"""Inputs of a network's layers and gradients of their outputs, and the products of these.

A layer is recorded only if its input and the gradient of its output determine the gradient of its
parameters: it is a ``Linear`` or ``Conv2d`` itself, nothing changes its weights or its output, and
its parameters are used once. The parameters of all other modules are returned by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized

from gpclml.curvature.structure import (
    Cotangents,
    check_cotangents,
    check_network,
    fresh_parameters,
    layer_of,
)
from gpclml.errors import UnsupportedError
from gpclml.linalg import symmetric_product

__all__ = [
    "LayerRecord",
    "record_layers",
]

_SUPPORTED = (torch.nn.Linear, torch.nn.Conv2d)
_KINDS = ("weight", "bias")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def record_layers(
    module: torch.nn.Module, x: Tensor, cotangents: Cotangents, *, only: bool = True
) -> tuple[list[LayerRecord], list[str]]:
    """The record of each layer, and the names of trained parameters without one.

    It takes one forward and K backward passes. Records are in the order of the network's
    parameters, and differentiable in points that require a gradient. With ``only`` an
    UnsupportedError names the first layer of parameters without a record.
    """
    check_network(module)
    parameters = {name: p.requires_grad_() for name, p in fresh_parameters(module).items()}
    excluded = _excluded_by_build(module, parameters)
    if only:
        _check_none(excluded, module)
    layers = {
        name: module.get_submodule(name)
        for name in dict.fromkeys(map(layer_of, parameters)) if name not in excluded
    }  # fmt: skip
    passes = {name: _Pass() for name in layers}
    handles = [
        layer.register_forward_hook(_recorder(name, parameters, passes[name]), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with torch.enable_grad():
            outputs = functional_call(module, parameters, (x,))
    finally:
        for handle in handles:
            handle.remove()
    with torch.enable_grad():
        columns = cotangents(outputs)
    check_cotangents(columns, outputs)
    excluded |= _excluded_by_use(outputs, passes, parameters)
    if only:
        _check_none(excluded, module)
    recorded = [name for name in layers if name not in excluded]
    graph = x.requires_grad
    columns = columns if graph else columns.detach()
    back = [
        torch.autograd.grad(
            outputs, [passes[name].output for name in recorded], columns[:, k],
            retain_graph=True, create_graph=graph,
        )
        for k in range(columns.shape[1] if recorded else 0)
    ]  # fmt: skip
    records = [
        LayerRecord(
            layers[name],
            *(full if (full := _full_name(name, k)) in parameters else None for k in _KINDS),
            num_points=len(x),
            raw_inputs=passes[name].inputs if graph else passes[name].inputs.detach(),
            raw_gradients=[one[place] for one in back],
        )
        for place, name in enumerate(recorded)
    ]
    return records, [name for name in parameters if layer_of(name) in excluded]


@dataclass(frozen=True)
class LayerRecord:
    """Inputs and output gradients of a linear map, applied at T places of each point.

    T is 1 in a plain layer. Versions of a point that a network averages over count as places.
    Tensors keep the layout of the layer, channels first in a convolution.

    Attributes:
        layer: Linear or Conv2d.
        weight: Name of its weight in the network; None if it is not trained.
        bias: Name of its bias; None if it is not trained, or there is none.
        num_points: Number of points N.
        raw_inputs: Inputs of the layer.
        raw_gradients: Gradients of its outputs, one for each column of output curvature.
    """

    layer: torch.nn.Module
    weight: str | None
    bias: str | None
    num_points: int
    raw_inputs: Tensor
    raw_gradients: Sequence[Tensor]

    @property
    def is_plain(self) -> bool:
        """Whether the map is applied at one place of each point."""
        rows, _, places = next(self._gradients()).shape
        return rows * places == self.num_points

    def mean_inputs(self) -> Tensor:
        """Inputs of the map, their mean over places, ``(N, in)``."""
        return self._inputs().mean(2).unflatten(0, (self.num_points, -1)).mean(1)

    def summed_gradients(self) -> Tensor:
        """Gradients of its outputs, summed over places, ``(N, K, out)``: those of the bias."""
        sums = [g.sum(2).unflatten(0, (self.num_points, -1)).sum(1) for g in self._gradients()]
        return torch.stack(sums, dim=1)

    def weight_gradients(self) -> Tensor:
        """Gradients of the weight at each point, ``(N, K, out in)``."""
        inputs = self._inputs().mT
        columns = [
            torch.bmm(g, inputs).unflatten(0, (self.num_points, -1)).sum(1).flatten(1)
            for g in self._gradients()
        ]
        return torch.stack(columns, dim=1)

    def input_product(self, reduce: bool) -> tuple[Tensor, int]:
        r"""The sum of :math:`a a^\top`, float64, and the number of its terms.

        With ``reduce`` a is the mean over places, else each place is a term.
        """
        # In float64, so that rounding does not fill the null space of many inputs.
        if reduce:
            a = self.mean_inputs().double()
            return symmetric_product(a.mT, a.mT), len(a)
        a = self._inputs().double()
        return _outer_products(a), a.shape[0] * a.shape[2]

    def gradient_product(self, reduce: bool) -> Tensor:
        r"""The sum of :math:`g g^\top` over points and columns, float64.

        With ``reduce`` g is the sum over places, else each place is a term.
        """
        if not reduce:
            return torch.stack([_outer_products(g) for g in self._gradients()]).sum(0)
        rows = self.summed_gradients().flatten(0, 1)
        return symmetric_product(rows.mT, rows.mT).double()

    def _inputs(self) -> Tensor:
        """Inputs, ``(R, in, T)``, of R points or versions of them."""
        if isinstance(self.layer, torch.nn.Conv2d):
            return _patches(self.layer, self.raw_inputs)
        return _channels_first(self.raw_inputs)

    def _gradients(self) -> Iterator[Tensor]:
        """Gradients of the outputs, ``(R, out, T)``, for each column."""
        for gradient in self.raw_gradients:
            if isinstance(self.layer, torch.nn.Conv2d):
                yield gradient.flatten(2)
            else:
                yield _channels_first(gradient)


class _Pass:
    """One pass: number of calls of a layer, whether by its own weights, last input and output."""

    calls: int = 0
    own: bool = True
    inputs: Tensor
    output: Tensor


def _check_none(excluded: Mapping[str, str], module: torch.nn.Module) -> None:
    for name, reason in excluded.items():
        owner = f".{name}".partition(".parametrizations.")[0].removeprefix(".")
        layer = module.get_submodule(owner)
        raise UnsupportedError(
            "module",
            f"{owner or 'the module'} ({layer}), {reason}",
            "trained parameters of Linear and of Conv2d without groups, padded with zeros, each "
            "with weights of its own and applied once",
            'Use FunctionSpace, Kronecker(others="diagonal"), Full, BlockDiagonal or Diagonal, or '
            "freeze its parameters.",
        )


def _excluded_by_build(module: torch.nn.Module, names: Mapping[str, Tensor]) -> dict[str, str]:
    """Modules of these parameters that have no record, and why."""
    owners = Counter(id(p) for part in module.modules() for p in part._parameters.values())
    excluded = {}
    for name in dict.fromkeys(map(layer_of, names)):
        layer = module.get_submodule(name)
        mine = {one.rpartition(".")[2] for one in names if layer_of(one) == name}
        shared = any(
            owners[id(p)] > 1
            for p in layer._parameters.values()
            if p is not None and p.requires_grad
        )
        if is_parametrized(layer) or ".parametrizations." in f".{name}.":
            excluded[name] = "which is parametrized"
        elif type(layer) not in _SUPPORTED:
            excluded[name] = "which is no Linear or Conv2d itself"
        elif isinstance(layer, torch.nn.Conv2d) and layer.groups != 1:
            excluded[name] = "which has groups"
        elif isinstance(layer, torch.nn.Conv2d) and layer.padding_mode != "zeros":
            excluded[name] = "which is not padded with zeros"
        elif not mine <= set(_KINDS):
            excluded[name] = f"whose {min(mine - set(_KINDS))} makes its weights"
        elif "forward" in vars(layer):
            excluded[name] = "whose forward is replaced"
        elif any(getattr(layer, hooks, None) for hooks in _HOOKS):
            excluded[name] = "which has hooks"
        elif shared:
            excluded[name] = "whose parameters another module has too"
    return excluded


def _excluded_by_use(
    outputs: Tensor, passes: Mapping[str, _Pass], parameters: Mapping[str, Tensor]
) -> dict[str, str]:
    """Layers whose parameters change the outputs in another way than by one pass, and why.

    This is read from the graph of the pass. A comparison with the network's own gradient would need
    a tolerance and another backward pass.
    """
    nodes, uses = _graph(outputs)
    excluded = {}
    for name, seen in passes.items():
        mine = [p for one, p in parameters.items() if layer_of(one) == name]
        if seen.calls > 1:
            excluded[name] = "applied twice"
        elif seen.calls == 0 or seen.output.grad_fn not in nodes:
            excluded[name] = "whose output is not used"
        elif not seen.own:
            excluded[name] = "applied with other weights"
        elif any(uses[id(p)] > 1 for p in mine):
            excluded[name] = "whose parameters are used outside it"
    return excluded


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


def _full_name(layer: str, kind: str) -> str:
    return f"{layer}.{kind}" if layer else kind


def _recorder(name: str, parameters: Mapping[str, Tensor], seen: _Pass):
    def hook(layer: torch.nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        seen.calls += 1
        seen.own = all(
            getattr(layer, kind) is parameters[full]
            for kind in _KINDS if (full := _full_name(name, kind)) in parameters
        )  # fmt: skip
        seen.inputs, seen.output = args[0] if args else kwargs["input"], output
        return output.clone()  # later operations in place do not change the record

    return hook


def _channels_first(values: Tensor) -> Tensor:
    """``(R, T, channels)`` of any number of places as ``(R, channels, T)``."""
    return values.reshape(len(values), -1, values.shape[-1]).mT


def _outer_products(values: Tensor) -> Tensor:
    """The sum over R and T of products of ``(R, channels, T)`` with itself, float64.

    Point by point, without a transposed copy, where that takes no more memory than the values.
    """
    _, channels, places = values.shape
    if places > 1 and channels <= places:
        return torch.bmm(values, values.mT).sum(0, dtype=torch.float64)
    rows = values.mT.flatten(0, 1)
    return symmetric_product(rows.mT, rows.mT).double()


def _patches(layer: torch.nn.Conv2d, inputs: Tensor) -> Tensor:
    """Inputs of each place of a convolution's output, ``(R, in, T)``."""
    padded = torch.nn.functional.pad(inputs, _padding(layer))
    if layer.dilation != (1, 1):
        return torch.nn.functional.unfold(
            padded, layer.kernel_size, layer.dilation, stride=layer.stride
        )
    # One copy of views: several times faster on a CPU than torch's unfold.
    (height, width), (down, right) = layer.kernel_size, layer.stride
    views = padded.unfold(2, height, down).unfold(3, width, right)
    return views.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)


def _padding(layer: torch.nn.Conv2d) -> tuple[int, int, int, int]:
    """Padding on the left, on the right, above and below."""
    if layer.padding == "same":
        reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        (above, below), (left, right) = ((one // 2, one - one // 2) for one in reach)
        return left, right, above, below
    above, left = (0, 0) if isinstance(layer.padding, str) else layer.padding  # or "valid"
    return left, left, above, above
