"""Weights of any covariance, and what more points teach them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError
from gpclml.linalg.gaussians.distribution import WeightDistribution, check_positive

__all__ = ["FullGaussian"]


@checked(mean="float (R,)", root="float (R, R)")
@dataclass(frozen=True)
class FullGaussian(WeightDistribution):
    r"""Any covariance, by a square root :math:`\Sigma = A A^\top`.

    Attributes:
        mean: ``(R,)``.
        root: A, ``(R, R)``, not singular.

    Raises:
        ShapeError: The root is not of that shape.
    """

    mean: Tensor
    root: Tensor

    def __post_init__(self) -> None:
        R = len(self.mean)
        if self.root.shape != (R, R):
            raise ShapeError("root", tuple(self.root.shape), f"({R}, {R}), as the mean")

    def variance(self) -> Tensor:
        """Of each weight, ``(R,)``."""
        return self.root.square().sum(-1)

    def log_det(self) -> Tensor:
        """Of the covariance; R³ operations."""
        return 2 * torch.linalg.slogdet(self.root)[1]

    def predictive_variance(self, features: Tensor) -> Tensor:
        """At points, ``(n, R)`` to ``(n,)``."""
        return (features @ self.root).square().sum(-1)

    def precision_times(self, columns: Tensor) -> Tensor:
        """By two solves, ``(R, k)`` to ``(R, k)``."""
        return torch.linalg.solve(self.root.mT, torch.linalg.solve(self.root, columns))

    def precision_diagonal(self) -> Tensor:
        """Of the inverse, ``(R,)``."""
        return torch.linalg.inv(self.root).square().sum(0)

    def parts(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The root."""
        return None, self.root, 1.0

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        return self._normals((num_draws, len(self.mean)), generator) @ self.root.mT

    def updated(
        self, features: Tensor, residual: float | Tensor, noise: float | Tensor
    ) -> FullGaussian:
        r"""The posterior once more points are seen, one after the other.

        Potter's form of the update keeps the covariance positive: with
        :math:`v = A^\top \phi`, :math:`s = \sigma^2 + v^\top v` and
        :math:`\gamma = 1 / (s + \sigma \sqrt{s})`,
        :math:`A \leftarrow A - \gamma A v v^\top` (Bierman 1977, Section II.3).

        Args:
            features: Of new points, ``(R,)`` or ``(m, R)``.
            residual: Their targets less the prior mean, a number or ``(m,)``.
            noise: Noise variance, one or ``(m,)``.

        Returns:
            A new distribution; this one stays as it is.

        Raises:
            ShapeError: The features have another number of columns, or targets are not as many.
            ArgumentError: The noise is not positive.

        Note:
            4 R² operations a point.
        """
        R = len(self.mean)
        if features.shape[-1] != R:
            raise ShapeError("features", tuple(features.shape), f"(m, {R}), a column a weight")
        rows = features.reshape(-1, R)
        # In the type of the mean at once: a float would pass through float32.
        residual, noise = (
            torch.as_tensor(given, dtype=self.mean.dtype, device=self.mean.device).reshape(-1)
            for given in (residual, noise)
        )
        noise = noise.expand(len(rows)) if len(noise) == 1 else noise
        for name, values in (("residual", residual), ("noise", noise)):
            if len(values) != len(rows):
                raise ShapeError(name, f"{len(values)} numbers", f"{len(rows)}, one a point")
        check_positive("noise", noise)
        mean, root = self.mean, self.root
        for phi, target, variance in zip(rows, residual, noise, strict=True):
            v = root.mT @ phi
            s = variance + v @ v
            gain = root @ v
            mean = mean + gain * ((target - phi @ mean) / s)
            root = root - torch.outer(gain / (s + (variance * s).sqrt()), v)
        return FullGaussian(mean, root)
