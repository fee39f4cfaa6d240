"""Where data files are kept."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "GPCLML_DATA"


def uci_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of UCI files: ``uci`` under the data folder.

    Args:
        folder: The data folder. None: the one named by the environment variable
            ``GPCLML_DATA``, else this package's folder in the user's cache.
    """
    if folder is not None:
        return Path(folder).expanduser() / "uci"
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser() / "uci"
    import pooch

    return Path(pooch.os_cache("gpclml")) / "uci"
