"""Outputs of a network at drawn weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vmap

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError

__all__ = ["linearized_outputs", "sampled_outputs"]

Weights = Mapping[str, Tensor]


@torch.no_grad()
@checked(passes_on="x", x="(N, *event)")
def sampled_outputs(
    network: torch.nn.Module, weights: Weights, x: Tensor, at_once: int = 20
) -> Tensor:
    """The network's outputs with each draw of weights in turn.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``; parameters without draws keep their values.
        weights: Draws by name, ``(S, *shape)``, as
            :meth:`gpclml.mlls.LaplaceEvidence.sample_weights` gives them.
        x: Points, ``(N, *event)``.
        at_once: Draws in memory at a time.

    Returns:
        Shape ``(S, N, C)``.

    Raises:
        ShapeError: Draws are not of the network's parameters.
    """
    _check_weights(network, weights)

    def of_one(values: dict[str, Tensor]) -> Tensor:
        return functional_call(network, values, (x,))

    return vmap(of_one, chunk_size=at_once)(dict(weights))


@torch.no_grad()
@checked(passes_on="x", x="(N, *event)")
def linearized_outputs(
    network: torch.nn.Module, weights: Weights, x: Tensor, at_once: int = 20
) -> Tensor:
    r"""Outputs of the network made linear around its weights, :math:`f + J (w - w_*)`.

    What the Gauss-Newton Laplace posterior is of (Immer et al. 2021): with it, draws far from the
    mode do not leave the region in which the curvature is right.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``, with the weights around which it is linear.
        weights: Draws by name, ``(S, *shape)``.
        x: Points, ``(N, *event)``.
        at_once: Draws in memory at a time.

    Returns:
        Shape ``(S, N, C)``.

    Raises:
        ShapeError: Draws are not of the network's parameters.
    """
    _check_weights(network, weights)
    parameters = dict(network.named_parameters())
    center = {name: parameters[name].detach() for name in weights}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        return functional_call(network, values, (x,))

    def of_one(values: dict[str, Tensor]) -> Tensor:
        away = {name: value - center[name] for name, value in values.items()}
        both = jvp(outputs, (center,), (away,))
        return both[0] + both[1]

    return vmap(of_one, chunk_size=at_once)(dict(weights))


def _check_weights(network: torch.nn.Module, weights: Weights) -> None:
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    for name, value in weights.items():
        if tuple(value.shape[1:]) != shapes.get(name):
            expected = f"(S, {', '.join(map(str, shapes[name]))})" if name in shapes else (
                f"draws of {', '.join(shapes)}"
            )  # fmt: skip
            raise ShapeError("weights", f"{name} of shape {tuple(value.shape)}", expected)
