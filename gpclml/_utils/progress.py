"""Progress bars, and whether they are shown."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


def progress_bar(
    steps: Iterable[Any] | None = None, *, progress: bool | None, **options: Any
) -> tqdm:
    """A bar of tqdm, which takes the options; it is hidden where none is to be shown.

    In a notebook it is tqdm's own for notebooks, or a line of text where ipywidgets is missing.
    """
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # of the missing ipywidgets
        from tqdm.auto import tqdm

    return tqdm(steps, disable=not shows_progress(progress), **options)


def shows_progress(progress: bool | None) -> bool:
    """Whether to show a progress bar on standard error; None: on a terminal and in a notebook."""
    if progress is not None:
        return progress
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.stderr.isatty() or getattr(shell, "kernel", None) is not None
