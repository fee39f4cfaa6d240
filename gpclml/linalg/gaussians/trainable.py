"""Gaussians over weights whose parameters an optimizer trains."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.linalg.gaussians.diagonal import DiagonalGaussian
from gpclml.linalg.gaussians.distribution import WeightDistribution
from gpclml.linalg.gaussians.families import (
    DiagonalFamily,
    FullFamily,
    GaussianFamily,
    LowRankFamily,
)
from gpclml.linalg.gaussians.full import FullGaussian
from gpclml.linalg.gaussians.low_rank import LowRankGaussian

__all__ = ["TrainableGaussian"]


class TrainableGaussian(torch.nn.Module):
    """A member of a family as parameters: mean, and log variances, a factor or a root.

    It starts as independent weights of mean zero and prior variance; a factor starts near zero,
    a root lower triangular with the logarithm of its diagonal as the parameter.

    Args:
        family: Which form.
        prior_variance: ``(R,)``.
        seed: Of the start of a factor, which has no gradient at zero.

    Raises:
        UnsupportedError: Another family.
        ArgumentError: A rank above R.

    Examples:
        >>> q = TrainableGaussian(DiagonalFamily(), model.prior_variance)
        >>> mll = LinearEvidenceLowerBound(model.likelihood, model, posterior=q)
    """

    @checked(prior_variance="float (R,)")
    def __init__(self, family: GaussianFamily, prior_variance: Tensor, seed: int = 0) -> None:
        super().__init__()
        self.family = family
        start = prior_variance.detach()
        R = len(start)
        self.mean = torch.nn.Parameter(torch.zeros_like(start))
        if isinstance(family, DiagonalFamily):
            self.log_variance = torch.nn.Parameter(start.log())
        elif isinstance(family, FullFamily):
            self.log_diagonal = torch.nn.Parameter(0.5 * start.log())
            self.below = torch.nn.Parameter(start.new_zeros(R, R))
        elif isinstance(family, LowRankFamily):
            if family.rank > R:
                raise ArgumentError("rank", family.rank, f"at most {R}, the number of weights")
            generator = torch.Generator().manual_seed(seed)
            draw = torch.randn(R, family.rank, generator=generator, dtype=torch.float64)
            self.factor = torch.nn.Parameter(draw.to(start) * (start / R).sqrt().unsqueeze(-1))
        else:
            known = "DiagonalFamily, LowRankFamily or FullFamily"
            raise UnsupportedError("family", type(family).__name__, known)

    def forward(self) -> WeightDistribution:
        """The distribution at the present parameters."""
        if isinstance(self.family, DiagonalFamily):
            return DiagonalGaussian(self.mean, self.log_variance.exp())
        if isinstance(self.family, LowRankFamily):
            return LowRankGaussian(self.mean, self.factor, self.family.epsilon)
        root = self.below.tril(-1) + torch.diag(self.log_diagonal.exp())
        return FullGaussian(self.mean, root)
