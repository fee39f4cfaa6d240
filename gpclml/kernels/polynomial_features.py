"""Products and choices of input columns."""

from __future__ import annotations

from itertools import combinations_with_replacement

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError

__all__ = ["IdentityFeatures", "PolynomialFeatures", "PrefixFeatures"]


class IdentityFeatures(torch.nn.Module):
    """The columns themselves, with a column of ones if asked.

    Args:
        intercept: Put a column of ones first.
    """

    @checked
    def __init__(self, intercept: bool = False) -> None:
        super().__init__()
        self.intercept = intercept

    def forward(self, x: Tensor) -> Tensor:
        """Features of points, ``(*batch, n, d)`` to the same, or to ``d + 1`` columns."""
        return torch.cat([torch.ones_like(x[..., :1]), x], dim=-1) if self.intercept else x


class PolynomialFeatures(torch.nn.Module):
    r"""All products of at most so many columns, the empty product 1 included.

    Ordered by degree; with one column :math:`1, x, x^2, \ldots`. There are
    :math:`\binom{d + p}{p}` for degree p. Polynomials of high degree want inputs within
    [-1, 1].

    Args:
        degree: Largest number of factors p.

    Raises:
        ArgumentError: The degree is negative.
    """

    @checked
    def __init__(self, degree: int) -> None:
        super().__init__()
        if degree < 0:
            raise ArgumentError("degree", degree, "at least 0")
        self.degree = degree

    @checked(late=True, x="float (*batch, n, d)")
    def forward(self, x: Tensor) -> Tensor:
        """Features of points, ``(*batch, n, d)`` to ``(*batch, n, R)``."""
        columns = [torch.ones_like(x[..., 0])]
        for count in range(1, self.degree + 1):
            for chosen in combinations_with_replacement(range(x.shape[-1]), count):
                columns.append(x[..., list(chosen)].prod(-1))
        return torch.stack(columns, dim=-1)


class PrefixFeatures(torch.nn.Module):
    """The first columns of the inputs: a nested family of models, ordered by size.

    Args:
        num_features: How many.

    Raises:
        ArgumentError: The number is below one.
    """

    @checked
    def __init__(self, num_features: int) -> None:
        super().__init__()
        if num_features < 1:
            raise ArgumentError("num_features", num_features, "at least 1")
        self.num_features = num_features

    @checked(late=True, x="float (*batch, n, d)")
    def forward(self, x: Tensor) -> Tensor:
        """Features of points, ``(*batch, n, d)`` to ``(*batch, n, num_features)``.

        Raises:
            ShapeError: The points have fewer columns.
        """
        if x.shape[-1] < self.num_features:
            raise ShapeError("x", tuple(x.shape), f"at least {self.num_features} columns")
        return x[..., : self.num_features]
