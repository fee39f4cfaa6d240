"""The prior of training and new points together, evaluated where it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ExactGP
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpclml._utils.arguments import all_finite
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.inference.dense_posterior import evaluating
from gpclml.linalg.iterative_conditioning import ConditionedBlock

__all__ = ["JointPrior", "new_points", "reading"]


@dataclass(frozen=True)
class JointPrior:
    """The prior at n training and m new points.

    Attributes:
        mean: At the new points, ``(*batch, m)``.
        num_train: n.
        operator: Covariance of all, ``(*batch, n + m, n + m)``, a kernel yet to be evaluated.
    """

    mean: Tensor
    num_train: int
    operator: LinearOperator

    @staticmethod
    def of(model: ExactGP, x: Tensor) -> JointPrior:
        """The prior of a model in eval mode, under ``lazily_evaluate_kernels``.

        Args:
            model: With training data.
            x: New points as its ``forward`` takes them, ``(*batch, m, d)``; batches broadcast.
        """
        train_x = _training_inputs(model)
        n = train_x.shape[-2]
        batch = torch.broadcast_shapes(x.shape[:-2], train_x.shape[:-2])
        points = [part.expand(*batch, *part.shape[-2:]) for part in (train_x, x)]
        prior = cast(MultivariateNormal, model.forward(torch.cat(points, dim=-2)))
        return JointPrior(prior.mean[..., n:], n, prior.lazy_covariance_matrix)

    @property
    def batch_shape(self) -> torch.Size:
        """That of model and points together."""
        return self.operator.shape[:-2]

    def cross(self, rows: slice) -> LinearOperator:
        """Covariance of new points with the training points, ``(*batch, rows, n)``."""
        return self._block(rows, slice(0, self.num_train))

    def variance(self, rows: slice) -> Tensor:
        """Variances of new points, ``(*batch, rows)``."""
        return self._block(rows, self._new(rows)).diagonal(dim1=-1, dim2=-2)

    def conditional_covariance(
        self, chunks: Sequence[slice], blocks: Sequence[ConditionedBlock]
    ) -> Tensor:
        """Covariance of all new points given the training points, ``(*batch, m, m)``, float64.

        Args:
            chunks: Of the new points, in order.
            blocks: What the training points say of each, with vectors.
        """
        parts = list(zip(chunks, blocks, strict=True))
        rows = [
            torch.cat(
                [
                    self._block(rows, self._new(columns)).to_dense() - left.joint_reduction(right)
                    for columns, right in parts
                ],
                dim=-1,
            )
            for rows, left in parts
        ]
        covariance = torch.cat(rows, dim=-2)
        return 0.5 * (covariance + covariance.mT)

    def _block(self, rows: slice, columns: slice) -> LinearOperator:
        return cast(LinearOperator, self.operator[..., self._new(rows), columns])

    def _new(self, rows: slice) -> slice:
        return slice(self.num_train + rows.start, self.num_train + rows.stop)


@contextmanager
def reading(model: ExactGP) -> Iterator[None]:
    """Modes and settings as a posterior needs them, whatever they are outside; no gradient."""
    with (
        evaluating(model),
        torch.no_grad(),
        settings.lazily_evaluate_kernels(True),
        settings.debug(False),
        settings.observation_nan_policy("mask"),
    ):
        yield


def new_points(model: ExactGP, x: Tensor) -> Tensor:
    """New points as the ``forward`` of a model in eval mode takes them, or a typed error.

    Args:
        model: With training data.
        x: ``(*batch, m, d)``, or ``(m,)`` for one column.

    Raises:
        ShapeError: Columns or batch do not fit the training inputs.
        ArgumentError: No tensor, or another dtype or device than theirs.
        NonFiniteError: A number is not finite.
    """
    if not isinstance(x, Tensor):
        raise ArgumentError("x", type(x).__name__, "a torch.Tensor", "Use torch.as_tensor(x).")
    train_x = _training_inputs(model)
    columns = train_x.shape[-1]
    x = x.unsqueeze(-1) if x.ndim == 1 else x
    if x.ndim < 2 or x.shape[-1] != columns or 0 in x.shape:
        raise ShapeError("x", tuple(x.shape), f"(*batch, m, {columns}) with m >= 1, as trained on")
    if (x.dtype, x.device) != (train_x.dtype, train_x.device):
        raise ArgumentError(
            "x", f"{x.dtype} on {x.device}", f"{train_x.dtype} on {train_x.device}, as trained on",
            "Use x.to(model.train_inputs[0]).",
        )  # fmt: skip
    try:
        torch.broadcast_shapes(x.shape[:-2], train_x.shape[:-2])
    except RuntimeError:
        expected = f"a batch that broadcasts with {tuple(train_x.shape[:-2])}"
        raise ShapeError("x", tuple(x.shape), expected) from None
    if not all_finite(x):
        raise NonFiniteError("x", f"{int((~x.isfinite()).sum())} non-finite values", "finite ones")
    transform = getattr(model, "transform_inputs", None)
    return x if transform is None else transform(X=x)


def _training_inputs(model: ExactGP) -> Tensor:
    return cast(Any, model.train_inputs)[0]
