"""Numbers in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpclml.evaluation.differences import PairedDifference

__all__ = ["joined", "nats", "plus_minus"]

_MOST_DECIMALS = 4
_SMALLEST = 0.5 * 10**-_MOST_DECIMALS


def nats(value: float, sign: bool = False) -> str:
    """A number of nats, to a tenth, or to two digits where it is small."""
    return f"{value:{'+' if sign else ''}.{_decimals(value)}f} nats"


def plus_minus(difference: PairedDifference) -> str:
    """A difference with its error, to two digits of the error."""
    error = difference.standard_error
    if math.isnan(error) or error < _SMALLEST:
        return nats(difference.value)
    decimals = _decimals(error)
    return f"{difference.value:.{decimals}f} ± {error:.{decimals}f} nats"


def joined(parts: Sequence[str], last: str = "and") -> str:
    """Parts as a list in a sentence, with a word before the last."""
    return f" {last} ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def _decimals(value: float) -> int:
    if abs(value) >= 1 or value == 0:
        return 1
    return min(_MOST_DECIMALS, 1 - math.floor(math.log10(abs(value))))
