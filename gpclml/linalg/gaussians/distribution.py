"""What a Gaussian over the weights of a linear model answers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gpclml.errors import ArgumentError

__all__ = ["WeightDistribution", "check_positive"]


class WeightDistribution(ABC):
    """A Gaussian over R weights.

    Attributes:
        mean: ``(R,)``.
    """

    mean: Tensor

    @abstractmethod
    def variance(self) -> Tensor:
        """Of each weight, ``(R,)``."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """Of the covariance, a number."""

    @abstractmethod
    def predictive_variance(self, features: Tensor) -> Tensor:
        r"""Variances :math:`\phi^\top \Sigma \phi` at points, ``(n, R)`` to ``(n,)``."""

    @abstractmethod
    def precision_times(self, columns: Tensor) -> Tensor:
        r"""Products :math:`\Sigma^{-1} V`, ``(R, k)`` to ``(R, k)``."""

    @abstractmethod
    def precision_diagonal(self) -> Tensor:
        r"""The diagonal of :math:`\Sigma^{-1}`, ``(R,)``."""

    @abstractmethod
    def parts(self) -> tuple[Tensor | None, Tensor | None, float]:
        r"""A diagonal d, a factor V and a sign with :math:`\Sigma = diag(d) \pm V V^\top`."""

    def predictive_covariance(self, features: Tensor) -> Tensor:
        r"""Covariances :math:`\Phi \Sigma \Phi^\top` of points, ``(n, R)`` to ``(n, n)``."""
        diagonal, factor, sign = self.parts()
        total = features.new_zeros(len(features), len(features))
        if diagonal is not None:
            total = total + (features * diagonal) @ features.mT
        if factor is not None:
            under = features @ factor
            total = total + sign * (under @ under.mT)
        return total

    @abstractmethod
    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draws less the mean, ``(S, R)``."""

    @torch.no_grad()
    def sample(self, num_draws: int, seed: int | torch.Generator = 0) -> Tensor:
        """Draws.

        Args:
            num_draws: Number S.
            seed: Seed, or a generator on the CPU.

        Returns:
            ``(S, R)``.
        """
        if num_draws < 1:
            raise ArgumentError("num_draws", num_draws, "at least 1")
        if isinstance(seed, int):
            seed = torch.Generator().manual_seed(seed)
        return self.mean + self._centered(num_draws, seed)

    def _normals(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.mean)


def check_positive(argument: str, values: Tensor) -> None:
    """Refuses variances of which one is not positive, or NaN."""
    lowest = float(values.detach().min())
    if not lowest > 0:
        raise ArgumentError(
            argument, f"as low as {lowest:g}", "positive variances", "Raise them above zero."
        )
