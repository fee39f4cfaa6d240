"""Residuals that share a covariance, brought side by side."""

from __future__ import annotations

from torch import Size, Tensor

__all__ = ["Sharing"]


class Sharing:
    """How a batch splits into covariances and the residuals of each.

    Args:
        covariances: Batch shape of the covariance; residuals share one in dimensions where it
            has size 1 or that it lacks.
        batch: Batch shape of the residuals, to which the former broadcasts.
    """

    def __init__(self, covariances: Size, batch: Size) -> None:
        padded = (1,) * (len(batch) - len(covariances)) + tuple(covariances)
        shared = [i for i, size in enumerate(padded) if size < batch[i]]
        own = [i for i in range(len(batch)) if i not in shared]
        self._dims = own + shared
        self._own = Size([batch[i] for i in own])
        self._shared = Size([batch[i] for i in shared])

    def covariances(self, values: Tensor) -> Tensor:
        """Each covariance once, ``(*own, n, n)``."""
        return values.reshape(*self._own, *values.shape[-2:])

    def residuals(self, values: Tensor) -> Tensor:
        """The residuals of each covariance, ``(*batch, n)`` to ``(*own, k, n)``."""
        ordered = values.permute(*self._dims, -1)
        return ordered.reshape(*self._own, self._shared.numel(), values.shape[-1])

    def values(self, values: Tensor, event: int = 0) -> Tensor:
        """Numbers of each residual, ``(*own, k, *event)`` to ``(*batch, *event)``.

        Args:
            values: The numbers, one a residual where there is no event.
            event: Number of dimensions of an event.
        """
        rest = values.shape[values.ndim - event :]
        ordered = values.reshape((*self._own, *self._shared, *rest))
        back = sorted(range(len(self._dims)), key=self._dims.__getitem__)
        return ordered.permute((*back, *range(len(back), len(back) + event)))
