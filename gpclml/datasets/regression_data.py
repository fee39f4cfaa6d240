"""A regression data set in memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError

__all__ = ["RegressionData"]


@checked
@dataclass(frozen=True, eq=False)
class RegressionData:
    """A regression data set: inputs and targets in their original units, float64, on the CPU.

    Nothing is standardized here: that takes the training rows' mean and scale only.

    Attributes:
        name: Name of the data set.
        inputs: Shape ``(n, d)``.
        targets: Shape ``(n,)``.
        note: What the target is, and what is odd about the data.
        source: Where the data come from: a download address, or the package they ship with.
        licence: What that source states.

    Raises:
        ShapeError: The shapes of inputs and targets do not belong together.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    note: str = ""
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if self.inputs.ndim != 2:
            raise ShapeError("inputs", tuple(self.inputs.shape), "(n, d)")
        expected = (self.inputs.shape[0],)
        if self.targets.shape != expected:
            raise ShapeError(
                "targets", tuple(self.targets.shape), f"{expected}, one for each row of inputs"
            )

    @property
    def num_data(self) -> int:
        """Number of rows, n."""
        return self.inputs.shape[0]

    @property
    def num_features(self) -> int:
        """Number of input columns, d."""
        return self.inputs.shape[1]
