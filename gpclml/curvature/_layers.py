"""What the layers of a network see and what comes back to them, point by point."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.func import functional_call

from gpclml.curvature._parameters import (
    check_cotangents,
    check_network,
    fresh_parameters,
    layer_of,
)
from gpclml.curvature._records import LayerRecord
from gpclml.curvature._sample_gradients import Cotangents
from gpclml.errors import UnsupportedError

__all__ = ["other_parameters", "record_layers"]

_SUPPORTED = (torch.nn.Linear, torch.nn.Conv2d)
_KINDS = ("weight", "bias")


def record_layers(
    module: torch.nn.Module, x: Tensor, cotangents: Cotangents, *, only: bool = True
) -> list[LayerRecord]:
    """The records of all layers with trained parameters, from one pass and K passes back.

    Args:
        module: Maps ``(N, *event)`` to ``(N, C)``.
        x: Points, ``(N, *event)``; where they require a gradient so do the records.
        cotangents: Maps outputs to columns of their curvature, ``(N, K, C)``.
        only: Whether all trained parameters must be of Linear, or of Conv2d without groups that
            is padded with zeros; those of others are passed over if not.

    Returns:
        One a layer, in the order of the network's parameters.

    Raises:
        UnsupportedError: Another module has trained parameters, or a layer is applied twice;
            named.
        ArgumentError, ModelModeError, ShapeError, NonFiniteError: The network or the
            cotangents cannot be used.
    """
    check_network(module)
    parameters = {name: p.requires_grad_() for name, p in fresh_parameters(module).items()}
    layers = _recordable(module, parameters)
    if only:
        _check_all_in(layers, module, parameters)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [layers[name].register_forward_hook(_recorder(name, seen)) for name in layers]
    try:
        with torch.enable_grad():
            outputs = functional_call(module, parameters, (x,))
    finally:
        for handle in handles:
            handle.remove()
    with torch.enable_grad():
        columns = cotangents(outputs)
    check_cotangents(columns, outputs)
    unused = [name for name in layers if name not in seen]
    if unused:
        raise UnsupportedError("module", f"{unused[0]}, which is not used", "layers that are")
    graph = x.requires_grad
    columns = columns if graph else columns.detach()
    back = [
        torch.autograd.grad(
            outputs, [seen[name][1] for name in layers], columns[:, k],
            retain_graph=True, create_graph=graph,
        )
        for k in range(columns.shape[1] if layers else 0)
    ]  # fmt: skip
    return [
        LayerRecord(
            layer,
            *(full if (full := _full_name(name, k)) in parameters else None for k in _KINDS),
            num_points=len(x),
            raw_inputs=seen[name][0] if graph else seen[name][0].detach(),
            raw_gradients=[one[place] for one in back],
        )
        for place, (name, layer) in enumerate(layers.items())
    ]


def other_parameters(module: torch.nn.Module) -> list[str]:
    """Names of the trained parameters that are of no layer that can be recorded."""
    parameters = fresh_parameters(module)
    layers = _recordable(module, parameters)
    return [name for name in parameters if layer_of(name) not in layers]


def _check_all_in(
    layers: dict[str, torch.nn.Module], module: torch.nn.Module, names: Iterable[str]
) -> None:
    for name in map(layer_of, names):
        if name not in layers:
            raise UnsupportedError(
                "module",
                f"{name or 'the module'} ({module.get_submodule(name)})",
                "trained parameters of Linear and of Conv2d without groups, padded with zeros",
                'Use Kronecker(others="diagonal"), Full, BlockDiagonal or Diagonal, or freeze its '
                "parameters.",
            )


def _recordable(module: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.nn.Module]:
    """Linear layers and plain convolutions among the modules of these parameters."""
    layers = {}
    for name in dict.fromkeys(map(layer_of, names)):
        layer = module.get_submodule(name)
        grouped = isinstance(layer, torch.nn.Conv2d) and (
            layer.groups != 1 or layer.padding_mode != "zeros"
        )
        if isinstance(layer, _SUPPORTED) and not grouped:
            layers[name] = layer
    return layers


def _full_name(layer: str, kind: str) -> str:
    return f"{layer}.{kind}" if layer else kind


def _recorder(name: str, seen: dict[str, tuple[Tensor, Tensor]]):
    def hook(layer: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if name in seen:
            raise UnsupportedError(
                "module", f"{name or 'the module'}, applied twice", "layers that are applied once",
                "Use Full, BlockDiagonal or Diagonal.",
            )  # fmt: skip
        seen[name] = (inputs[0], output)
        return output.clone()  # what works in place afterwards leaves the record as it is

    return hook
