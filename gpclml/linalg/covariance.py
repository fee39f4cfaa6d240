"""The one interface that densities, scores and predictions have to a covariance of observations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from linear_operator.operators import LinearOperator
from torch import Size, Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.gram import Evaluated

__all__ = [
    "ConditionedBlock",
    "Covariance",
    "Predictor",
    "check_indices",
    "check_residual",
    "common_batch",
]


class Covariance(ABC):
    """The covariance of n observations, noise included, ``(*batch, n, n)``.

    A kind of covariance is a subclass that implements what it can: dense with a Cholesky factor
    (:class:`~gpclml.linalg.DenseCovariance`), of low rank plus a diagonal
    (:class:`~gpclml.linalg.LowRankPlusDiagonal`), or known by its products with vectors
    (:class:`~gpclml.linalg.IterativeCovariance`). What a kind cannot do raises an
    :class:`~gpclml.errors.UnsupportedError`. Arguments are checked here, once for all kinds; a
    subclass implements the methods of the same names with an underscore.

    Residuals are observations minus their prior mean, ``(*batch, n)``; their batches broadcast with
    those of the covariance. Log densities are in nats. The functions of :mod:`gpclml.linalg` of the
    same names say what is computed, from which equations, and at what cost.

    Attributes:
        reports: How well each block of the last density was solved for; empty where that is exact.
    """

    reports: tuple[Any, ...] = ()

    @property
    @abstractmethod
    def shape(self) -> Size:
        """``(*batch, n, n)``."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Floating-point type of the entries, and of what is computed from them."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the entries are."""

    @classmethod
    @abstractmethod
    def memory(cls, shape: Size, block: int) -> int:
        """Peak number of stored numbers for the density of a held-out block and its gradient.

        Args:
            shape: Shape of the covariance; of the features where it is of low rank.
            block: Number of held-out points.
        """

    def log_density(self, residual: Tensor) -> Tensor:
        """The joint log density of all residuals, ``(*batch,)``."""
        return self.conditional_log_density(residual, torch.arange(self.shape[-1]))

    @checked(late=True, residual="float (*batch, n)", held_out="index (b,) | (*batch, b)")
    def conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        """The joint log density of held-out residuals given all others, ``(*batch,)``.

        ``held_out`` has shape ``(b,)``, or ``(*batch, b)`` for points of its own in each member.
        """
        residual = self._expanded(residual)
        if held_out.ndim == 1:
            check_indices("held_out", held_out, residual.shape[-1])
        else:
            _check_member_indices("held_out", held_out, residual.shape[:-1], residual.shape[-1])
        return self._own("conditional_log_density")(residual, held_out)

    @checked(late=True, residual="float (*batch, n)")
    def block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """The log density of each block given all points outside it, ``(*batch, k_1 + k_2 + ...)``.

        Blocks of one size are stacked, ``(k_i, b_i)``.
        """
        _check_blocks(blocks, self.shape[-1])
        return self._own("block_log_densities")(self._expanded(residual), blocks)

    def held_out_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """The same for one block or several, by whichever of the two methods costs less.

        One block may have shape ``(*batch, 1, b)``, for points of its own in each member.
        """
        if len(blocks) == 1 and blocks[0].shape[-2] == 1:
            return self.conditional_log_density(residual, blocks[0].squeeze(-2)).unsqueeze(-1)
        return self.block_log_densities(residual, blocks)

    @checked(late=True, residual="float (*batch, n)")
    def held_out_log_density(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """The sum of these log densities, ``(*batch,)``, whose gradient may cost less than theirs.

        Args:
            residual: ``(*batch, n)``.
            blocks: As for :meth:`held_out_log_densities`.
        """
        if len(blocks) == 1 and blocks[0].shape[-2] == 1:
            return self.conditional_log_density(residual, blocks[0].squeeze(-2))
        _check_blocks(blocks, self.shape[-1])
        return self._block_log_density(self._expanded(residual), blocks)

    def density(self, blocks: Sequence[Tensor]) -> Any:
        """Held-out blocks in the form that :meth:`log_density_and_vjp` takes.

        Work that depends only on the blocks is done here, once for all covariances of the same
        points.

        Args:
            blocks: As for :meth:`held_out_log_densities`.
        """
        return blocks

    def log_density_of(self, residual: Tensor, density: Any) -> Tensor:
        """The sum of the log densities of held-out blocks, ``(*batch,)``, differentiable.

        Args:
            residual: ``(*batch, n)``, of the batch of both.
            density: The blocks, as :meth:`density` gives them.
        """
        return self.held_out_log_density(residual, density)

    def log_density_and_vjp(self, residual: Tensor, density: Any) -> Evaluated:
        """The sum of the log densities of held-out blocks, with its vector-Jacobian product.

        Args:
            residual: ``(*batch, n)``.
            density: The blocks, as :meth:`density` gives them.

        Returns:
            The sum, ``(*batch,)``. Where a kind of covariance leaves derivatives to autograd, the
            product gives the gradient with respect to the sum itself, to go on from there.
        """
        value = self.held_out_log_density(residual, density)
        tensors = [value] if value.requires_grad else []
        return Evaluated(value.detach(), tensors, lambda grad, _=None, /: [(value, grad)])

    @checked(late=True, residual="float (*batch, n)", rows="index (b,)")
    def leave_one_out(self, residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the residuals at ``rows`` given all others, ``(*batch, b)`` each."""
        check_indices("held_out", rows, residual.shape[-1])
        return self._own("leave_one_out")(self._expanded(residual), rows.to(self.device))

    @checked(late=True, residual="float (*batch, n)", orders="integer (k, n)")
    def sequential(self, residual: Tensor, orders: Tensor | None = None) -> Tensor:
        """Learning curves: the log density of each point given those before it.

        Args:
            residual: ``(*batch, n)``.
            orders: Orders in which the points arrive, ``(k, n)``; data order if None.

        Returns:
            ``(*batch, k, n)``; term i of curve j is that of point ``orders[j, i]``.
        """
        residual = self._expanded(residual)
        for order in () if orders is None else orders:
            check_indices("order", order, residual.shape[-1], count=residual.shape[-1])
        return self._own("sequential")(residual, None if orders is None else orders.to(self.device))

    @checked(late=True, residual="float (n,)", orders="integer (k, n)")
    def predictions(self, residual: Tensor, orders: Tensor) -> tuple[Tensor, Tensor]:
        """Errors and variances of each point's prediction from those before it, ``(k, n)`` each.

        For one covariance without a batch, in orders as :meth:`sequential` takes them.
        """
        if len(self.shape) != 2:
            raise ShapeError("covariance", tuple(self.shape), "(n, n), no batch")
        check_residual(self.shape, residual)
        n = residual.shape[-1]
        if residual.ndim != 1:
            raise ShapeError("residual", tuple(residual.shape), f"({n},), no batch")
        if orders.ndim != 2:
            raise ShapeError("orders", tuple(orders.shape), f"(k, {n})")
        for order in orders:
            check_indices("orders", order, n, count=n)
        return self._own("predictions")(residual, orders.to(residual.device))

    @checked(late=True, residual="float (*batch, n)", rows="index (b,)")
    def condition(self, residual: Tensor, rows: Tensor) -> tuple[Covariance, Tensor]:
        """All other points under the posterior given those at these indices, in data order.

        Args:
            residual: ``(*batch, n)``.
            rows: Indices of the points that are conditioned on, ``(b,)``, ``1 <= b < n``.

        Returns:
            Their covariance, noise included, and their residuals from the conditional mean.
        """
        residual = self._expanded(residual)
        n = residual.shape[-1]
        rows = check_indices("rows", rows, n).to(self.device)
        if len(rows) == n:
            raise ArgumentError("rows", f"all {n} points", "fewer, so that others are left")
        others = torch.ones(n, dtype=torch.bool, device=self.device)
        others[rows] = False
        return self._own("condition")(residual, rows, others.nonzero().squeeze(-1))

    def predictor(self, residual: Tensor, missing: Tensor | None = None) -> Predictor:
        """Solves for the residuals once, to predict other values from them.

        Args:
            residual: ``(*batch, n)``; zero where missing.
            missing: Which observations are missing, ``(*batch, n)``; the covariance has variance
                one and no correlation there. None if none is missing.
        """
        raise self._refused("predictor")

    def take(self, rows: Tensor) -> Covariance:
        """The covariance of the points at these indices.

        Args:
            rows: ``(b,)``, or ``(*batch, b)`` for points of its own in each member.
        """
        raise self._refused("take")

    def __getitem__(self, index: Any) -> Covariance:
        """The members of the batch at an index of the leading dimensions."""
        raise self._refused("index")

    def diagonal(self) -> Tensor:
        """Variances of the observations, ``(*batch, n)``."""
        raise self._refused("diagonal")

    def to_dense(self) -> Tensor:
        """The covariance as a matrix, ``(*batch, n, n)``."""
        raise self._refused("to_dense")

    def condition_number(self) -> float:
        """The condition number, or an estimate of it, of one covariance without a batch."""
        raise self._refused("condition_number")

    def operators(self) -> tuple[LinearOperator, Tensor | None]:
        """A linear operator, and variances ``(*batch, n)`` to add to its diagonal or None."""
        raise self._refused("operators")

    def factored_in(self, dtype: torch.dtype | None, *, checked: bool = True) -> Covariance:
        """The same covariance with other settings of its Cholesky factors, where it has any.

        Args:
            dtype: See :func:`gpclml.linalg.factorization_dtype`.
            checked: See :func:`gpclml.linalg.safe_cholesky`.
        """
        return self

    def _expanded(self, residual: Tensor) -> Tensor:
        """The residual in the batch shape of both."""
        batch = check_residual(self.shape, residual)
        return residual.expand(*batch, residual.shape[-1])

    def _block_log_density(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        return self._own("block_log_densities")(residual, blocks).sum(-1)

    def _own(self, method: str) -> Callable[..., Any]:
        """The method of the kind itself, whose arguments have been checked."""
        own = getattr(self, f"_{method}", None)
        if own is None:
            raise self._refused(method)
        return own

    def _refused(self, method: str) -> UnsupportedError:
        return UnsupportedError(
            "covariance",
            f"{type(self).__name__}, which has no {method}",
            "a covariance with a Cholesky factor",
            "Use solver='cholesky', or a DenseCovariance.",
        )


def common_batch(*shapes: Size) -> Size:
    """The batch shape that these broadcast to; equal ones, the usual case, take no time."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    return torch.broadcast_shapes(*shapes)


def check_residual(covariance: torch.Size, residual: Tensor) -> tuple[int, ...]:
    """The batch shape of a covariance of that shape and a residual together."""
    if len(covariance) < 2 or covariance[-1] != covariance[-2] or covariance[-1] == 0:
        raise ShapeError("covariance", tuple(covariance), "(*batch, n, n) with n >= 1")
    n = covariance[-1]
    if residual.ndim < 1 or residual.shape[-1] != n:
        raise ShapeError("residual", tuple(residual.shape), f"(*batch, {n}), as the covariance")
    if covariance[:-2] == residual.shape[:-1]:
        return covariance[:-2]
    try:
        return numpy.broadcast_shapes(covariance[:-2], residual.shape[:-1])
    except ValueError as error:
        raise ShapeError(
            "residual",
            f"batch shape {tuple(residual.shape[:-1])}",
            f"one that broadcasts with the covariance's {tuple(covariance[:-2])}",
        ) from error


def check_indices(argument: str, indices: Tensor, n: int, count: int | None = None) -> Tensor:
    """The indices, if they are integers from 0 to n - 1, distinct and one-dimensional."""
    expected = f"{count or 'at least 1'} distinct integers from 0 to {n - 1}, one-dimensional"
    kind = indices.dtype
    if indices.ndim != 1 or kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise ArgumentError(argument, f"shape {tuple(indices.shape)} of {indices.dtype}", expected)
    if indices.numel() == 0 or count not in (None, indices.numel()):
        raise ArgumentError(argument, f"{indices.numel()} indices", expected)
    values = indices.tolist()
    low, high = min(values), max(values)
    if low < 0 or high >= n:
        raise ArgumentError(argument, f"indices from {low} to {high}", expected)
    if len(set(values)) != len(values):
        raise ArgumentError(argument, "repeated indices", expected)
    return indices


def _check_member_indices(argument: str, indices: Tensor, batch: torch.Size, n: int) -> Tensor:
    """The indices, if those of each batch member pass :func:`check_indices`."""
    if indices.shape[:-1] != batch:
        expected = f"(b,), or {tuple(batch)} and b: a row of indices for each batch member"
        raise ShapeError(argument, f"shape {tuple(indices.shape)}", expected)
    check_indices(argument, indices.flatten().unique(), n)
    ordered = indices.sort(-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise ArgumentError(argument, "repeated indices", f"distinct integers from 0 to {n - 1}")
    return indices


def _check_blocks(blocks: Sequence[Tensor], n: int) -> None:
    if len(blocks) == 0:
        raise ArgumentError("blocks", "none", "at least one group of blocks, each (k, b)")
    for group in blocks:
        if group.ndim != 2 or group.numel() == 0:
            raise ArgumentError("blocks", f"shape {tuple(group.shape)}", "(k, b), not empty")
        for block in [group.unique()] if group.shape[-1] == 1 else group:
            check_indices("blocks", block, n)


class ConditionedBlock(ABC):
    """What observations change in the distribution of some other values.

    Attributes:
        shift: What the mean of each value gains, ``(*batch, k)``.
        reduction: What the variance of each value loses, ``(*batch, k)``.
    """

    shift: Tensor
    reduction: Tensor

    @abstractmethod
    def joint_reduction(self, other: Any) -> Tensor:
        """What the covariance with another block's values loses, ``(*batch, k, l)``.

        Args:
            other: Values of the same observations; both blocks keep their vectors.
        """


class Predictor(ABC):
    """Predicts other values from observations, whose linear system was solved once.

    Attributes:
        missing: Which observations are missing, ``(*batch, n)``; None where none is.
    """

    missing: Tensor | None = None

    def given(self, cross: Tensor, keep: bool = False) -> ConditionedBlock:
        """What the observations say of other values.

        Args:
            cross: Covariance of the observations with these values, ``(*batch, n, k)``; batches
                broadcast.
            keep: Whether to keep the vectors from which the joint covariance with other blocks is
                computed.
        """
        if self.missing is not None:
            cross = torch.where(self.missing.unsqueeze(-1), 0.0, cross)
        return self._given(cross, keep)

    @abstractmethod
    def _given(self, cross: Tensor, keep: bool) -> ConditionedBlock:
        """The same, where what is missing has no correlation."""
