"""Products with a covariance that is never formed whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["CovarianceProducts", "NoisyCovariance", "OperatorProducts", "RowProducts"]

_NUMBERS_AT_ONCE = 2**24
"""In a chunk of rows: 128 MiB in float64, of which a kernel makes several on its way."""


class CovarianceProducts(ABC):
    """What an iterative solver asks of a covariance of n points, ``(*batch, n, n)``.

    Attributes:
        shape: ``(*batch, n, n)``.
        dtype: Floating-point type of its entries.
        device: Where they are computed.
    """

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

    Products for the solver keep the evaluated rows where they fit into ``kept_bytes``, and evaluate
    them anew each time otherwise. Differentiable products evaluate each chunk once more in the
    backward pass, so that they too hold one chunk at a time.

    Args:
        rows: From the bounds i, j of a range to the rows between them, ``(*batch, j - i, n)``,
            differentiable.
        diagonal: The variances, ``(*batch, n)``.
        shape: ``(*batch, n, n)``.
        kept_bytes: What evaluated rows may occupy.
        multiple: Ranges that ``rows`` is asked for begin and end at multiples of this number.
    """

    def __init__(
        self,
        rows: Callable[[int, int], Tensor],
        diagonal: Tensor,
        shape: torch.Size,
        kept_bytes: int,
        multiple: int = 1,
    ) -> None:
        self.shape, self.dtype, self.device = shape, diagonal.dtype, diagonal.device
        self._rows, self._diagonal, self._multiple = rows, diagonal.detach(), multiple
        n = shape[-1]
        most = max(1, _NUMBERS_AT_ONCE // shape[:-1].numel())
        step = max(multiple, most // multiple * multiple)
        self._chunks = [(start, min(start + step, n)) for start in range(0, n, step)]
        self._keeps = shape.numel() * self.dtype.itemsize <= kept_bytes
        self._kept: Tensor | None = None

    @property
    def keeps(self) -> bool:
        """Whether products for the solver keep the evaluated covariance."""
        return self._keeps

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
        """The product by the kept covariance, or a chunk at a time."""
        if self._keeps:
            return self._evaluated() @ right
        products = [self._chunk_product(start, stop, right) for start, stop in self._chunks]
        return torch.cat(products, dim=-2)

    @torch.no_grad()
    def row(self, index: int) -> Tensor:
        """One row, of the kept covariance or evaluated."""
        if self._kept is not None:
            return self._kept[..., index, :]
        start = index // self._multiple * self._multiple
        return self._rows(start, start + self._multiple)[..., index - start, :]

    def diagonal(self) -> Tensor:
        """The variances, ``(*batch, n)``."""
        return self._diagonal

    def _chunk_product(self, start: int, stop: int, right: Tensor) -> Tensor:
        return self._rows(start, stop) @ right

    def _evaluated(self) -> Tensor:
        if self._kept is None:
            self._kept = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            for start, stop in self._chunks:
                self._kept[..., start:stop, :] = self._rows(start, stop)
        return self._kept


class OperatorProducts(CovarianceProducts):
    """A covariance with structure of its own: Kronecker, Toeplitz, interpolated, KeOps, ….

    Args:
        operator: Multiplies, and differentiates its products, as it knows best.
    """

    def __init__(self, operator: LinearOperator) -> None:
        self.shape = operator.shape
        self.dtype = cast(torch.dtype, operator.dtype)
        self.device = cast(torch.device, operator.device)
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
