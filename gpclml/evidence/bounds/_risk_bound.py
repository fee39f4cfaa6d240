"""What a bound returns, and the checks that all bounds share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from gpclml._utils.finite import all_finite
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError

__all__ = [
    "ANY_POSTERIOR",
    "RiskBound",
    "Setting",
    "check_within",
    "finite_tensors",
    "risk_and_kl",
]

ANY_POSTERIOR = "prior chosen without the data; any posterior"


@dataclass(frozen=True, eq=False)
class RiskBound:
    """A number that the posterior's risk exceeds with probability at most δ.

    Attributes:
        value: The bound, ``(*batch,)``; it may lie above the range of the loss.
        units: Of the value: ``"units of the loss"`` or ``"nats a point"``.
        delta: Probability δ that it fails, over data; for all models compared together.
        num_data: Number of points that the bound counts.
        num_models: Number k of models among which the data may have chosen.
        loss_range: Least and largest loss (a, b).
        assumptions: What has to hold for the bound to hold.
        terms: What it is made of: ``"empirical_risk"`` in the units of the value; ``"kl"``,
            ``"log_evidence"`` and ``"confidence"`` (what δ, k and the bound's constants cost) in
            nats in all.
    """

    value: Tensor
    units: str
    delta: float
    num_data: int
    num_models: int
    loss_range: tuple[float, float]
    assumptions: str
    terms: Mapping[str, Tensor]

    @property
    def vacuous(self) -> Tensor:
        """Whether it says no more than the range of the loss, value >= b; ``(*batch,)``."""
        return self.value >= self.loss_range[1]


@dataclass(frozen=True)
class Setting:
    """What every bound is told beside the data's numbers; checked when it is made.

    Args:
        num_data: Number n of points.
        delta: Probability δ that the bound fails.
        loss_range: Least and largest loss (a, b).
        num_models: Number k of models.

    Raises:
        ArgumentError: If δ is not in (0, 1), a >= b or infinite, or a number is below 1.
    """

    num_data: int
    delta: float
    loss_range: tuple[float, float]
    num_models: int

    def __post_init__(self) -> None:
        for name in ("num_data", "num_models"):
            number = getattr(self, name)
            if not isinstance(number, Integral) or number < 1:
                raise ArgumentError(name, number, "a whole number, at least 1")
        if not 0 < self.delta < 1:
            mend = "It is the probability that the bound fails, .05 say."
            raise ArgumentError("delta", self.delta, "between 0 and 1, both excluded", mend)
        lower, upper = self.loss_range
        if not -math.inf < lower < upper < math.inf:
            mend = "The loss must be bounded: clip it, and its evidence with it."
            raise ArgumentError("loss_range", (lower, upper), "finite (a, b) with a < b", mend)

    def bound(
        self, value: Tensor, units: str, terms: Mapping[str, Tensor], posterior: str
    ) -> RiskBound:
        """The bound of this value, of a prior and posterior as described."""
        lower, upper = self.loss_range
        points = f"independent points of one distribution; every loss in [{lower:g}, {upper:g}]"
        models = f"; one of {self.num_models} models fixed as early as their priors"
        return RiskBound(
            value=value,
            units=units,
            delta=self.delta,
            num_data=self.num_data,
            num_models=self.num_models,
            loss_range=self.loss_range,
            assumptions=f"{points}; {posterior}{models if self.num_models > 1 else ''}",
            terms=terms,
        )


def risk_and_kl(
    empirical_risk: Tensor | float, kl: Tensor | float, loss_range: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Both as tensors of one shape, the risk within the range and the KL not negative."""
    risk, kl = finite_tensors(empirical_risk=empirical_risk, kl=kl)
    check_within("empirical_risk", risk, loss_range, "Give the range of this loss.")
    check_within("kl", kl, (0.0, math.inf), "It is KL(posterior || prior).")
    return risk, kl


def finite_tensors(**values: Tensor | float) -> list[Tensor]:
    """The values as tensors of one shape; numbers take dtype and device of the tensors.

    Raises:
        NonFiniteError: If a value is NaN or infinite.
        ShapeError: If the shapes do not fit each other.
    """
    real = [v for v in values.values() if isinstance(v, Tensor) and v.is_floating_point()]
    like = real[0] if real else torch.zeros((), dtype=torch.float64)
    tensors = []
    for name, value in values.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            value = torch.as_tensor(value, dtype=like.dtype, device=like.device)
        if not all_finite(value):
            got = f"{value.dtype} of shape {tuple(value.shape)} with NaN or infinite values"
            raise NonFiniteError(name, got, "finite numbers")
        tensors.append(value)
    try:
        return list(torch.broadcast_tensors(*tensors))
    except RuntimeError:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ShapeError(" and ".join(values), shapes, "shapes that broadcast") from None


def check_within(name: str, values: Tensor, limits: tuple[float, float], mend: str) -> None:
    """Raises an ArgumentError unless all values are within limits, up to rounding."""
    lower, upper = limits
    # Rounding of a sum over data: some hundreds of units in the last place of the larger limit.
    size = 1 + max(abs(limit) for limit in limits if math.isfinite(limit))
    slack = size * torch.finfo(values.dtype).eps ** 0.75
    outside = (values < lower - slack) | (values > upper + slack)
    if outside.any():
        first = float(values[outside].flatten()[0])
        raise ArgumentError(name, f"{first:g}", f"within [{lower:g}, {upper:g}]", mend)
