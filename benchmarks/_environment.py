"""Environment variables for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

__all__ = ["variables"]


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Within the block these environment variables are set; after it they are as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
