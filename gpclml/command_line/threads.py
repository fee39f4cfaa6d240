"""How many threads serve a fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["threads_for"]

_SMALL = 1000  # rows


@contextmanager
def threads_for(num_train: int) -> Iterator[None]:
    """Within the block one thread where there are at most 1000 rows, else as many as before.

    Steps of milliseconds gain little from more, and lose tenfold where the cores have other work.

    Args:
        num_train: Rows to train on.
    """
    before = torch.get_num_threads()
    if num_train <= _SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
