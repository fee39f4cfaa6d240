"""The parameters of a network that curvature is about, apart from the network's own graph."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import all_finite
from gpclml.errors import ArgumentError, ModelModeError, NonFiniteError, ShapeError

__all__ = ["check_cotangents", "check_network", "fresh_parameters", "layer_of"]

_DROPOUT = torch.nn.modules.dropout._DropoutNd
_BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm


def check_network(module: torch.nn.Module) -> None:
    """Raises where a pass through the network has no curvature.

    Raises:
        ArgumentError: No parameter is trainable.
        ModelModeError: Dropout or batch normalization is in train mode.
    """
    if not any(p.requires_grad for p in module.parameters()):
        raise ArgumentError(
            "module", "a network without trainable parameters", "at least one",
            "Set requires_grad on some.",
        )  # fmt: skip
    for name, part in module.named_modules():
        active = isinstance(part, _DROPOUT) and part.p > 0
        if part.training and (active or isinstance(part, _BATCH_NORM)):
            raise ModelModeError(
                "module",
                f"{name or 'the module'} ({type(part).__name__}) in train mode",
                "one whose output at a point is a function of that point",
                "Call module.eval() before curvature is computed, and train() after it.",
            )


def fresh_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """The trainable parameters as tensors of their own: gradients do not reach the network's."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def layer_of(name: str) -> str:
    """The module that a parameter belongs to, by the parameter's name."""
    return name.rpartition(".")[0]


def check_cotangents(cotangents: Tensor, outputs: Tensor) -> None:
    """Raises where these are no columns of output curvature.

    Args:
        cotangents: ``(N, K, C)``.
        outputs: Of the network, ``(N, C)``.

    Raises:
        ShapeError: The shapes do not fit.
        NonFiniteError: A cotangent is not finite.
    """
    if outputs.ndim != 2:
        raise ShapeError("module", f"outputs {tuple(outputs.shape)}", "outputs (N, C)")
    if cotangents.ndim != 3 or cotangents.shape[::2] != outputs.shape:
        n, c = outputs.shape
        raise ShapeError("cotangents", tuple(cotangents.shape), f"({n}, K, {c})")
    if not all_finite(cotangents):
        bad = int((~torch.isfinite(cotangents)).sum())
        got = f"{bad} non-finite of {cotangents.numel()} values"
        raise NonFiniteError("output curvature", got, "finite values", "Look at the outputs.")
