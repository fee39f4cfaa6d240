r"""Products with a covariance that is never formed whole, and a preconditioner from few rows.

With :math:`K_f \approx L L^\top` from a pivoted Cholesky factor and noise D the preconditioner is
:math:`(L L^\top + D)^{-1}` by Woodbury's identity: the k largest parts of the kernel are solved
exactly, and conjugate gradients are left with the rest (Harbrecht, Peters and Schneider 2012;
Gardner et al. 2018, Section 4.1). The identity subtracts numbers that nearly agree where the noise
is small beside the kernel. In single precision the result is not positive definite there, so it is
computed in double precision for every type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gpclml._utils.arguments import check_counts, checked
from gpclml.linalg.matrices import safe_cholesky

__all__ = [
    "CovarianceProducts",
    "LowRankPreconditioner",
    "NoisyCovariance",
    "OperatorProducts",
    "RowProducts",
    "pivoted_cholesky",
    "rounding",
]

_NUMBERS_AT_ONCE = 2**24
"""In a chunk of rows: 128 MiB in float64, of which a kernel makes several on its way."""


class CovarianceProducts(ABC):
    """What an iterative solver asks of a covariance of n points, ``(*batch, n, n)``.

    Attributes:
        shape: ``(*batch, n, n)``.
        dtype: Floating-point type of its entries.
        device: Where they are computed.
        kept_numbers: How many numbers are kept from one product for the solver to the next.
    """

    kept_numbers: int = 0
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def matmul(self, right: Tensor) -> Tensor:
        """The product with ``(*batch, n, k)``, differentiable in what the covariance depends on."""

    @abstractmethod
    def fixed_matmul(self, right: Tensor) -> Tensor:
        """The same product without a gradient; what it needs may be kept for the next."""

    @abstractmethod
    def row(self, index: int) -> Tensor:
        """One row without a gradient, ``(*batch, n)``."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The variances without a gradient, ``(*batch, n)``."""


class RowProducts(CovarianceProducts):
    """A covariance whose rows are evaluated in chunks.

    Products for the solver evaluate only the lower half, keep it if it fits into ``kept_bytes``,
    and otherwise evaluate it again each time. Differentiable products evaluate whole rows, and each
    chunk once more in the backward pass, so that only one chunk is in memory.

    Args:
        rows: Function of i, j and k that returns the first k columns of the rows i to j, ``(*batch,
            j - i, k)``, differentiable; the matrix is symmetric.
        diagonal: The variances, ``(*batch, n)``.
        shape: ``(*batch, n, n)``.
        kept_bytes: Bytes that the evaluated half may occupy.
        multiple: ``rows`` is called only with multiples of this number.
        row: Computes one row by its index, ``(*batch, n)``, if that is faster than ``rows``.

    Attributes:
        kept_numbers: How many are kept from one product for the solver to the next.
    """

    @checked(late=True, diagonal="float (*batch, n)")
    def __init__(
        self,
        rows: Callable[[int, int, int], Tensor],
        diagonal: Tensor,
        shape: torch.Size,
        kept_bytes: int,
        multiple: int = 1,
        row: Callable[[int], Tensor] | None = None,
    ) -> None:
        check_counts(multiple=multiple)
        self.shape = shape
        self.dtype: torch.dtype = diagonal.dtype
        self.device: torch.device = diagonal.device
        self._rows, self._diagonal, self._multiple = rows, diagonal.detach(), multiple
        self._row = row
        n = shape[-1]
        most = max(1, _NUMBERS_AT_ONCE // shape[:-1].numel())
        step = max(multiple, most // multiple * multiple)
        self._chunks = [(start, min(start + step, n)) for start in range(0, n, step)]
        half = shape[:-2].numel() * sum((stop - start) * stop for start, stop in self._chunks)
        self.kept_numbers: int = half if half * self.dtype.itemsize <= kept_bytes else 0
        self._kept: list[Tensor] = []

    def matmul(self, right: Tensor) -> Tensor:
        """The product, a chunk at a time in the forward and the backward pass."""
        products = [
            checkpoint(
                self._chunk_product, start, stop, right,
                use_reentrant=False, preserve_rng_state=False,
            )
            for start, stop in self._chunks
        ]  # fmt: skip
        return torch.cat(products, dim=-2)

    @torch.no_grad()
    def fixed_matmul(self, right: Tensor) -> Tensor:
        """The product by the kept half, or a chunk at a time."""
        batch = torch.broadcast_shapes(self.shape[:-2], right.shape[:-2])
        product = right.new_zeros(*batch, *right.shape[-2:])
        for (start, stop), rows in zip(self._chunks, self._lower_rows(), strict=True):
            product[..., start:stop, :] += rows @ right[..., :stop, :]
            product[..., :start, :] += rows[..., :start].mT @ right[..., start:stop, :]
        return product

    @torch.no_grad()
    def row(self, index: int) -> Tensor:
        """One row, evaluated."""
        if self._row is not None:
            return self._row(index)
        start = index // self._multiple * self._multiple
        rows = self._rows(start, start + self._multiple, self.shape[-1])
        return rows[..., index - start, :]

    def diagonal(self) -> Tensor:
        """The variances, ``(*batch, n)``."""
        return self._diagonal

    def _chunk_product(self, start: int, stop: int, right: Tensor) -> Tensor:
        return self._rows(start, stop, self.shape[-1]) @ right

    def _lower_rows(self) -> Iterator[Tensor]:
        """Each chunk's rows up to the diagonal."""
        if len(self._kept) == len(self._chunks):
            yield from self._kept
            return
        self._kept.clear()  # of a product that was interrupted
        for start, stop in self._chunks:
            rows = self._rows(start, stop, stop)
            if self.kept_numbers:
                self._kept.append(rows)
            yield rows


class OperatorProducts(CovarianceProducts):
    """A covariance with structure of its own: Kronecker, Toeplitz, interpolated, KeOps, ….

    Args:
        operator: A linear operator with its own product and derivative.
    """

    @checked(late=True)
    def __init__(self, operator: LinearOperator) -> None:
        self.shape: torch.Size = operator.shape
        self.dtype: torch.dtype = cast(torch.dtype, operator.dtype)
        self.device: torch.device = cast(torch.device, operator.device)
        self._operator, self._fixed = operator, operator.detach()

    def matmul(self, right: Tensor) -> Tensor:
        """The operator's own product and derivative."""
        return cast(Tensor, self._operator @ right)

    @torch.no_grad()
    def fixed_matmul(self, right: Tensor) -> Tensor:
        """The operator's own product."""
        return cast(Tensor, self._fixed @ right)

    @torch.no_grad()
    def row(self, index: int) -> Tensor:
        """The product with a unit vector."""
        one = torch.zeros(self.shape[-1], 1, dtype=self.dtype, device=self.device)
        one[index] = 1
        return cast(Tensor, self._fixed @ one).squeeze(-1)

    @torch.no_grad()
    def diagonal(self) -> Tensor:
        """The variances, ``(*batch, n)``."""
        return self._fixed.diagonal(dim1=-1, dim2=-2)


@dataclass(frozen=True)
class NoisyCovariance:
    """Covariance of observations: of their latent values, and independent noise.

    Attributes:
        latent: Covariance of the latent values, ``(*batch, N, N)``; with all noise in it where the
            noise is not independent.
        noise: Noise variances, ``(*batch, N)``; None where the noise is in ``latent``.
        missing: Which observations are missing, ``(*batch, N)``: each has variance one and no
            correlation. None where none is.
    """

    latent: CovarianceProducts
    noise: Tensor | None = None
    missing: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """``(*batch, N, N)``."""
        n = self.latent.shape[-1]
        batches = [self.latent.shape[:-2]]
        batches += [part.shape[:-1] for part in (self.noise, self.missing) if part is not None]
        return torch.Size((*torch.broadcast_shapes(*batches), n, n))

    @property
    def dtype(self) -> torch.dtype:
        """Of the latent covariance."""
        return self.latent.dtype

    @property
    def device(self) -> torch.device:
        """Of the latent covariance."""
        return self.latent.device

    def matmul(self, right: Tensor) -> Tensor:
        """The product with ``(*batch, N, k)``, differentiable."""
        return self._product(self.latent.matmul, self.noise, right)

    def fixed_matmul(self, right: Tensor) -> Tensor:
        """The same product without a gradient."""
        noise = None if self.noise is None else self.noise.detach()
        return self._product(self.latent.fixed_matmul, noise, right)

    def _product(
        self, latent: Callable[[Tensor], Tensor], noise: Tensor | None, right: Tensor
    ) -> Tensor:
        if self.missing is None:
            product = latent(right)
            return product if noise is None else product + noise.unsqueeze(-1) * right
        missing = self.missing.unsqueeze(-1)
        seen = right.masked_fill(missing, 0.0)
        product = latent(seen)
        product = product if noise is None else product + noise.unsqueeze(-1) * seen
        return torch.where(missing, right, product)


@dataclass(frozen=True)
class LowRankPreconditioner:
    r"""Multiplies by :math:`(L L^\top + D)^{-1}`. Everything in double precision.

    Attributes:
        features: L, ``(*batch, n, k)``; zero where observations are missing.
        noise: The diagonal of D, ``(*batch, n, 1)``; one where observations are missing.
        factor: The Cholesky factor of :math:`I + L^\top D^{-1} L`, ``(*batch, k, k)``.
    """

    features: Tensor
    noise: Tensor
    factor: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, covariance: NoisyCovariance, rank: int) -> LowRankPreconditioner | None:
        """Of a covariance, or None where rank or noise is zero.

        Args:
            covariance: Of the observations, ``(*batch, n, n)``.
            rank: Of the approximation.
        """
        if rank == 0 or covariance.noise is None or not bool((covariance.noise > 0).all()):
            return None
        noise = covariance.noise.detach().double().unsqueeze(-1)
        features = pivoted_cholesky(covariance.latent, rank)
        if covariance.missing is not None:
            missing = covariance.missing.unsqueeze(-1)
            features, noise = torch.where(missing, 0.0, features), torch.where(missing, 1.0, noise)
        one = torch.eye(features.shape[-1], dtype=features.dtype, device=features.device)
        return cls(features, noise, safe_cholesky(one + features.mT @ (features / noise)))

    def __call__(self, right: Tensor) -> Tensor:
        """The product with ``(*batch, n, k)``, in its type."""
        left = right.double() - self.features @ self.weights(right)
        return (left / self.noise).to(right.dtype)

    def weights(self, right: Tensor) -> Tensor:
        r""":math:`w = (I + L^\top D^{-1} L)^{-1} L^\top D^{-1} v`, ``(*batch, k, columns)``.

        It is what minimizes :math:`(v - L w)^\top D^{-1} (v - L w) + w^\top w`, whose minimum is
        :math:`v^\top (L L^\top + D)^{-1} v`.
        """
        return torch.cholesky_solve(self.features.mT @ (right.double() / self.noise), self.factor)


def rounding(covariance: CovarianceProducts) -> Tensor:
    r"""By how much rounding may change an entry of an evaluated covariance.

    It is :math:`\epsilon \max_i K_{ii}`, where :math:`\epsilon` is twice the unit roundoff of the
    type in which the covariance is evaluated. As the roundings of the entries are independent, they
    change an eigenvalue of n points by at most :math:`\sqrt n` times as much.

    Args:
        covariance: Of latent values, ``(*batch, n, n)``.

    Returns:
        ``(*batch, 1)``, float64.
    """
    largest = covariance.diagonal().double().amax(-1, keepdim=True)
    return torch.finfo(covariance.dtype).eps * largest


@torch.no_grad()
def pivoted_cholesky(covariance: CovarianceProducts, rank: int) -> Tensor:
    r"""L with :math:`L L^\top \approx K` and :math:`L L^\top \preceq K + \eta I`.

    The pivots are those of largest remaining variance. Members of a batch share the pivots, chosen
    by their mean. :math:`\eta` is what :func:`rounding` may take from an eigenvalue, without which
    roundings of the entries could make the factor larger than the covariance.

    Args:
        covariance: K, ``(*batch, n, n)``.
        rank: Number k of columns, at most n; fewer come back where the remaining variance is
            rounding.

    Returns:
        ``(*batch, n, k)``, float64.

    Note:
        n k² floating-point operations and k rows of K.
    """
    n = covariance.shape[-1]
    shift = rounding(covariance) * n**0.5
    remaining = (covariance.diagonal().double() + shift).expand(covariance.shape[:-1]).clone()
    epsilon = 10 * torch.finfo(covariance.dtype).eps
    negligible = shift + epsilon * remaining.amax(-1, keepdim=True)
    factor = remaining.new_zeros(*covariance.shape[:-2], n, min(rank, n))
    for k in range(factor.shape[-1]):
        pivot = int(remaining.reshape(-1, n).mean(0).argmax())
        variance = remaining[..., pivot, None]
        if bool((variance <= negligible).all()):
            return factor[..., :k]
        seen = factor[..., :k] @ factor[..., pivot, :k, None]
        column = covariance.row(pivot).double() - seen.squeeze(-1)
        column[..., pivot] = variance.squeeze(-1)
        column = column / variance.clamp_min(negligible).sqrt()
        column = torch.where(variance > negligible, column, 0.0)
        factor[..., k] = column
        remaining = (remaining - column.square()).clamp_min_(0.0)
        remaining[..., pivot] = 0.0
    return factor
