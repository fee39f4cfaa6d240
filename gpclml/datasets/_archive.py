"""Entries of zip archives, read in memory and never extracted."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator

from gpclml.errors import DataError

__all__ = ["archive_entries"]


def archive_entries(
    archive: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in an archive, in the order of their names.

    Args:
        archive: Path of the zip archive.
        wanted: Which names to read.

    Raises:
        DataError: The archive is missing or damaged, or an entry leads out of it.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            for info in sorted(file.infolist(), key=lambda info: info.filename):
                _check_inside(archive, info.filename)
                if not info.is_dir() and wanted(info.filename):
                    yield info.filename, file.read(info)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{archive}: missing, cut short or no zip archive ({error}). Put a whole copy there."
        ) from error


def _check_inside(archive: str | os.PathLike[str], name: str) -> None:
    if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name) or ":" in name:
        raise DataError(
            f"{archive}: the entry {name!r} leads out of the archive, so it is not an original "
            "one. Nothing was extracted; get it again from its source."
        )
