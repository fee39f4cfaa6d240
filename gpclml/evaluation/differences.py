"""Differences of two models on the same points, with their standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gpclml._utils.arguments import checked

__all__ = ["ROUNDING", "PairedDifference", "paired_difference"]

ROUNDING = 1e-6
"""Nats within which two models score the same."""


@dataclass(frozen=True)
class PairedDifference:
    """By how much a model's score exceeds that of a reference.

    Attributes:
        value: In nats; negative where the model is worse.
        standard_error: Of that, from the spread of paired terms; NaN for one term.
    """

    value: float
    standard_error: float

    @property
    def p_worse(self) -> float:
        r"""The probability that the model is worse, :math:`\Phi(-d / s)`.

        A normal approximation, as in R's ``loo_compare``. 0.5 where value and error are both
        within 1e-6 nats of zero.
        """
        if max(abs(self.value), self.standard_error) < ROUNDING:
            return 0.5
        if self.standard_error == 0.0:
            return float(self.value < 0)
        return 0.5 * math.erfc(self.value / self.standard_error / math.sqrt(2))


@checked(terms="float (n,)", reference="float (n,)")
def paired_difference(terms: Tensor, reference: Tensor) -> PairedDifference:
    r"""The sum of n paired differences and its error, :math:`\sqrt n` times their deviation.

    (Vehtari, Gelman and Gabry 2017, Eq. 24.)

    Args:
        terms: Log densities of points under the model, ``(n,)``.
        reference: Those of the same points under the reference, ``(n,)``.

    Raises:
        ShapeError: If the shapes are others.
    """
    difference = terms - reference
    count = len(difference)
    spread = float(difference.std()) if count > 1 else math.nan
    return PairedDifference(float(difference.sum()), math.sqrt(count) * spread)
