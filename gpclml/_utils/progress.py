"""Whether progress bars are shown."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["shows_progress"]


def shows_progress(progress: bool | None) -> bool:
    """Whether to show a progress bar on standard error.

    Args:
        progress: As the caller says; if None, on a terminal and in a notebook.
    """
    if progress is not None:
        return progress
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
