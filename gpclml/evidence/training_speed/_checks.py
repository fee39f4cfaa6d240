"""Checks that the estimators share."""

from __future__ import annotations

from gpclml.errors import ArgumentError

__all__ = ["check_count"]


def check_count(argument: str, value: int, least: int, mend: str = "") -> None:
    """Raises where a count is no integer or below the least."""
    if not isinstance(value, int) or value < least:
        raise ArgumentError(argument, value, f"an integer of at least {least}", mend)
