"""Recording of layers in a pass, where this says all about the gradients of their parameters.

A layer is recorded only if its input and the gradient of its output determine the gradient of its
parameters: it is a linear layer, a convolution or a normalization itself, nothing changes its
weights or its output, its parameters are used once, and its rows are those of points. The
parameters of all other modules are returned by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from gpclml.curvature._layers import CONVOLUTIONS, NORMS, LayerRecord, LinearRecord, NormRecord
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

__all__ = ["record_columns", "record_layers", "sum_over_chunks"]

_SUPPORTED = (torch.nn.Linear, *CONVOLUTIONS, *NORMS)
_KINDS = ("weight", "bias")
_ROWS = "whose rows are not those of points in their order"
_BYTES = 2**26  # of what layers return, and of gradients by it, in memory at a time
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def sum_over_chunks(
    of: Callable[[torch.nn.Module, Tensor, Cotangents], Any],
    module: torch.nn.Module,
    x: Tensor,
    cotangents: Cotangents,
    *,
    all_columns: bool = False,
) -> Any:
    """The curvature of chunks of points, added up; in memory are the passes of one chunk.

    Chunks follow from the sizes of what layers return, and from the number of columns if ``of``
    keeps gradients of all at a time. Points that require a gradient need all passes at once.
    """
    check_network(module)
    few, sizes = x[:2].detach(), [0, 0]

    def count(part: torch.nn.Module, _: Any, output: Any) -> None:
        size = output.numel() if isinstance(output, Tensor) else 0
        sizes[0] += size
        sizes[1] += size * (type(part) in _SUPPORTED)

    leaves = [part for part in module.modules() if not any(part.children())]
    handles = [part.register_forward_hook(count) for part in leaves]
    try:
        with torch.no_grad():
            outputs = module(few)
    finally:
        for handle in handles:
            handle.remove()
    # Outputs and what gradients are computed from, gradients of the layers that are recorded, and
    # those of other parameters at single points.
    others = sum(
        p.numel() for part in module.modules() if type(part) not in _SUPPORTED
        for p in part._parameters.values() if p is not None and p.requires_grad
    )  # fmt: skip
    columns = outputs[0].numel()
    kept = columns if all_columns else 1
    numbers = (2 * sizes[0] + kept * sizes[1]) / len(few) + columns * others
    size = numbers * next(module.parameters()).element_size()
    # A point is not alone: others are needed to see that its gradients are its own.
    chunks = min(math.ceil(len(x) * size / _BYTES), len(x) // 2)
    if x.requires_grad or chunks < 2:
        return of(module, x, cotangents)
    points = x.tensor_split(chunks)
    with torch.no_grad():
        outputs = in_single(torch.cat([module(some) for some in points]))
    vectors = cotangents(outputs)
    check_cotangents(vectors, outputs)
    total = None
    for some, own in zip(points, vectors.detach().tensor_split(chunks), strict=True):
        part = of(module, some, lambda _, own=own: own)
        total = part if total is None else total + part
    return total


def record_layers(
    module: torch.nn.Module, x: Tensor, cotangents: Cotangents
) -> tuple[list[LayerRecord], list[str]]:
    """The record of each layer, of all columns, and the names of parameters without one."""
    columns, names = record_columns(module, x, cotangents, only=False)
    made = [
        replace(of_layer[0], raw_gradients=[one.raw_gradients[0] for one in of_layer])
        for of_layer in zip(*columns, strict=True)
    ]
    return made, names


def record_columns(
    module: torch.nn.Module, x: Tensor, cotangents: Cotangents, *, only: bool = True
) -> tuple[Iterator[list[LayerRecord]], list[str]]:
    """The records of layers for each column, and the names of trained parameters without one.

    It takes one forward pass, a pass of three points, and a backward pass for each column when its
    records are asked for: those of one column are in memory at a time. Records are in the order
    of the network's parameters, and differentiable in points that require a gradient. With
    ``only`` an UnsupportedError names the first layer of parameters without a record.
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
    outputs, passes = _pass(module, x, parameters, layers)
    with torch.enable_grad():
        columns = cotangents(outputs)
    check_cotangents(columns, outputs)
    excluded |= _excluded_by_use(outputs, passes, parameters)
    layers = {name: layer for name, layer in layers.items() if name not in excluded}
    excluded |= _excluded_by_probe(module, x, parameters, layers, outputs, passes)
    if only:
        _check_none(excluded, module)
    recorded = [name for name in layers if name not in excluded]
    graph = x.requires_grad
    columns = columns if graph else columns.detach()

    def records() -> Iterator[list[LayerRecord]]:
        for k in range(columns.shape[1] if recorded else 0):
            gradients = torch.autograd.grad(
                outputs, [passes[name].output for name in recorded], columns[:, k],
                retain_graph=True, create_graph=graph,
            )  # fmt: skip
            yield [
                _record(
                    name, layers[name], parameters, len(x),
                    passes[name].inputs if graph else passes[name].inputs.detach(), [gradient],
                )
                for name, gradient in zip(recorded, gradients, strict=True)
            ]  # fmt: skip

    return records(), [name for name in parameters if layer_of(name) in excluded]


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
            "trained parameters of linear layers, convolutions and normalizations, each with "
            "weights of its own and applied once to the rows of all points",
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
            excluded[name] = "which is no linear layer, convolution or normalization itself"
        elif not mine <= set(_KINDS):
            excluded[name] = f"whose {min(mine - set(_KINDS))} makes its weights"
        elif "forward" in vars(layer):
            excluded[name] = "whose forward is replaced"
        elif any(getattr(layer, hooks, None) for hooks in _HOOKS):
            excluded[name] = "which has hooks"
        elif shared:
            excluded[name] = "whose parameters another module has too"
    return excluded


def _pass(
    module: torch.nn.Module,
    x: Tensor,
    parameters: Mapping[str, Tensor],
    layers: Mapping[str, torch.nn.Module],
) -> tuple[Tensor, dict[str, _Pass]]:
    """Outputs, and what the layers did; both have a graph."""
    passes = {name: _Pass() for name in layers}
    handles = [
        layer.register_forward_hook(_recorder(name, parameters, passes[name]), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with torch.enable_grad(), twice_differentiable(module):
            outputs = in_single(call_with(module, parameters, x))
    finally:
        for handle in handles:
            handle.remove()
    return outputs, passes


def _excluded_by_probe(
    module: torch.nn.Module,
    x: Tensor,
    parameters: Mapping[str, Tensor],
    layers: Mapping[str, torch.nn.Module],
    outputs: Tensor,
    all_passes: Mapping[str, _Pass],
) -> dict[str, str]:
    """Layers that three points, the first twice, show to be others than they seem, and why.

    Only the middle third of a layer's rows may influence the outputs at the second point. This
    excludes layers that get ``(T, N, features)``, no rows of points, only some of them, or rows in
    an order that depends on the points. Gradients from records are compared with those of autograd.
    """
    count = len(x)
    excluded = {
        name: _ROWS for name in layers
        if len(all_passes[name].output) % count or not len(all_passes[name].output)
    }  # fmt: skip
    if count == 1:
        return excluded
    points, alone = (torch.cat([one[:2], one[:1]]).detach() for one in (x, outputs))
    values, passes = _pass(module, points, parameters, layers)
    check_own_outputs(values, alone)
    layers = {k: one for k, one in layers.items() if k not in excluded and passes[k].calls == 1}
    excluded |= {name: _ROWS for name in passes if name not in layers}
    if not layers:
        return excluded
    cotangent = torch.zeros_like(values)
    cotangent[1] = probe_weights(values[1])
    made = [passes[name].output for name in layers]
    mine = [name for name in parameters if layer_of(name) in layers]
    found = torch.autograd.grad(
        values, [*made, *(parameters[name] for name in mine)], cotangent, materialize_grads=True
    )
    expected = dict(zip(mine, found[len(made) :], strict=True))
    gradients = dict(zip(layers, found, strict=False))
    elsewhere = [_is_elsewhere(g, passes[name].inputs) for name, g in gradients.items()]
    excluded |= {
        name: _ROWS
        for name, wrong in zip(layers, torch.stack(elsewhere).tolist(), strict=True) if wrong
    }  # fmt: skip
    sums = {
        name: rows[0, 0]
        for one, g in gradients.items() if one not in excluded
        for name, rows in _record(
            one, layers[one], parameters, 1, passes[one].inputs.chunk(3)[1], [g.chunk(3)[1]]
        ).gradients().items()
    }  # fmt: skip
    for name in differing(sums, {name: in_single(expected[name]) for name in sums}):
        excluded[layer_of(name)] = "whose gradient is another than that of its class"
    return excluded


def _is_elsewhere(gradient: Tensor, inputs: Tensor) -> Tensor:
    """Whether rows beside the middle third are not zero, or inputs have other rows."""
    third, rest = divmod(len(gradient), 3)
    if rest or not third or len(inputs) != len(gradient):
        return gradient.new_ones(())
    beside = torch.cat([gradient[:third], gradient[-third:]])
    return beside.ne(0).any().to(gradient)


def _record(
    name: str,
    layer: torch.nn.Module,
    parameters: Mapping[str, Tensor],
    num_points: int,
    inputs: Tensor,
    gradients: Sequence[Tensor],
) -> LayerRecord:
    weight, bias = (full if (full := _full_name(name, k)) in parameters else None for k in _KINDS)
    kind = NormRecord if isinstance(layer, NORMS) else LinearRecord
    inputs, *gradients = map(in_single, (inputs, *gradients))
    return kind(layer, weight, bias, num_points, inputs, gradients)


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
