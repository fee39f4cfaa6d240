"""What a structure of the curvature is, and what it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from gpclml.curvature._sample_gradients import Cotangents

__all__ = ["Curvature", "Structure"]


class Curvature(ABC):
    r"""The curvature H of a network's negative log likelihood at points, or what stands for it.

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
            scale: What H is multiplied by.

        Returns:
            A number; differentiable in the precisions, the scale and the points.
        """

    @abstractmethod
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
            scale: What H is multiplied by.
            count: Number of draws.
            generator: Source of the draws; seed 0 if None.

        Returns:
            ``(count, *shape)`` by name.

        Raises:
            UnsupportedError: It does not give weights.
        """

    @abstractmethod
    def __add__(self, other: Any) -> Self:
        """The curvature at the points of both; raises an UnsupportedError if it is not known."""


class Structure(ABC):
    """Which parts of the curvature are kept, and in which form."""

    @abstractmethod
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> Curvature:
        """The curvature at points.

        Args:
            module: Maps ``(N, *event)`` to ``(N, C)``.
            x: Points, ``(N, *event)``; where they require a gradient so does the curvature.
            cotangents: Maps outputs to columns of their curvature, ``(N, K, C)``.

        Raises:
            ArgumentError: No parameter is trainable.
            ModelModeError: Dropout or batch normalization is in train mode.
            ShapeError: The network's outputs or the columns have other shapes.
            NonFiniteError: A column is not finite.
            UnsupportedError: The structure does not take a module of the network; named.
        """
