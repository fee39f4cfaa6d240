"""Warnings of computations, as sentences for the user."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["warned"]


@contextmanager
def warned() -> Iterator[list[str]]:
    """Gives a list that is filled, when the block ends, with what it warned of, each text once.

    Warnings of packages about their own code are left out.
    """
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    told = (one for one in caught if not issubclass(one.category, _OF_PACKAGES))
    said += dict.fromkeys(str(one.message) for one in told)


_OF_PACKAGES = DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning
