"""Dense matrices: Cholesky factors and inverses, points in another order, symmetric products."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from linear_operator.utils.errors import NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpclml._utils.arguments import callers_level
from gpclml.errors import NonFiniteError
from gpclml.gram import DOUBLE_UP_TO

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)

_PANEL = {"cpu": 256, "other": 2048}  # rows of a symmetric product that are computed at once
_UNDIVIDED, _UNDIVIDED_ON_GPU = 512, 1024  # least rows of a half of an inverse
_PIVOT_ROUNDINGS = 2  # epsilons of a variance that a squared pivot has to be above


def safe_cholesky(covariance: Tensor, *, checked: bool = True, in_place: bool = False) -> Tensor:
    r"""The lower Cholesky factor :math:`L`, :math:`K = L L^\top`, jittered only if needed.

    Float64 stays float64, and float32 is factored in float64 up to ``n = DOUBLE_UP_TO``, where the
    factorization costs less than the kernel around it, and in float32 above.

    The first attempt takes the matrix as it is. It fails where the matrix is not positive definite
    or singular to the rounding of the type in which it came: where a squared pivot, the variance of
    a point given those before it, is below two epsilons of that type times its variance. If it
    fails, float32 is repeated in float64, which cannot restore what the entries have lost, and then
    each failing batch member gets jitter of :math:`10^{-8}, 10^{-7}, \ldots, 10^{-3}` times its
    mean diagonal, from :math:`10^{-6}` on where it came in float32, with a ``NumericalWarning``: a
    jittered density is that of a slightly noisier model.

    Args:
        covariance: Symmetric matrices, ``(*batch, n, n)``; only the lower triangle counts.
        checked: Check at once whether the first attempt succeeded, which on a GPU waits for all
            that is queued. Without this check a failed factor has NaN on its diagonal and is not
            computed again.
        in_place: Compute the factor in the memory of the covariance, of which nothing is left.

    Returns:
        Lower-triangular factors, ``(*batch, n, n)``, in the type they were computed in.

    Raises:
        NonFiniteError: If the covariance holds NaN or infinite entries.
        NotPSDError: If it is not positive definite even with jitter; BoTorch's
            ``fit_gpytorch_mll`` retries on this error.
        SingularError: The first attempt failed in place.
    """
    matrix = covariance.double() if covariance.shape[-1] <= DOUBLE_UP_TO else covariance
    least = _PIVOT_ROUNDINGS * torch.finfo(covariance.dtype).eps
    factor, left = _factor(matrix, in_place and matrix.is_contiguous())
    if not checked:
        factor.diagonal(dim1=-2, dim2=-1).masked_fill_(~(left > least).unsqueeze(-1), torch.nan)
        return factor
    if (left if left.ndim == 0 else left.amin()).item() > least:
        return factor
    if in_place:
        raise SingularError
    if bad := int((~torch.isfinite(covariance)).sum()):
        raise NonFiniteError(
            "covariance", f"{bad} non-finite of {covariance.numel()} entries "
            f"(shape {tuple(covariance.shape)}, {covariance.dtype})", "finite entries",
            "Check the inputs for NaN, and lower the learning rate if hyperparameters diverged.",
        )  # fmt: skip
    if matrix.dtype == torch.float32:
        matrix = matrix.double()
        factor, left = _factor(matrix)
    # Each member on its own, with jitter to its own scale.
    members = matrix.reshape(-1, *matrix.shape[-2:])
    pairs = zip(members, left.flatten().tolist(), factor.reshape(members.shape), strict=True)
    factors = [L if share > least else _jittered(K, least) for K, share, L in pairs]
    return torch.stack(factors).reshape(matrix.shape)


class SingularError(Exception):
    """A factorization in place failed, and the matrix is gone: it has to be computed again."""


def _factor(matrix: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """The factor, and its least squared pivot as a share of its variance, ``(*batch,)``.

    Roundings of the entries that a pivot is the difference of are of the order of the epsilon of
    the type in which they came times the variance. Where a factorization failed the share is
    negative, or NaN where it did so on a GPU without an error code.
    """
    if in_place:
        variances = matrix.diagonal(dim1=-2, dim2=-1).clone()
        # LAPACK has matrices by columns: to it the transpose, which is equal, is one in place.
        factor, info = matrix.mT, torch.empty(matrix.shape[:-2], dtype=torch.int32)
        torch.linalg.cholesky_ex(factor, out=(factor, info))
    else:
        factor, info = torch.linalg.cholesky_ex(matrix)
        variances = matrix.detach().diagonal(dim1=-2, dim2=-1)
    pivots = factor.detach().diagonal(dim1=-2, dim2=-1).square()
    return factor, pivots.div_(variances).amin(-1) - info


def _jittered(matrix: Tensor, least: float) -> Tensor:
    """The factor with the first jitter that lifts all pivots above rounding."""
    scale = float(matrix.detach().diagonal().mean().abs()) or 1.0
    # Less than the rounding of the entries' own type would not lift a pivot.
    share = 1e-8 if least < 1e-8 else 1e-6
    while share < 2e-3:
        jitter = torch.full_like(matrix[..., 0].detach(), share * scale)
        factor, left = _factor(matrix + torch.diag(jitter))
        if left.item() > least:
            warnings.warn(
                f"A covariance of shape {tuple(matrix.shape)} is singular to rounding: jitter of "
                f"{share * scale:.1e} was added to its diagonal, of mean {scale:.3g}.",
                NumericalWarning,
                stacklevel=callers_level(),
            )
            return factor
        share *= 10
    raise NotPSDError(
        f"covariance of shape {tuple(matrix.shape)}, factored in {matrix.dtype}, with mean "
        f"diagonal {scale:.3g}: not positive definite even with jitter of 1e-3 of that. Raise the "
        "noise floor of the likelihood, or look for hyperparameters that degenerated."
    )


def take(values: Tensor, order: Tensor) -> Tensor:
    """The values ``(*batch, n)`` at indices ``(b,)`` or ``(*batch, b)``, ``(*batch, b)``."""
    return values.index_select(-1, order) if order.ndim == 1 else values.gather(-1, order)


def take_rows(values: Tensor, order: Tensor) -> Tensor:
    """The rows of ``(*batch, n, c)`` at indices as :func:`take` takes them, ``(*batch, b, c)``."""
    if order.ndim == 1:
        return values.index_select(-2, order)
    # Blocks of memory are copied whole, which a gather would not do.
    n, members = values.shape[-2], order.shape[:-1]
    first = torch.arange(members.numel(), device=order.device).mul_(n).reshape(*members, 1)
    rows = values.reshape(-1, values.shape[-1]).index_select(0, (order + first).flatten())
    return rows.reshape(*order.shape, values.shape[-1])


def solve_lower(factor: Tensor, columns: Tensor) -> Tensor:
    """The inverse of a lower factor ``(*batch, n, n)`` times columns ``(*batch, n, k)``.

    A batch of columns beyond that of the factors is more columns: no factor is copied for it.
    """
    while 2 < factor.ndim <= columns.ndim and factor.shape[0] == 1:
        factor = factor[0]
    further = columns.ndim - factor.ndim
    if further < 1 or columns.shape[further:-2] != factor.shape[:-2]:
        return torch.linalg.solve_triangular(factor, columns, upper=False)
    first = list(range(further))
    behind = [columns.ndim - 1 - further + dim for dim in first]
    rows = columns.movedim(first, behind)  # (*factors, n, *further, k)
    solved = torch.linalg.solve_triangular(factor, rows.flatten(-1 - further), upper=False)
    return solved.reshape(rows.shape).movedim(behind, first)


def permute(matrix: Tensor, order: Tensor) -> Tensor:
    """Rows and columns of ``(*batch, n, n)`` at indices as :func:`take` takes them."""
    # Rows as blocks of memory, then a gather within rows: several times faster on a CPU
    # than indexing with two index tensors.
    rows = take_rows(matrix, order)
    return rows.gather(-1, order.unsqueeze(-2).expand(*rows.shape[:-1], order.shape[-1]))


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right.mT`` of ``(*batch, n, k)`` where it is symmetric: its lower half is computed.

    Row panels stop at the diagonal and are mirrored, which saves up to half of the 2 n² k
    floating-point operations.
    """
    n, rows = left.shape[-2], _PANEL.get(left.device.type, _PANEL["other"])
    if n < 2 * rows:
        return left @ right.mT
    product = left.new_empty(*left.shape[:-1], n)
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        panel = left[..., start:stop, :] @ right[..., :stop, :].mT
        product[..., start:stop, :stop] = panel
        product[..., :start, start:stop] = panel[..., :start].mT
    return product


def sandwich(
    Q: Tensor, middles: Sequence[Tensor], blocks: Sequence[Tensor], disjoint: bool
) -> Tensor:
    """The sum of Q_:B M_B Q_B: over blocks ``(k_i, b_i)``, M being ``(*batch, k_i, b_i, b_i)``.

    Where no index is in two blocks there are no more columns than rows.
    """
    if not disjoint:  # the M_B are added up first, one product serves all
        total = torch.zeros_like(Q)
        for group, M in zip(blocks, middles, strict=True):
            for block, M_B in zip(group, M.unbind(-3), strict=True):
                total[..., block.unsqueeze(-1), block] += M_B
        return symmetric_product(Q @ total, Q)
    rows, scaled = [], []
    for group, M in zip(blocks, middles, strict=True):
        # LAPACK returns Q column by column: its transpose, equal by symmetry, has rows in memory.
        Q_B = Q.mT.index_select(-2, group.flatten())  # (*batch, k b, n)
        rows.append(Q_B)
        if group.shape[-1] == 1:
            scaled.append(M.flatten(-3).unsqueeze(-1) * Q_B)
        else:
            scaled.append((M @ Q_B.unflatten(-2, group.shape)).flatten(-3, -2))
    if len(blocks) == 1:
        return symmetric_product(scaled[0].mT, rows[0].mT)
    return symmetric_product(torch.cat(scaled, dim=-2).mT, torch.cat(rows, dim=-2).mT)


def inverse_of_factor(L: Tensor, *, in_place: bool = False) -> Tensor:
    """The inverse of ``L @ L.mT``, ``(*batch, n, n)``; in the memory of the factor, if it can be.

    A large one is computed by halves, which takes 5/6 n³ operations, mostly of products. On a GPU
    this is faster than ``torch.cholesky_inverse``; on a CPU it does not slow down as that does
    where several threads share the cores with other programs. Many small ones are computed on a GPU
    by triangular solves, since ``torch.cholesky_inverse`` of a batch cannot be in a CUDA graph.
    """
    if L.shape[-1] == 1:
        return L.square().reciprocal()
    if L.ndim > 2 and L.device.type != "cpu" and L.shape[-1] < _UNDIVIDED_ON_GPU:
        # L⁻ᵀ L⁻¹.
        identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand(L.shape)
        inverse = torch.linalg.solve_triangular(L, identity, upper=False)
        return inverse.mT @ inverse
    undivided = _UNDIVIDED if L.device.type == "cpu" else _UNDIVIDED_ON_GPU
    if L.shape[-1] < 2 * undivided:
        return torch.cholesky_inverse(L, out=L if in_place and L.mT.is_contiguous() else None)
    inverse = L if in_place else L.clone()
    _invert_by_halves(inverse, undivided)
    return inverse


def _invert_by_halves(L: Tensor, undivided: int) -> None:
    """With A, B and C of the factor, S = (C Cᵀ)⁻¹ and Y = B A⁻¹: S, -S Y and (A Aᵀ)⁻¹ + Yᵀ S Y."""
    n = L.shape[-1]
    if n < 2 * undivided:
        L.copy_(torch.cholesky_inverse(L))
        return
    h = n // 2
    first, last = L[..., :h, :h], L[..., h:, h:]
    Y = torch.linalg.solve_triangular(first, L[..., h:, :h], upper=False, left=False)
    _invert_by_halves(first, undivided)
    _invert_by_halves(last, undivided)
    cross = last @ Y
    plus_product(first, Y.mT, cross.mT)
    cross.neg_()
    L[..., h:, :h] = cross
    L[..., :h, h:] = cross.mT


def plus_product(matrix: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
    """``matrix + factor * left @ right.mT``, in its memory."""
    if matrix.ndim == 2:
        return matrix.addmm_(left, right.mT, alpha=factor)
    return matrix.add_(left @ right.mT, alpha=factor)
