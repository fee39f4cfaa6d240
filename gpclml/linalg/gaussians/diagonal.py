"""Independent weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError
from gpclml.linalg.gaussians._products import row_square_sums
from gpclml.linalg.gaussians.distribution import WeightDistribution, check_positive

__all__ = ["DiagonalGaussian"]


@checked(mean="float (R,)", variances="float (R,)")
@dataclass(frozen=True)
class DiagonalGaussian(WeightDistribution):
    """Independent weights.

    Attributes:
        mean: ``(R,)``.
        variances: ``(R,)``.

    Raises:
        ShapeError: They differ in shape.
        ArgumentError: A variance is not positive.
    """

    mean: Tensor
    variances: Tensor

    def __post_init__(self) -> None:
        if self.mean.ndim != 1 or self.variances.shape != self.mean.shape:
            got = f"{tuple(self.variances.shape)} beside a mean {tuple(self.mean.shape)}"
            raise ShapeError("variances", got, "(R,), as the mean")
        check_positive("variances", self.variances)

    def variance(self) -> Tensor:
        """Of each weight, ``(R,)``."""
        return self.variances

    def log_det(self) -> Tensor:
        """Of the covariance."""
        return self.variances.log().sum()

    def predictive_variance(self, features: Tensor) -> Tensor:
        """At points, ``(n, R)`` to ``(n,)``; without a second array of that size."""
        return row_square_sums(features, self.variances)

    def precision_times(self, columns: Tensor) -> Tensor:
        """Quotients, ``(R, k)`` to ``(R, k)``."""
        return columns / self.variances.unsqueeze(-1)

    def precision_diagonal(self) -> Tensor:
        """Inverse variances, ``(R,)``."""
        return 1 / self.variances

    def parts(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The variances."""
        return self.variances, None, 1.0

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        shape = (num_draws, len(self.mean))
        return self.variances.sqrt() * self._normals(shape, generator)
