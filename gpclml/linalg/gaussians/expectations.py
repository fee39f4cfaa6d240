"""Kullback-Leibler divergence between Gaussians of weights, and expected squared errors."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError
from gpclml.linalg import refuse_double_backward
from gpclml.linalg.gaussians.distributions import (
    DiagonalGaussian,
    DualGaussian,
    WeightDistribution,
    column_square_sums,
    row_square_sums,
)

__all__ = [
    "expected_square",
    "gaussian_kl",
]


@checked(late=True, p="float (R,)")
def gaussian_kl(q: WeightDistribution, p: WeightDistribution | Tensor) -> Tensor:
    r"""The Kullback-Leibler divergence of q from p, in nats.

    .. math:: \tfrac12 \left( tr(\Sigma_p^{-1} \Sigma_q)
        + (\mu_p - \mu_q)^\top \Sigma_p^{-1} (\mu_p - \mu_q) - R
        + \log |\Sigma_p| - \log |\Sigma_q| \right)

    Args:
        q: A distribution of any form.
        p: A distribution of any form; or the variances ``(R,)`` of a prior of independent weights
            with mean zero.

    Returns:
        A number, not negative.

    Raises:
        ShapeError: The numbers of weights differ.

    Note:
        Linear in R except for full covariances.
    """
    if isinstance(p, Tensor):
        p = DiagonalGaussian(torch.zeros_like(p), p)
    R = len(q.mean)
    if len(p.mean) != R:
        raise ShapeError("p", f"{len(p.mean)} weights", f"{R}, as q")
    shift = (p.mean - q.mean).unsqueeze(-1)
    quadratic = (shift * p.precision_times(shift)).sum()
    if isinstance(p, DiagonalGaussian):
        trace = (q.variance() / p.variances).sum()
    else:
        diagonal, factor, sign = q.parts()
        trace = q.mean.new_zeros(())
        if diagonal is not None:
            trace = trace + (diagonal * p.precision_diagonal()).sum()
        if factor is not None:
            trace = trace + sign * (factor * p.precision_times(factor)).sum()
    return 0.5 * (trace + quadratic - R + p.log_det() - q.log_det())


@checked(late=True, features="float (n, R)", residual="float (n,)")
def expected_square(q: WeightDistribution, features: Tensor, residual: Tensor) -> Tensor:
    r"""The sum over points of :math:`E_q (r_i - w^\top \phi_i)^2`.

    .. math:: \|r - \Phi \mu\|^2 + tr(\Phi \Sigma \Phi^\top)

    Args:
        q: A distribution of any form.
        features: ``(n, R)``.
        residual: ``(n,)``.

    Returns:
        A number, differentiable in all of them once.

    Raises:
        ShapeError: The shapes do not fit each other.

    Note:
        n R k operations for a covariance of rank k and a diagonal; the gradient is one array of
        the features' size.
    """
    if features.shape[-1:] != q.mean.shape:
        expected = f"(n, {len(q.mean)}), one column for each weight"
        raise ShapeError("features", tuple(features.shape), expected)
    if residual.shape != features.shape[:1]:
        expected = f"({len(features)},), one for each row of features"
        raise ShapeError("residual", tuple(residual.shape), expected)
    if isinstance(q, DualGaussian):
        errors = residual - features @ q.mean
        return (errors.square() + q.predictive_variance(features)).sum()
    diagonal, factor, _ = q.parts()
    total = _ExpectedSquare.apply(features, residual, q.mean, diagonal, factor)
    assert isinstance(total, Tensor)
    return total


class _ExpectedSquare(torch.autograd.Function):
    """With a covariance diag(d) + V Vᵀ, of which either part may be missing."""

    @staticmethod
    def forward(ctx, features, residual, mean, diagonal, factor):
        errors = residual - features @ mean
        under = None if factor is None else features @ factor
        ctx.save_for_backward(features, mean, diagonal, factor, errors, under)
        total = errors.square().sum()
        if diagonal is not None:
            total = total + row_square_sums(features, diagonal).sum()
        return total if under is None else total + under.square().sum()

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("expected_square")
        features, mean, diagonal, factor, errors, under = ctx.saved_tensors
        grad, needed = grads[0], ctx.needs_input_grad
        of_features = of_mean = of_diagonal = of_factor = None
        if needed[0]:
            of_features = torch.zeros_like(features) if diagonal is None else features * diagonal
            of_features.addr_(errors, mean, alpha=-1.0)
            if under is not None:
                of_features.addmm_(under, factor.mT)
            of_features.mul_(2 * grad)
        if needed[2]:
            of_mean = -2 * grad * (errors @ features)
        if needed[3] and diagonal is not None:
            of_diagonal = grad * column_square_sums(features, torch.ones_like(errors))
        if needed[4] and under is not None:
            of_factor = 2 * grad * (features.mT @ under)
        return of_features, 2 * grad * errors, of_mean, of_diagonal, of_factor
