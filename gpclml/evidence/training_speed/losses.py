"""Training speed of networks: the sum of the losses of any training loop."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError

__all__ = ["SumOfTrainingLosses"]


class SumOfTrainingLosses:
    r"""Training speed as the area under the curve of training losses.

    Call :meth:`update` after each batch and :meth:`end_epoch` after each epoch. A network whose
    sum is small trained fast, which stands in for a high marginal likelihood (Lyle et al. 2020,
    Section 4.2): with a negative log density for loss, each point seen once and predicted
    before it is trained on, :meth:`total` is an estimate of :math:`-L(D)`.

    Losses that are tensors stay on their device until the end of an epoch, or until a sum is asked
    for, so that a step does not wait for an accelerator.

    Examples:
        >>> speed = SumOfTrainingLosses()
        >>> for x, y in loader:
        ...     loss = criterion(network(x), y)
        ...     speed.update(loss, len(y))
        ...     ...
        >>> speed.end_epoch()
        >>> speed.sum()
    """

    def __init__(self) -> None:
        self._sums = _Sums()
        self._unread: list[tuple[Tensor, int]] = []

    @property
    def steps(self) -> int:
        """Number of batches so far."""
        return self._sums.steps + len(self._unread)

    @property
    def epochs(self) -> int:
        """Number of ended epochs."""
        return len(self._sums.epoch_means)

    def update(self, loss: Tensor | float, num_points: int) -> None:
        """Adds the loss of one batch, computed before the step that trains on it.

        Args:
            loss: Mean over the points of the batch, one number; a graph is not kept.
            num_points: Number of points in the batch.

        Raises:
            ShapeError: If the loss is not one number.
            ArgumentError: If there is no point.
            NonFiniteError: If the loss is not finite; for a tensor it is raised when it is read.
        """
        check_counts(num_points=num_points)
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                expected = "one number, the mean over the batch"
                raise ShapeError("loss", tuple(loss.shape), expected, "Take loss.mean().")
            # A copy: a loop may write its next loss into the same memory.
            self._unread.append((loss.detach().clone().reshape(()), num_points))
        else:
            self._read().add(float(loss), num_points)

    def end_epoch(self) -> None:
        """Ends an epoch and keeps its mean loss a point.

        Raises:
            ArgumentError: If there was no batch since the last epoch.
            NonFiniteError: If one of its losses is not finite.
        """
        sums = self._read()
        if sums.epoch_points == 0:
            suggestion = "Call update() at each batch first."
            raise ArgumentError("epoch", "no batches", "at least one", suggestion)
        sums.epoch_means.append(sums.epoch_total / sums.epoch_points)
        sums.epoch_total, sums.epoch_points = 0.0, 0

    def sum(self) -> float:
        r"""The sum over all iterations of the batch losses (Lyle et al. 2020, Section 4.2).

        Each batch counts once, whatever its size: :math:`\sum_t \ell_t`, in units of the loss.

        Raises:
            NonFiniteError: If one of them is not finite.
        """
        return self._read().sum

    def total(self) -> float:
        r"""The sum over all points seen of their losses, :math:`\sum_t b_t \ell_t`.

        Total nats, if the loss is a mean negative log density.

        Raises:
            NonFiniteError: If a loss is not finite.
        """
        return self._read().total

    def epoch_means(self) -> list[float]:
        """The mean loss a point of each ended epoch.

        Ru et al. (2021) add up those of the last epochs, since the initial weights decide the
        first ones: ``sum(speed.epoch_means()[-E:])``.
        """
        return list(self._sums.epoch_means)

    def state_dict(self) -> dict[str, Any]:
        """The state from which a resumed run continues with the same sums.

        Raises:
            NonFiniteError: If a loss is not finite.
        """
        return asdict(self._read())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of :meth:`state_dict`.

        Raises:
            ArgumentError: If entries are missing or unknown.
        """
        expected = sorted(asdict(_Sums()))
        if sorted(state) != expected:
            raise ArgumentError("state", sorted(state), f"the entries {', '.join(expected)}")
        self._sums = _Sums(**{**state, "epoch_means": list(state["epoch_means"])})
        self._unread = []

    def _read(self) -> _Sums:
        """The sums with the tensors that wait, which are read in one transfer."""
        if self._unread:
            values = torch.stack([loss for loss, _ in self._unread]).tolist()
            read = 0
            try:
                for value, (_, num_points) in zip(values, self._unread, strict=True):
                    self._sums.add(value, num_points)
                    read += 1
            finally:  # a loss that is not finite stays, so that later questions raise again
                del self._unread[:read]
        return self._sums


@dataclass
class _Sums:
    """What has been added up; the names are those of the state."""

    steps: int = 0
    sum: float = 0.0
    total: float = 0.0
    epoch_total: float = 0.0
    epoch_points: int = 0
    epoch_means: list[float] = field(default_factory=list)

    def add(self, loss: float, num_points: int) -> None:
        if not math.isfinite(loss):
            got = f"{loss} at step {self.steps + 1} (epoch {len(self.epoch_means) + 1})"
            suggestion = "Lower the learning rate, or look for NaN in the data."
            raise NonFiniteError("loss", got, "a finite number", suggestion)
        self.steps += 1
        self.sum += loss
        self.total += num_points * loss
        self.epoch_total += num_points * loss
        self.epoch_points += num_points
