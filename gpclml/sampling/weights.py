"""Draws of weights that are made of others, or of an ensemble."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gpclml.errors import ArgumentError, ShapeError

__all__ = ["rescaled", "stacked_weights"]


def rescaled(
    weights: Mapping[str, Tensor], scale: float, center: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Draws whose covariance is multiplied by a number.

    Args:
        weights: Draws by name, ``(S, *shape)``.
        scale: The number.
        center: What they are scaled around, by name; their mean if None.

    Returns:
        As many draws.
    """
    made = {}
    for name, draws in weights.items():
        middle = draws.mean(0) if center is None else center[name]
        made[name] = middle + scale**0.5 * (draws - middle)
    return made


def stacked_weights(networks: Iterable[torch.nn.Module]) -> dict[str, Tensor]:
    """The weights of an ensemble of networks of one build, as draws.

    Networks that were trained from different starts explore modes where a Laplace posterior
    explores one (Lakshminarayanan et al. 2017).

    Args:
        networks: The S members.

    Returns:
        Trained parameters by name, ``(S, *shape)``.

    Raises:
        ArgumentError: There is none.
        ShapeError: They are not of one build.
    """
    members = [
        {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
        for network in networks
    ]
    if not members:
        raise ArgumentError("networks", "none", "at least one")
    shapes = [{name: tuple(p.shape) for name, p in member.items()} for member in members]
    for other in shapes[1:]:
        if other != shapes[0]:
            raise ShapeError("networks", other, f"{shapes[0]}, as the first")
    return {name: torch.stack([member[name] for member in members]) for name in members[0]}
