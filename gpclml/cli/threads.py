"""How many threads serve a fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_thread_serves", "threads_for"]

_SMALL = 1000  # rows


def one_thread_serves(num_train: int) -> bool:
    """Whether there are at most 1000 rows.

    Steps of milliseconds gain little from more threads, and lose tenfold where the cores have other
    work.

    Args:
        num_train: Rows to train on.
    """
    return num_train <= _SMALL


@contextmanager
def threads_for(num_train: int) -> Iterator[None]:
    """Within the block one thread where that serves, else as many as before.

    Args:
        num_train: Rows to train on.
    """
    before = torch.get_num_threads()
    if one_thread_serves(num_train):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
