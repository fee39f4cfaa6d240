"""What the layers of a network see and what comes back to them, point by point.

A layer is recorded only if its input and the gradient of its output say all about its
parameters: it is a ``Linear`` or ``Conv2d`` itself, nothing changes its weights or its output on
the way, and that one layer uses its parameters once. Those of all others are returned by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized

from gpclml.curvature._parameters import (
    check_cotangents,
    check_network,
    fresh_parameters,
    layer_of,
)
from gpclml.curvature._records import LayerRecord
from gpclml.curvature._sample_gradients import Cotangents
from gpclml.errors import UnsupportedError

__all__ = ["record_layers"]

_SUPPORTED = (torch.nn.Linear, torch.nn.Conv2d)
_KINDS = ("weight", "bias")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def record_layers(
    module: torch.nn.Module, x: Tensor, cotangents: Cotangents, *, only: bool = True
) -> tuple[list[LayerRecord], list[str]]:
    """The records of all layers that have one, from one pass and K passes back.

    Args:
        module: Maps ``(N, *event)`` to ``(N, C)``.
        x: Points, ``(N, *event)``; where they require a gradient so do the records.
        cotangents: Maps outputs to columns of their curvature, ``(N, K, C)``.
        only: Whether all trained parameters must be of layers that have a record.

    Returns:
        One a layer, in the order of the network's parameters; and the names of the trained
        parameters that are in none.

    Raises:
        UnsupportedError: There are such parameters and ``only`` is set; the layer is named.
        ArgumentError, ModelModeError, ShapeError, NonFiniteError: The network or the
            cotangents cannot be used.
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


class _Pass:
    """What went through a layer: how often, whether by its own weights, and what at last."""

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
    """Layers whose parameters the outputs depend on in another way than by one pass, and why.

    Read off the graph of the pass, which costs nothing and needs no tolerance, where a comparison
    with the network's own gradient would take a further pass back.
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
        return output.clone()  # what works in place afterwards leaves the record as it is

    return hook
