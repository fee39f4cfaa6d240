"""Draws of weights that are made of others, or of an ensemble."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml._utils.placement import check_placement
from gpclml.errors import ArgumentError, ShapeError

__all__ = ["rescaled", "stacked_weights"]


@checked
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

    Raises:
        ArgumentError: The scale is negative, or the center has other names.
        ShapeError: A center is not of the shape of a draw.
    """
    if not 0 <= scale < math.inf:
        raise ArgumentError("scale", scale, "a number of at least 0")
    if center is not None and center.keys() != weights.keys():
        expected = f"{', '.join(weights)}, as the draws"
        raise ArgumentError("center", ", ".join(center) or "nothing", expected)
    made = {}
    for name, draws in weights.items():
        if not draws.is_floating_point() or draws.ndim == 0 or len(draws) == 0:
            got = f"{draws.dtype} of shape {tuple(draws.shape)}"
            raise ShapeError(f"weights[{name!r}]", got, "real numbers (S, *shape)")
        middle = draws.mean(0) if center is None else center[name]
        check_placement(f"center[{name!r}]", middle, draws, "the draws")
        if middle.shape != draws.shape[1:]:
            expected = f"{tuple(draws.shape[1:])}, as each draw"
            raise ShapeError(f"center[{name!r}]", tuple(middle.shape), expected)
        made[name] = middle + scale**0.5 * (draws - middle)
    return made


@checked
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
