"""Where data files are kept."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "GPCLML_DATA"


def data_folder(kind: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of files of one kind, under the data folder.

    Args:
        kind: Name of the folder, e.g. ``"uci"``.
        folder: The data folder. None: the one named by the environment variable
            ``GPCLML_DATA``, else this package's folder in the user's cache.
    """
    if folder is not None:
        return Path(folder).expanduser() / kind
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser() / kind
    import pooch

    return Path(pooch.os_cache("gpclml")) / kind
