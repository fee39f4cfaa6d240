"""Base classes of curvature and its structures, and gradients at single points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from gpclml._utils.arguments import check_finite, checked
from gpclml.errors import ArgumentError, ModelModeError, ShapeError

__all__ = [
    "Cotangents",
    "Curvature",
    "Draw",
    "Structure",
    "check_cotangents",
    "check_network",
    "fresh_parameters",
    "layer_of",
    "sample_gradients",
]

Cotangents = Callable[[Tensor], Tensor]
"""Maps outputs ``(N, C)`` to columns of their curvature, ``(N, K, C)``."""

_DROPOUT = torch.nn.modules.dropout._DropoutNd
_BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm
Draw = Callable[..., Tensor]


class Curvature(ABC):
    r"""Base class of the curvature H of a network's negative log likelihood, or an approximation.

    :math:`H = \sum_{nk} (J_n^\top v_{nk}) (J_n^\top v_{nk})^\top` with columns v of output
    curvature.
    """

    @abstractmethod
    def log_det_ratio(
        self, precisions: Mapping[str, Tensor], scale: Tensor | float = 1.0
    ) -> Tensor:
        r""":math:`\log |s H + P_0| - \log |P_0|`, in nats.

        Args:
            precisions: Prior precision of each parameter, by name.
            scale: Factor s of H.

        Returns:
            A number; differentiable in the precisions, the scale and the points.
        """

    @torch.no_grad()
    def sample(
        self,
        precisions: Mapping[str, Tensor],
        scale: Tensor | float = 1.0,
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        r"""Draws from :math:`\mathcal N(0, (s H + P_0)^{-1})`: deviations of weights.

        Args:
            precisions: Prior precision of each parameter, by name.
            scale: Factor s of H.
            count: Number of draws.
            generator: Source of the draws; seed 0 if None.

        Returns:
            Draws by name, ``(count, *shape)``.

        Raises:
            UnsupportedError: Draws are not available in this structure.
        """
        source = torch.Generator().manual_seed(0) if generator is None else generator
        like = next(iter(precisions.values()))

        def draw(*shape: int) -> Tensor:
            # In float64, so that one seed gives one draw in every dtype and on every device.
            normal = torch.randn(shape, generator=source, dtype=torch.float64, device=source.device)
            return normal.to(like)

        return self._draws(precisions, float(scale), count, draw)

    @abstractmethod
    def _draws(
        self, precisions: Mapping[str, Tensor], scale: float, count: int, draw: Draw
    ) -> dict[str, Tensor]:
        """What :meth:`sample` returns, made of standard normal numbers ``draw(*shape)``."""

    @abstractmethod
    def __add__(self, other: Any) -> Self:
        """The curvature at the points of both, or an UnsupportedError if it is not known."""


class Structure(ABC):
    """Base class of structures: which parts of the curvature are kept, and in which form."""

    @abstractmethod
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> Curvature:
        """The curvature at points.

        Args:
            module: Maps ``(N, *event)`` to ``(N, C)``.
            x: Points, ``(N, *event)``; if they require a gradient so does the curvature.
            cotangents: Maps outputs to columns of their curvature, ``(N, K, C)``.

        Raises:
            ArgumentError: No parameter is trainable.
            ModelModeError: Dropout or batch normalization is in train mode.
            ShapeError: The network's outputs or the columns have other shapes.
            NonFiniteError: A column is not finite.
            UnsupportedError: The structure does not support a module of the network, which the
                error names.
        """


@checked(late=True, passes_on="x", x="(N, *event)")
def sample_gradients(
    module: torch.nn.Module, x: Tensor, cotangents: Cotangents, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    r"""Gradients at single points: the rows :math:`J_n^\top v_{nk}` of each parameter.

    Args:
        module: Maps ``(N, *event)`` to ``(N, C)``, each point independently.
        x: Points, ``(N, *event)``.
        cotangents: Maps outputs to the columns v of their curvature.
        names: Names of trained parameters; all if None.

    Returns:
        Rows by the parameter's name, ``(N, K, *shape)``; differentiable in ``x``.

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


def check_network(module: torch.nn.Module) -> None:
    """Raises where the curvature of a network is not defined."""
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


def check_cotangents(cotangents: Tensor, outputs: Tensor) -> None:
    """Raises where columns of output curvature have a wrong shape or are not finite."""
    if outputs.ndim != 2:
        raise ShapeError("module", f"outputs {tuple(outputs.shape)}", "outputs (N, C)")
    if cotangents.ndim != 3 or cotangents.shape[::2] != outputs.shape:
        n, c = outputs.shape
        raise ShapeError("cotangents", tuple(cotangents.shape), f"({n}, K, {c})")
    check_finite("output curvature", cotangents, "Check the outputs of the network.")


def fresh_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """The trainable parameters, detached: gradients do not reach those of the network."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def layer_of(name: str) -> str:
    """The module that a parameter belongs to, by the parameter's name."""
    return name.rpartition(".")[0]
