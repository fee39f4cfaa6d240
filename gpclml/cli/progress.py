"""Whether progress bars are shown."""

from __future__ import annotations

import sys

__all__ = ["shows_progress"]


def shows_progress(quiet: bool) -> bool:
    """Whether someone looks on: bars are for a terminal, and litter a file or a pipe.

    Args:
        quiet: Whether nothing is to be told.
    """
    return not quiet and sys.stderr.isatty()
