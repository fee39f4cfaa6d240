"""Packages that only some names need, and that extras install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Says which extra to install where an import within the block does not find its package."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "gpclml"):  # a mistake of our own
            raise
        raise ImportError(
            f"This needs {package}, which is not installed. Install it by pip install "
            f"'gpclml[{name}]'."
        ) from error
