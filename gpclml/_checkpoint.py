"""A model on disk: how it was made, its state and its data, in one file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from gpclml.errors import DataError

__all__ = ["read_checkpoint", "write_checkpoint"]

_VERSION = 1


def write_checkpoint(path: str | os.PathLike, kind: str, content: dict[str, Any]) -> None:
    """Writes tensors and primitives, whole or not at all.

    Args:
        path: File to write; replaced if it is there.
        kind: What it is a checkpoint of; to be asked for again.
        content: What to store.

    Raises:
        DataError: The file cannot be written.
    """
    path = Path(path)
    temporary = None
    try:
        # Renamed into place at the end, so that a crash leaves no half-written file behind.
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=path.name, suffix=".part", delete=False
        ) as file:
            temporary = file.name
            torch.save({"format": kind, "version": _VERSION, **content}, file)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise DataError(
            f"path: cannot write {path} ({error}). Give a file in a folder that exists and "
            "that you may write to."
        ) from error


def read_checkpoint(path: str | os.PathLike, kind: str, map_location: Any = None) -> dict[str, Any]:
    """Reads what :func:`write_checkpoint` wrote; runs no code from the file.

    Args:
        path: File to read.
        kind: What it must be a checkpoint of.
        map_location: Where tensors go, as for ``torch.load``.

    Returns:
        The stored content.

    Raises:
        DataError: The file is missing, damaged, or not such a checkpoint.
    """
    if not Path(path).is_file():
        raise DataError(f"path: there is no file {path}. Check the path given to load.")
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # torch.load raises many kinds for damaged files
        raise DataError(
            f"path: {path} is damaged or no checkpoint ({type(error).__name__}). Write it again."
        ) from error
    if not isinstance(content, dict) or content.get("format") != kind:
        raise DataError(
            f"path: {path} is no {kind} checkpoint. Give a file that was written as one."
        )
    if content.get("version") != _VERSION:
        raise DataError(
            f"path: {path} has checkpoint version {content.get('version')}, this release reads "
            f"{_VERSION}. Load it with the release that wrote it and save it again."
        )
    return content
