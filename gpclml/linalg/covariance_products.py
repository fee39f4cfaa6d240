r"""Products with a covariance that is never formed whole, and a preconditioner from few rows.

With :math:`K_f \approx L L^\top` from a pivoted Cholesky factor and noise D the preconditioner is
:math:`(L L^\top + D)^{-1}` by Woodbury's identity: the k largest parts of the kernel are solved
exactly, and conjugate gradients are left with the rest (Harbrecht, Peters and Schneider 2012;
Gardner et al. 2018, Section 4.1). The identity subtracts numbers that nearly agree where the noise
is small beside the kernel. In single precision the result is not positive definite there, so it is
computed in double precision for every type.
"""

from __future__ import annotations

from collections.abc import Callable
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
]

_NUMBERS_AT_ONCE = 2**24
"""In a chunk of rows: 128 MiB in float64, of which a kernel makes several on its way."""


class RowProducts:
    """A covariance whose rows are evaluated in chunks.

    Products under ``torch.no_grad()``, a solver's, evaluate only the lower half, keep it if it fits
    into ``kept_bytes``, and otherwise evaluate it again each time. Differentiable products evaluate
    whole rows, and each chunk once more in the backward pass, so that only one chunk is in memory.

    Args:
        rows: Function of i, j and k that returns the first k columns of the rows i to j, ``(*batch,
            j - i, k)``, differentiable; the matrix is symmetric.
        diagonal: The variances, ``(*batch, n)``.
        shape: ``(*batch, n, n)``.
        kept_bytes: Bytes that the evaluated half may occupy.
        multiple: ``rows`` is called only with multiples of this number.
        row: Computes one row by its index, ``(*batch, n)``, if that is faster than ``rows``.
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
        if torch.is_grad_enabled():
            products = [
                checkpoint(
                    self._chunk_product, start, stop, right,
                    use_reentrant=False, preserve_rng_state=False,
                )
                for start, stop in self._chunks
            ]  # fmt: skip
            return torch.cat(products, dim=-2)
        batch = torch.broadcast_shapes(self.shape[:-2], right.shape[:-2])
        product = right.new_zeros(*batch, *right.shape[-2:])
        if self.kept_numbers and not self._kept:
            self._kept = [self._rows(start, stop, stop) for start, stop in self._chunks]
        for index, (start, stop) in enumerate(self._chunks):
            rows = self._kept[index] if self._kept else self._rows(start, stop, stop)
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


class OperatorProducts:
    """A covariance with structure of its own: Kronecker, Toeplitz, interpolated, KeOps, ….

    Args:
        operator: A linear operator with its own product and derivative.
    """

    kept_numbers: int = 0

    @checked(late=True)
    def __init__(self, operator: LinearOperator) -> None:
        self.shape: torch.Size = operator.shape
        self.dtype: torch.dtype = cast(torch.dtype, operator.dtype)
        self.device: torch.device = cast(torch.device, operator.device)
        self._operator = operator

    def matmul(self, right: Tensor) -> Tensor:
        """The operator's own product and derivative."""
        return cast(Tensor, self._operator @ right)

    @torch.no_grad()
    def row(self, index: int) -> Tensor:
        """The product with a unit vector."""
        unit = torch.zeros(self.shape[-1], 1, dtype=self.dtype, device=self.device)
        unit[index] = 1
        return self.matmul(unit).squeeze(-1)

    @torch.no_grad()
    def diagonal(self) -> Tensor:
        """The variances, ``(*batch, n)``."""
        return self._operator.diagonal(dim1=-1, dim2=-2)


CovarianceProducts = RowProducts | OperatorProducts
"""A covariance of n points by its products with vectors, its rows and its diagonal."""


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
        diagonals = [part.shape[:-1] for part in (self.noise, self.missing) if part is not None]
        batch = torch.broadcast_shapes(self.latent.shape[:-2], *diagonals)
        return torch.Size((*batch, *self.latent.shape[-2:]))

    def matmul(self, right: Tensor) -> Tensor:
        """The product with ``(*batch, N, k)``, differentiable except under ``torch.no_grad()``."""
        missing = None if self.missing is None else self.missing.unsqueeze(-1)
        observed = right if missing is None else right.masked_fill(missing, 0.0)
        product = self.latent.matmul(observed)
        if self.noise is not None:
            product = product + self.noise.unsqueeze(-1) * observed
        return product if missing is None else torch.where(missing, right, product)


@dataclass(frozen=True)
class LowRankPreconditioner:
    r"""Multiplies by :math:`M^{-1} = (L L^\top + D)^{-1}`. Everything in double precision.

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
    def from_covariance(cls, covariance: NoisyCovariance, rank: int) -> LowRankPreconditioner:
        """The preconditioner of a covariance whose noise is positive.

        Args:
            covariance: Of the observations, ``(*batch, n, n)``.
            rank: Of the approximation; 0 for the noise alone.
        """
        assert covariance.noise is not None
        noise = covariance.noise.detach().double().unsqueeze(-1)
        features = pivoted_cholesky(covariance.latent, rank)
        if covariance.missing is not None:
            missing = covariance.missing.unsqueeze(-1)
            features, noise = torch.where(missing, 0.0, features), torch.where(missing, 1.0, noise)
        identity = torch.eye(features.shape[-1], dtype=features.dtype, device=features.device)
        gram = identity + features.mT @ (features / noise)
        return cls(features, noise, safe_cholesky(gram) if gram.numel() else gram)

    def __call__(self, right: Tensor) -> Tensor:
        """The product with ``(*batch, n, k)``, in its type."""
        difference = right.double() - self.features @ self._weights(right)
        return (difference / self.noise).to(right.dtype)

    def whiten(self, right: Tensor) -> Tensor:
        r"""X with :math:`X^\top X = R^\top M^{-1} R`, ``(*batch, n + k, columns)``.

        With w the weights, :math:`R^\top M^{-1} R = (R - L w)^\top D^{-1} (R - L w) + w^\top w`: a
        sum of squares does not cancel, as Woodbury's identity does where the noise is small.
        """
        weights = self._weights(right)
        difference = (right.double() - self.features @ weights) / self.noise.sqrt()
        return torch.cat([difference, weights], dim=-2)

    def _weights(self, right: Tensor) -> Tensor:
        r""":math:`w = (I + L^\top D^{-1} L)^{-1} L^\top D^{-1} R`, ``(*batch, k, columns)``."""
        return torch.cholesky_solve(self.features.mT @ (right.double() / self.noise), self.factor)


@torch.no_grad()
def pivoted_cholesky(covariance: CovarianceProducts, rank: int) -> Tensor:
    r"""L with :math:`L L^\top \approx K` and, up to rounding, :math:`L L^\top \preceq K`.

    The pivots are those of largest remaining variance. Members of a batch share the pivots, chosen
    by their mean.

    Args:
        covariance: K, ``(*batch, n, n)``.
        rank: Number k of columns, at most n; fewer come back where the remaining variance is
            rounding.

    Returns:
        ``(*batch, n, k)``, float64.

    Note:
        n k² floating-point operations and k rows of K.
    """
    # LinearOperator.pivoted_cholesky takes three to five times as long at rank 300: it gathers all
    # previous columns in each step. It also works in the type of the covariance.
    n = covariance.shape[-1]
    remaining = covariance.diagonal().double().expand(covariance.shape[:-1]).clone()
    epsilon = 10 * torch.finfo(covariance.dtype).eps
    negligible = epsilon * remaining.amax(-1, keepdim=True)
    factor = remaining.new_zeros(*covariance.shape[:-2], n, min(rank, n))
    for k in range(factor.shape[-1]):
        pivot = int(remaining.reshape(-1, n).mean(0).argmax())
        variance = remaining[..., pivot, None]
        if bool((variance <= negligible).all()):
            return factor[..., :k]
        explained = factor[..., :k] @ factor[..., pivot, :k, None]
        column = covariance.row(pivot).double() - explained.squeeze(-1)
        column[..., pivot] = variance.squeeze(-1)
        column = column / variance.clamp_min(negligible).sqrt()
        column = torch.where(variance > negligible, column, 0.0)
        factor[..., k] = column
        remaining = (remaining - column.square()).clamp_min_(0.0)
        remaining[..., pivot] = 0.0
    return factor
