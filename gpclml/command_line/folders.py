"""Folders that are written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gpclml.errors import DataError

__all__ = [
    "check_output_file",
    "discard",
    "open_work_folder",
    "publish",
    "read_record",
    "work_folder",
    "write_record",
    "write_text",
]


def work_folder(out: Path) -> Path:
    """Where a folder is made before it gets its name: beside it, with ``.part`` after its name."""
    return out.with_name(f"{out.name}.part")


def open_work_folder(out: Path, record: str) -> Path:
    """Makes the folder in which ``out`` is made, or takes the one that an interrupted run left.

    Args:
        out: The folder that is to be there in the end.
        record: Name of the file by which a folder of this kind is known.

    Returns:
        The work folder, in which that file is.

    Raises:
        DataError: ``out`` or the work folder is there and no folder of this kind, or neither can be
            written.
    """
    out = out.absolute()
    if not out.name:
        raise DataError(f"--out: {out} cannot be a new folder. Name a folder within it.")
    for folder in (out, work_folder(out)):
        _check_kind(folder, record)
    if not out.parent.is_dir():
        raise DataError(f"--out: there is no folder {out.parent}. Make it first.")
    part = work_folder(out)
    try:
        part.mkdir(exist_ok=True)
        write_record(part / record, {})
    except OSError as error:
        raise DataError(
            f"--out: cannot write in {out.parent} ({error.strerror}). Name a folder elsewhere."
        ) from error
    return part


def publish(part: Path, out: Path) -> None:
    """Gives a finished work folder its name, in place of the folder that had it.

    Args:
        part: The work folder.
        out: Its name.
    """
    out = out.absolute()
    if not out.exists():
        os.rename(part, out)
        return
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.old") as aside:
        old = Path(aside) / out.name
        os.rename(out, old)
        try:
            os.rename(part, out)
        finally:
            if not out.exists():
                os.rename(old, out)


def discard(part: Path) -> None:
    """Removes a work folder.

    Args:
        part: The folder; it need not be there.
    """
    shutil.rmtree(part, ignore_errors=True)


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file whole or not at all.

    Args:
        path: The file; replaced if it is there.
        content: Numbers, texts, lists and mappings of them.
    """
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_record(path: Path) -> dict[str, Any] | None:
    """What :func:`write_record` wrote; None where it cannot be read.

    Args:
        path: The file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all.

    Args:
        path: The file; replaced if it is there.
        text: What it is to hold.
    """
    path = path.resolve()  # what a link names, not the link
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def check_output_file(path: Path, *others: Path) -> None:
    """Raises where a file cannot be written.

    Args:
        path: The file; it may be there.
        *others: Files that it must not be.

    Raises:
        DataError: It is a folder, a device or one of the others, or it cannot be written.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise DataError(f"--out: {path} is a folder. Name a file.")
    if path.exists() and not path.is_file():
        raise DataError(f"--out: {path} is no plain file. Name one.")
    if not folder.is_dir():
        raise DataError(f"--out: there is no folder {folder}. Make it first.")
    if any(other.exists() and path.exists() and path.samefile(other) for other in others):
        raise DataError(f"--out: {path} is a file that is read. Name another.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
        writable = os.access(path, os.W_OK) or not path.exists()
    except OSError:  # permissions do not tell all, nor bind every user
        writable = False
    if not writable:
        raise DataError(f"--out: cannot write {path}. Name a file elsewhere.")


def _check_kind(folder: Path, record: str) -> None:
    if not folder.exists() or (folder.is_dir() and (folder / record).is_file()):
        return
    if folder.is_dir() and not any(folder.iterdir()):
        return
    what = "is there and was not written by this command"
    raise DataError(f"--out: {folder} {what} (it has no {record}). Name another folder.")
