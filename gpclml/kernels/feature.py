"""The covariance of a model that is linear in features."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel
from linear_operator.operators import (
    LinearOperator,
    LowRankRootLinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
)
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError

__all__ = ["FeatureKernel"]


class FeatureKernel(Kernel):
    r"""Inner products of features under the prior variances of their weights.

    .. math:: k(x, x') = \phi(x)^\top S \, \phi(x'), \qquad w \sim N(0, S), \; f(x) = w^\top \phi(x)

    With fewer features than points the covariance is an operator of low rank, and every exact
    objective and score costs n R² instead of n³. Differentiable in S and in what the features
    depend on.

    Args:
        features: Maps ``(*batch, n, d)`` to ``(*batch, n, R)``: a module, whose parameters are
            the kernel's, or a function.
        prior_variance: S: a number for all weights, or one for each, ``(R,)``.

    Raises:
        ArgumentError: A prior variance is not positive.

    Examples:
        >>> kernel = FeatureKernel(PolynomialFeatures(3))
    """

    has_lengthscale = False

    @checked(prior_variance="float () | (R,)")
    def __init__(
        self, features: Callable[[Tensor], Tensor], prior_variance: float | Tensor = 1.0
    ) -> None:
        super().__init__()
        self.features = features
        start = torch.as_tensor(prior_variance)
        if not start.is_floating_point():
            start = start.to(torch.get_default_dtype())
        raw = torch.nn.Parameter(torch.zeros_like(start.detach().reshape(-1)))
        self.register_parameter("raw_prior_variance", raw)
        self.register_constraint("raw_prior_variance", Positive())
        self.prior_variance = start.reshape(-1)

    @property
    def prior_variance(self) -> Tensor:
        """Prior variances of the weights, ``(1,)`` or ``(R,)``."""
        constraint = cast(Positive, self.raw_prior_variance_constraint)
        return constraint.transform(cast(Tensor, self.raw_prior_variance))

    @prior_variance.setter
    def prior_variance(self, value: float | Tensor) -> None:
        raw = cast(Tensor, self.raw_prior_variance)
        wanted = torch.as_tensor(value, dtype=raw.dtype, device=raw.device)
        if wanted.shape not in ((), (1,), raw.shape):
            expected = f"a number or {tuple(raw.shape)}, as at the start"
            raise ShapeError("prior_variance", tuple(wanted.shape), expected)
        if not bool((wanted > 0).all()):
            lowest = float(wanted.min())
            raise ArgumentError(
                "prior_variance", f"as low as {lowest:g}", "positive variances",
                "Leave a feature out rather than giving its weight no variance.",
            )  # fmt: skip
        constraint = cast(Positive, self.raw_prior_variance_constraint)
        wanted = constraint.inverse_transform(wanted.expand_as(raw))
        self.initialize(raw_prior_variance=wanted)

    def features_of(self, x: Tensor) -> Tensor:
        """Features of points.

        Args:
            x: ``(*batch, n, d)``.

        Returns:
            ``(*batch, n, R)``.

        Raises:
            ShapeError: They are not of that shape, or not as many as prior variances.
        """
        phi = self.features(x)
        if phi.shape[:-1] != x.shape[:-1] or phi.shape[-1] == 0:
            expected = f"{(*x.shape[:-1],)} and R features"
            raise ShapeError("features", f"{tuple(phi.shape)} of {tuple(x.shape)}", expected)
        count = self.prior_variance.shape[-1]
        if count not in (1, phi.shape[-1]):
            expected = f"one number, or {phi.shape[-1]}, one for each feature"
            raise ShapeError("prior_variance", f"{count} numbers", expected)
        return phi

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: object,
    ) -> Tensor | LinearOperator:
        """Covariances of points.

        Args:
            x1: Points. Shape ``(*batch, n, d)``.
            x2: Points. Shape ``(*batch, m, d)``.
            diag: Only those of corresponding points.
            last_dim_is_batch: Not supported.
            **params: Not used.

        Returns:
            Shape ``(*batch, n, m)``, an operator of low rank; ``(*batch, n)`` with ``diag``.

        Raises:
            UnsupportedError: ``last_dim_is_batch`` is set.
            ShapeError: The features do not fit.
        """
        if last_dim_is_batch:
            raise UnsupportedError("last_dim_is_batch", True, "False")
        scale = self.prior_variance.sqrt()
        first = self.features_of(x1) * scale
        same = x1 is x2 or (x1.shape == x2.shape and torch.equal(x1, x2))
        second = first if same else self.features_of(x2) * scale
        if diag:
            return (first * second).sum(-1)
        if not same:
            return MatmulLinearOperator(first, second.mT)
        low_rank = first.shape[-1] < first.shape[-2]
        return LowRankRootLinearOperator(first) if low_rank else RootLinearOperator(first)
