"""Training speed of networks: the sum of the losses of any training loop."""

from __future__ import annotations

import math
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
        self._steps = 0
        self._sum = 0.0
        self._total = 0.0
        self._epoch_total = 0.0
        self._epoch_points = 0
        self._epoch_means: list[float] = []
        self._unread: list[tuple[Tensor, int]] = []

    @property
    def steps(self) -> int:
        """Number of batches so far."""
        return self._steps + len(self._unread)

    @property
    def epochs(self) -> int:
        """Number of ended epochs."""
        return len(self._epoch_means)

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
            return
        self._read()
        self._add(float(loss), num_points)

    def end_epoch(self) -> None:
        """Ends an epoch and keeps its mean loss a point.

        Raises:
            ArgumentError: If there was no batch since the last epoch.
            NonFiniteError: If one of its losses is not finite.
        """
        self._read()
        if self._epoch_points == 0:
            raise ArgumentError(
                "epoch", "no batches", "at least one", "Call update() at each batch first."
            )
        self._epoch_means.append(self._epoch_total / self._epoch_points)
        self._epoch_total, self._epoch_points = 0.0, 0

    def sum(self) -> float:
        r"""The sum over all iterations of the batch losses (Lyle et al. 2020, Section 4.2).

        Each batch counts once, whatever its size: :math:`\sum_t \ell_t`, in units of the loss.

        Raises:
            NonFiniteError: If one of them is not finite.
        """
        self._read()
        return self._sum

    def total(self) -> float:
        r"""The sum over all points seen of their losses, :math:`\sum_t b_t \ell_t`.

        Total nats, if the loss is a mean negative log density.

        Raises:
            NonFiniteError: If a loss is not finite.
        """
        self._read()
        return self._total

    def epoch_means(self) -> list[float]:
        """The mean loss a point of each ended epoch."""
        return list(self._epoch_means)

    def last_epochs(self, count: int) -> float:
        r"""The sum of the mean losses of the last E epochs, :math:`\sum_{t > T - E} \bar\ell_t`.

        Ru et al. (2021): the first epochs, which the start of the weights decides, are left out.

        Args:
            count: Number E of epochs, at most those that ended.

        Raises:
            ArgumentError: If no epoch ended, or E is out of range.
        """
        self._check_ended()
        if not isinstance(count, int) or not 1 <= count <= self.epochs:
            raise ArgumentError(
                "count", count, f"an integer from 1 to {self.epochs}, the epochs that ended"
            )
        return math.fsum(self._epoch_means[-count:])

    def decayed(self, decay: float) -> float:
        r"""The sum of epochs' mean losses, earlier ones weighing less.

        :math:`\sum_t \gamma^{T-t} \bar\ell_t`, the exponential moving form of Ru et al. (2021).

        Args:
            decay: :math:`\gamma`, above 0 and at most 1; 1 is the plain sum over epochs.

        Raises:
            ArgumentError: If no epoch ended, or the decay is out of range.
        """
        self._check_ended()
        if not 0 < decay <= 1:
            raise ArgumentError("decay", decay, "above 0 and at most 1")
        value = 0.0
        for mean in self._epoch_means:
            value = decay * value + mean
        return value

    def state_dict(self) -> dict[str, Any]:
        """The state from which a resumed run continues with the same sums.

        Raises:
            NonFiniteError: If a loss is not finite.
        """
        self._read()
        return {
            "steps": self._steps,
            "sum": self._sum,
            "total": self._total,
            "epoch_total": self._epoch_total,
            "epoch_points": self._epoch_points,
            "epoch_means": list(self._epoch_means),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of :meth:`state_dict`.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            ArgumentError: If entries are missing or unknown.
        """
        expected = sorted(SumOfTrainingLosses().state_dict())
        if sorted(state) != expected:
            raise ArgumentError("state", sorted(state), f"the entries {', '.join(expected)}")
        self._unread = []
        self._steps = int(state["steps"])
        self._sum, self._total = float(state["sum"]), float(state["total"])
        self._epoch_total = float(state["epoch_total"])
        self._epoch_points = int(state["epoch_points"])
        self._epoch_means = [float(mean) for mean in state["epoch_means"]]

    def _check_ended(self) -> None:
        self._read()
        if self.epochs == 0:
            raise ArgumentError(
                "epochs", "none ended", "at least one", "Call end_epoch() after each epoch."
            )

    def _read(self) -> None:
        """Reads the tensors that wait, in one transfer."""
        if not self._unread:
            return
        values = torch.stack([loss for loss, _ in self._unread]).tolist()
        for i, value in enumerate(values):
            try:
                self._add(value, self._unread[i][1])
            except NonFiniteError:
                self._unread = self._unread[i:]  # every later question raises again
                raise
        self._unread = []

    def _add(self, loss: float, num_points: int) -> None:
        if not math.isfinite(loss):
            raise NonFiniteError(
                "loss",
                f"{loss} at step {self._steps + 1} (epoch {self.epochs + 1})",
                "a finite number",
                "Lower the learning rate, or look for NaN in the data.",
            )
        self._steps += 1
        self._sum += loss
        self._total += num_points * loss
        self._epoch_total += num_points * loss
        self._epoch_points += num_points
