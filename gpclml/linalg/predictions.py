"""How each point is predicted from those before it."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError
from gpclml.linalg._checks import check_indices, check_residual
from gpclml.linalg.cholesky import safe_cholesky
from gpclml.linalg.low_rank import LowRankPlusDiagonal
from gpclml.linalg.permutations import permute

__all__ = ["sequential_predictions"]


@torch.no_grad()
@checked(covariance="float (n, n)", residual="float (n,)", orders="integer (k, n)")
def sequential_predictions(
    covariance: Tensor | LowRankPlusDiagonal,  # shape: (n, n)
    residual: Tensor,  # shape: (n,)
    orders: Tensor,  # shape: (k, n)
) -> tuple[Tensor, Tensor]:
    r"""Errors :math:`r_i - E[r_i \mid r_{<i}]` and variances :math:`Var[r_i \mid r_{<i}]`.

    With :math:`K = L L^\top`, points in their order, and :math:`z = L^{-1} r` they are
    :math:`z_i L_{ii}` and :math:`L_{ii}^2`. Without a gradient.

    Args:
        covariance: Of the observations, noise included, ``(n, n)``.
        residual: Observations minus their prior mean, ``(n,)``.
        orders: Orders in which the points arrive, ``(k, n)``.

    Returns:
        Errors and variances, noise included, ``(k, n)`` each; number i of row j is of point
        ``orders[j, i]``.

    Raises:
        ShapeError: If the shapes do not fit one another.
        ArgumentError: If an order is not a permutation.
        NonFiniteError, NotPSDError: As :func:`~gpclml.linalg.cholesky.safe_cholesky`.

    Note:
        n³/3 floating-point operations for each order; about 4 n R² with rank R, for all orders
        at once.
    """
    if len(covariance.shape) != 2:
        raise ShapeError("covariance", tuple(covariance.shape), "(n, n), no batch")
    check_residual(covariance.shape, residual)
    n = residual.shape[-1]
    if residual.ndim != 1:
        raise ShapeError("residual", tuple(residual.shape), f"({n},), no batch")
    if orders.ndim != 2:
        raise ShapeError("orders", tuple(orders.shape), f"(k, {n})")
    for order in orders:
        check_indices("orders", order, n, count=n)
    orders = orders.to(residual.device)
    if isinstance(covariance, LowRankPlusDiagonal):
        return covariance.sequential_predictions(residual, orders)
    errors, variances = [], []
    for order in orders:
        L = safe_cholesky(permute(covariance, order))
        right = residual[order].to(L.dtype).unsqueeze(-1)
        z = torch.linalg.solve_triangular(L, right, upper=False).squeeze(-1)
        spread = L.diagonal()
        errors.append((z * spread).to(residual.dtype))
        variances.append(spread.square().to(residual.dtype))
    return torch.stack(errors), torch.stack(variances)
