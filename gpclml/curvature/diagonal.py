"""The diagonal of the curvature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import checked
from gpclml.curvature._draws import normal_draws
from gpclml.curvature._sample_gradients import Cotangents, sample_gradients
from gpclml.curvature.structure import Curvature, Structure

__all__ = ["Diagonal", "DiagonalCurvature"]


class DiagonalCurvature(Curvature):
    r""":math:`h = \operatorname{diag} \sum_{nk} (J_n^\top v_{nk}) (J_n^\top v_{nk})^\top`.

    Args:
        diagonal: Of each parameter, in its shape, by name.
    """

    @checked(late=True)
    def __init__(self, diagonal: Mapping[str, Tensor]) -> None:
        self.diagonal = dict(diagonal)

    @classmethod
    def of_gradients(cls, gradients: Mapping[str, Tensor]) -> DiagonalCurvature:
        """From the rows of each parameter.

        Args:
            gradients: ``(N, K, *shape)`` by name.
        """
        return cls({name: rows.square().sum((0, 1)) for name, rows in gradients.items()})

    @override
    def log_det_ratio(
        self, precisions: Mapping[str, Tensor], scale: Tensor | float = 1.0
    ) -> Tensor:
        terms = [(scale * h / precisions[name]).log1p().sum() for name, h in self.diagonal.items()]
        return torch.stack(terms).sum()

    @override
    @torch.no_grad()
    def sample(
        self,
        precisions: Mapping[str, Tensor],
        scale: Tensor | float = 1.0,
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        draw = normal_draws(generator, next(iter(precisions.values())))
        return {
            name: draw(count, *h.shape) * (float(scale) * h + precisions[name]).rsqrt()
            for name, h in self.diagonal.items()
        }

    @override
    def __add__(self, other: Self) -> Self:
        return type(self)({k: h + other.diagonal[k] for k, h in self.diagonal.items()})


@dataclass(frozen=True)
class Diagonal(Structure):
    """Each parameter on its own: the loosest of the bounds (Immer et al. 2023, Theorem 1).

    Note:
        N K P numbers in memory.
    """

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DiagonalCurvature:
        return DiagonalCurvature.of_gradients(sample_gradients(module, x, cotangents))
