"""Which weights of a network a Laplace posterior is of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gpclml.curvature.structure import layer_of
from gpclml.errors import ArgumentError, ShapeError
from gpclml.laplace.inputs import network_outputs

_NEAR = 3  # modules from an adapter's weights up to the one that has the frozen ones


@contextmanager
def trained_only(network: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Within the block these parameters alone require a gradient."""
    before = {name: p.requires_grad for name, p in network.named_parameters()}
    try:
        for name, p in network.named_parameters():
            p.requires_grad_(name in names)
        yield
    finally:
        for name, p in network.named_parameters():
            p.requires_grad_(before[name])


def chosen_parameters(
    network: torch.nn.Module, weights: str | Sequence[str], x: Tensor
) -> list[str]:
    """Names of the parameters that are meant by ``"last"``, ``"all"``, or names of modules too.

    Where adapters alone are trained, beside frozen weights, ``"last"`` means all of them. The order
    of the layers is found at two of the points. An ArgumentError says that a name is not known, or
    that there is no parameter.
    """
    named = dict(network.named_parameters())
    if weights == "last":
        return _adapters(network) or _last_layer(network, x)
    if weights == "all":
        chosen = [name for name, p in named.items() if p.requires_grad]
    else:
        chosen = []
        for given in [weights] if isinstance(weights, str) else weights:
            meant = [name for name in named if name == given or name.startswith(f"{given}.")]
            if not meant:
                expected = f"'last', 'all', or some of {', '.join(named)} or of their modules"
                raise ArgumentError("weights", repr(given), expected)
            chosen += meant
        chosen = [name for name in named if name in chosen]
    if not chosen:
        raise ArgumentError("weights", "no parameter", "at least one", "Set requires_grad.")
    return chosen


def chosen_weights(network: torch.nn.Module, weights: Tensor) -> dict[str, Tensor]:
    """Numbers of the weights in each parameter, by its name, from those of all weights together.

    Args:
        network: The network.
        weights: Numbers in the vector of all weights, in the order of ``network.parameters()``, or
            a mask of it.

    Raises:
        ArgumentError: There is none, or one is not that of a weight.
        ShapeError: The mask has another length.
    """
    weights, named = weights.cpu(), dict(network.named_parameters())
    total = sum(p.numel() for p in named.values())
    if weights.ndim != 1 or (weights.dtype == torch.bool and len(weights) != total):
        expected = f"numbers of weights, (m,), or a mask ({total},)"
        raise ShapeError("weights", tuple(weights.shape), expected)
    if weights.is_floating_point() or weights.is_complex():
        raise ArgumentError("weights", f"{weights.dtype}", "integers or truth values")
    index = weights.nonzero()[:, 0] if weights.dtype == torch.bool else weights.unique()
    if not len(index) or int(index[0]) < 0 or int(index[-1]) >= total:
        got = f"{len(index)} of them" if not len(index) else f"{int(index[0])} to {int(index[-1])}"
        raise ArgumentError("weights", got, f"at least one number from 0 to {total - 1}")
    chosen, first = {}, 0
    for name, p in named.items():
        inside = index[(index >= first) & (index < first + p.numel())] - first
        first += p.numel()
        if len(inside):
            chosen[name] = inside
    return chosen


def _adapters(network: torch.nn.Module) -> list[str]:
    """Names of the trainable parameters if each is beside frozen ones, as in LoRA; else none."""
    modules = dict(network.named_modules())
    trainable = [name for name, p in network.named_parameters() if p.requires_grad]
    for name in trainable:
        path, near = layer_of(name), False
        for _ in range(_NEAR):
            if not isinstance(modules[path], torch.nn.Sequential | torch.nn.ModuleList):
                parameters = modules[path].named_parameters()
                near = near or any(
                    k.count(".") < _NEAR and not p.requires_grad for k, p in parameters
                )
            path = path.rpartition(".")[0]
            if not path:  # the network as a whole has all weights
                break
        if not near:
            return []
    return trainable


def _last_layer(network: torch.nn.Module, x: Tensor) -> list[str]:
    """Names of the trainable parameters of the last layer that has some and changes the outputs.

    In a network whose parameters are all frozen, which says nothing of how it was trained, frozen
    ones count too. A layer is a module with parameters of its own or of parametrizations.
    """
    named = dict(network.named_parameters())
    trainable = [name for name, p in named.items() if p.requires_grad] or list(named)
    called: list[str] = []
    gradients: Sequence[Tensor | None] = [None] * len(trainable)
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: called.append(layer_of(f"{name}.")))
        for name, module in network.named_modules() if module._parameters
    ]  # fmt: skip
    try:
        network_outputs(network, x[:2])  # its checks
        called.clear()
        with trained_only(network, trainable), torch.enable_grad():
            total = network(x[:2]).sum()
            if total.requires_grad:
                parameters = [named[name] for name in trainable]
                gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    # A layer may be called last whose result the outputs do not have: an auxiliary head.
    used = {layer_of(name) for name, g in zip(trainable, gradients, strict=True) if g is not None}
    for layer in reversed(called):
        if layer in used:
            return [name for name in trainable if layer_of(name) == layer]
    suggestion = "Give names of parameters as weights."
    raise ArgumentError("network", "no layer with parameters", "at least one", suggestion)
