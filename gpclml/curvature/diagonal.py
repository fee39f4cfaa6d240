"""The diagonal of the curvature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.curvature._draws import normal_draws
from gpclml.curvature._sample_gradients import Cotangents, sample_gradients

__all__ = ["Diagonal", "DiagonalCurvature"]


class DiagonalCurvature:
    r""":math:`h = \operatorname{diag} \sum_{nk} (J_n^\top v_{nk}) (J_n^\top v_{nk})^\top`.

    Args:
        diagonal: Of each parameter, in its shape, by name.
    """

    def __init__(self, diagonal: Mapping[str, Tensor]) -> None:
        self.diagonal = dict(diagonal)

    @classmethod
    def of_gradients(cls, gradients: Mapping[str, Tensor]) -> DiagonalCurvature:
        """From the rows of each parameter.

        Args:
            gradients: ``(N, K, *shape)`` by name.
        """
        return cls({name: rows.square().sum((0, 1)) for name, rows in gradients.items()})

    def log_det_ratio(
        self, precisions: Mapping[str, Tensor], scale: Tensor | float = 1.0
    ) -> Tensor:
        r""":math:`\sum_i \log(1 + s h_i / \delta_i)`, in nats.

        Args:
            precisions: Prior precision of each parameter, by name.
            scale: What h is multiplied by.

        Returns:
            A number; differentiable in the precisions, the scale and the points.
        """
        terms = [(scale * h / precisions[name]).log1p().sum() for name, h in self.diagonal.items()]
        return torch.stack(terms).sum()

    @torch.no_grad()
    def sample(
        self,
        precisions: Mapping[str, Tensor],
        scale: float = 1.0,
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """Deviations of weights; see :meth:`DenseCurvature.sample`.

        Args:
            precisions: Prior precision of each parameter, by name.
            scale: What h is multiplied by.
            count: Number of draws.
            generator: Source of the draws; seed 0 if None.
        """
        draw = normal_draws(generator, next(iter(precisions.values())))
        return {
            name: draw(count, *h.shape) * (float(scale) * h + precisions[name]).rsqrt()
            for name, h in self.diagonal.items()
        }

    def __add__(self, other: DiagonalCurvature) -> DiagonalCurvature:
        """The curvature at the points of both."""
        return DiagonalCurvature({k: h + other.diagonal[k] for k, h in self.diagonal.items()})


@dataclass(frozen=True)
class Diagonal:
    """Each parameter on its own: the loosest of the bounds (Immer et al. 2023, Theorem 1)."""

    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DiagonalCurvature:
        """The curvature at points.

        Args:
            module: Maps ``(N, *event)`` to ``(N, C)``.
            x: Points, ``(N, *event)``.
            cotangents: Maps outputs to columns of their curvature, ``(N, K, C)``.

        Raises:
            ArgumentError, ModelModeError, ShapeError, NonFiniteError: Something of these cannot
                be used.

        Note:
            N K P numbers in memory.
        """
        return DiagonalCurvature.of_gradients(sample_gradients(module, x, cotangents))
