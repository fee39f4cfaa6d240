"""Gradients of single points, of any module."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from gpclml._utils.arguments import checked
from gpclml.curvature._parameters import check_cotangents, check_network, fresh_parameters

__all__ = ["Cotangents", "sample_gradients"]

Cotangents = Callable[[Tensor], Tensor]
"""Maps outputs ``(N, C)`` to columns of their curvature, ``(N, K, C)``."""


@checked(late=True, passes_on="x", x="(N, *event)")
def sample_gradients(
    module: torch.nn.Module, x: Tensor, cotangents: Cotangents, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    r"""The rows :math:`J_n^\top v_{nk}` of each parameter.

    Args:
        module: Maps ``(N, *event)`` to ``(N, C)``, each point on its own.
        x: Points, ``(N, *event)``.
        cotangents: Makes the columns v of the output curvature.
        names: Trained parameters whose gradients these are; all if None.

    Returns:
        Name of the parameter to ``(N, K, *shape)``; differentiable in ``x``.

    Raises:
        ArgumentError, ModelModeError, ShapeError, NonFiniteError: The network or the
            cotangents cannot be used.

    Note:
        N K P numbers in memory.
    """
    check_network(module)
    every = fresh_parameters(module)
    parameters = every if names is None else {name: every[name] for name in names}

    def outputs(values: dict[str, Tensor], points: Tensor) -> Tensor:
        return functional_call(module, every | values, (points,))

    values_at_x = outputs(parameters, x)
    columns = cotangents(values_at_x)
    check_cotangents(columns, values_at_x)

    def of_one(point: Tensor, vectors: Tensor) -> dict[str, Tensor]:
        pull = vjp(lambda values: outputs(values, point.unsqueeze(0)).squeeze(0), parameters)[1]
        return vmap(pull)(vectors)[0]

    return vmap(of_one)(x, columns)
