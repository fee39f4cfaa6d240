"""A kernel of the angle between points."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

__all__ = ["CosineSimilarityKernel"]


class CosineSimilarityKernel(Kernel):
    r"""The cosine of the angle between two points: a linear kernel on the unit sphere.

    .. math:: k(x, x') = \frac{x^\top x'}{\lVert x \rVert \, \lVert x' \rVert}

    It has no parameters; wrap it in a ``ScaleKernel`` for a variance. Its rank is at most the
    number of columns. The zero vector has covariance zero with everything, itself included.

    Examples:
        >>> kernel = gpytorch.kernels.ScaleKernel(CosineSimilarityKernel())
    """

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: object,
    ) -> Tensor:
        """Covariances of points.

        Args:
            x1: Points. Shape ``(*batch, n, d)``.
            x2: Points. Shape ``(*batch, m, d)``.
            diag: Only those of corresponding points.
            last_dim_is_batch: Each column is a batch member of its own.
            **params: Not used.

        Returns:
            Shape ``(*batch, n, m)``; ``(*batch, n)`` with ``diag``.
        """
        same = x1 is x2
        if last_dim_is_batch:
            x1, x2 = x1.mT.unsqueeze(-1), x2.mT.unsqueeze(-1)
        x1 = torch.nn.functional.normalize(x1, dim=-1)
        x2 = x1 if same else torch.nn.functional.normalize(x2, dim=-1)
        return (x1 * x2).sum(-1) if diag else x1 @ x2.mT
