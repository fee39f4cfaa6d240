"""Gaussian densities and predictions of residuals: tensors in, tensors out, of any covariance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.linalg.covariance import Covariance, check_indices, check_residual
from gpclml.linalg.dense import DenseCovariance

__all__ = [
    "block_conditional_log_densities",
    "conditional_log_density",
    "leave_one_out_moments",
    "sequential_log_densities",
    "sequential_predictions",
]


@checked(
    late=True,
    covariance="float (*batch, n, n)",
    residual="float (*batch, n)",
    held_out="index (b,) | (*batch, b)",
)
def conditional_log_density(
    covariance: Tensor | Covariance,  # shape: (*batch, n, n)
    residual: Tensor,  # shape: (*batch, n)
    held_out: Tensor,  # shape: (b,) or (*batch, b)
    factor_dtype: torch.dtype | None = None,
    *,
    checked: bool = True,
) -> Tensor:
    r"""The joint log density of the held-out points given all others, in nats.

    .. math:: \log p(r_B \mid r_A) = \sum_{i \in B} \left(-\tfrac12 z_i^2 - \log L_{ii}
        - \tfrac12 \log 2\pi\right)

    with the points ordered so that B is last (Lotfi et al. 2022, Eq. 5 and Section 6). The
    gradient is in closed form: with :math:`W = L^{-\top} E_B`,
    :math:`u = L^{-\top}[0; z_B]`, :math:`\alpha = L^{-\top} z`,

    .. math:: \partial/\partial K = -\tfrac12 (W W^\top + u u^\top)
        + \tfrac12 (u \alpha^\top + \alpha u^\top), \qquad \partial/\partial r = -u.

    With every point held out this is the log marginal likelihood. Residuals that share a
    covariance, in batch dimensions where the covariance has size 1 or none, share its factor.

    Args:
        covariance: Covariances of the observations, noise included, ``(*batch, n, n)``. One of low
            rank costs n R², and autograd computes its gradient.
        residual: Observations minus their prior mean, ``(*batch, n)``; batches broadcast.
        held_out: Indices of the b points that are scored, ``1 <= b <= n``: ``(b,)``, or
            ``(*batch, b)`` for points of its own in each batch member.
        factor_dtype: See :func:`gpclml.linalg.factorization_dtype`.
        checked: See :func:`gpclml.linalg.safe_cholesky`; the value is NaN if an unchecked
            factorization failed.

    Returns:
        One log density a batch member, ``(*batch,)``, in the type of ``covariance``.

    Raises:
        ShapeError: If the shapes do not fit one another.
        ArgumentError: If indices are empty, repeated or out of range.
        NonFiniteError, NotPSDError: As :func:`~gpclml.linalg.safe_cholesky`.
        UnsupportedError: On a second derivative.

    Note:
        n³/3 + 3 n² b floating-point operations for value and gradient (b <= 0.3 n; at most
        5/3 n³ beyond); three n x n arrays at the peak.
    """
    factored = _as_covariance(covariance, residual, factor_dtype, checked)
    return factored.conditional_log_density(residual, held_out)


@checked(late=True, covariance="float (*batch, n, n)", residual="float (*batch, n)")
def block_conditional_log_densities(
    covariance: Tensor | Covariance,  # shape: (*batch, n, n)
    residual: Tensor,  # shape: (*batch, n)
    blocks: Sequence[Tensor],  # shapes: (k_1, b_1), (k_2, b_2), ...
    factor_dtype: torch.dtype | None = None,
    *,
    checked: bool = True,
) -> Tensor:
    r"""The joint log density of each block given all points outside it, in nats.

    One factorization and one inverse serve every block. With :math:`Q = K^{-1}`,
    :math:`\alpha = Q r` and :math:`s = Q_{BB}^{-1} \alpha_B`,

    .. math:: \log p(r_B \mid r_{-B}) = -\tfrac12 \alpha_B^\top s + \tfrac12 \log |Q_{BB}|
        - \tfrac{b}{2} \log 2\pi.

    Blocks of one point are leave-one-out (Rasmussen and Williams 2006, Eqs. 5.10-5.12). The
    gradient of block B is in closed form: with :math:`u = Q_{:B} s`,

    .. math:: \partial/\partial K = -\tfrac12 Q_{:B} (s s^\top + Q_{BB}^{-1}) Q_{B:}
        + \tfrac12 (u \alpha^\top + \alpha u^\top), \qquad \partial/\partial r = -u.

    Args:
        covariance: As for :func:`conditional_log_density`.
        residual: As for :func:`conditional_log_density`.
        blocks: Indices of the held-out blocks, blocks of one size stacked: ``k_i`` blocks of
            ``b_i`` points each, ``(k_i, b_i)``. Blocks may overlap.
        factor_dtype: As for :func:`conditional_log_density`.
        checked: As for :func:`conditional_log_density`.

    Returns:
        One log density a block in the order given, ``(*batch, k_1 + k_2 + ...)``, in the type
        of ``covariance``.

    Raises:
        ShapeError, ArgumentError, NonFiniteError, NotPSDError, UnsupportedError: As
            :func:`conditional_log_density`.

    Note:
        About n³ floating-point operations for the values; the gradient adds about 1.2 n³ for
        disjoint blocks that cover the data, and 3.2 n³ for overlapping ones however many.
    """
    factored = _as_covariance(covariance, residual, factor_dtype, checked)
    return factored.block_log_densities(residual, blocks)


@checked(
    late=True, covariance="float (*batch, n, n)", residual="float (*batch, n)", order="index (n,)"
)
def sequential_log_densities(
    covariance: Tensor | Covariance,  # shape: (*batch, n, n)
    residual: Tensor,  # shape: (*batch, n)
    order: Tensor | None = None,  # shape: (n,)
    factor_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""The n terms :math:`\log p(r_i \mid r_{<i})` of a learning curve, in nats.

    The gradient is in closed form for any weighting of the terms: with weights w,
    :math:`W = L^{-\top}`, :math:`u = W (w \circ z)` and
    :math:`V_{ij} = w_{\min(i,j)} z_i z_j + w_i \delta_{ij}`,

    .. math:: \partial/\partial K = -\tfrac12 W V W^\top
        + \tfrac12 (u \alpha^\top + \alpha u^\top), \qquad \partial/\partial r = -u.

    Args:
        covariance: As for :func:`conditional_log_density`.
        residual: As for :func:`conditional_log_density`.
        order: Indices in the order in which points arrive, ``(n,)``; data order if None.
        factor_dtype: As for :func:`conditional_log_density`.

    Returns:
        Term i is the log density of point ``order[i]`` given the points before it,
        ``(*batch, n)``.

    Raises:
        ArgumentError: If ``order`` is not a permutation.
        ShapeError, NonFiniteError, NotPSDError, UnsupportedError: As
            :func:`conditional_log_density`.

    Note:
        n³/3 floating-point operations for the values, about 6 n³ with a gradient.
    """
    factored = _as_covariance(covariance, residual, factor_dtype)
    if order is None:
        return factored.sequential(residual).squeeze(-2)
    n = residual.shape[-1]
    return factored.sequential(
        residual, check_indices("order", order, n, count=n).unsqueeze(0)
    ).squeeze(-2)


@torch.no_grad()
@checked(covariance="float (n, n)", residual="float (n,)", orders="integer (k, n)")
def sequential_predictions(
    covariance: Tensor | Covariance,  # shape: (n, n)
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
        ArgumentError: If an order is not a permutation.
        ShapeError, NonFiniteError, NotPSDError: As :func:`conditional_log_density`.

    Note:
        n³/3 floating-point operations for each order; with rank R about 4 n R² for all at once.
    """
    return _as_covariance(covariance, residual).predictions(residual, orders)


@checked(
    late=True,
    covariance="float (*batch, n, n)",
    residual="float (*batch, n)",
    held_out="index (b,)",
)
def leave_one_out_moments(
    covariance: Tensor | Covariance,  # shape: (*batch, n, n)
    residual: Tensor,  # shape: (*batch, n)
    held_out: Tensor,  # shape: (b,)
    factor_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of single points given all others, those held out too.

    .. math:: \mu_i = r_i - \frac{[K^{-1} r]_i}{[K^{-1}]_{ii}}, \qquad
        \sigma_i^2 = \frac{1}{[K^{-1}]_{ii}}

    (Rasmussen and Williams 2006, Eq. 5.12).

    Args:
        covariance: As for :func:`conditional_log_density`.
        residual: As for :func:`conditional_log_density`.
        held_out: Indices of the b points to predict.
        factor_dtype: As for :func:`conditional_log_density`.

    Returns:
        Means and variances in the order of ``held_out``, ``(*batch, b)`` each, in the type of
        ``covariance``.

    Raises:
        ShapeError, ArgumentError, NonFiniteError, NotPSDError: As :func:`conditional_log_density`.

    Note:
        (n³ + b³)/3 floating-point operations; n R² where the covariance has rank R.
    """
    return _as_covariance(covariance, residual, factor_dtype).leave_one_out(residual, held_out)


def _as_covariance(
    covariance: Tensor | Covariance,
    residual: Tensor,
    factor_dtype: torch.dtype | None = None,
    checked: bool = True,
) -> Covariance:
    if isinstance(covariance, Covariance):
        return covariance.factored_in(factor_dtype, checked=checked)
    check_residual(covariance.shape, residual)
    return DenseCovariance(covariance, factor_dtype, checked)
