"""Folders of results: what the command wrote in them, and how it replaces that.

The record of a folder, a JSON file, says what the folder is and which files the command wrote in
it, with their SHA-256. A folder that has other files, or changed ones, is refused. A result is
written in a work folder beside its place, with ``.gpclml-work`` after its name, from which an
interrupted run goes on. When it is complete, the work folder is renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from gpclml import __version__
from gpclml._utils.files import write_atomically
from gpclml.errors import DataError

_VERSION = 3

Kind = Literal["model", "report"]
"""What a folder holds; its record is the file of this name, with ``.json`` after it."""

_FORMATS: dict[Kind, str] = {"model": "gpclml.TableModel", "report": "gpclml.Report"}


def write_record(
    folder: Path, kind: Kind, content: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Writes the record of a folder, with checksums of the files of these names and of itself."""
    record = {
        "format": _FORMATS[kind],
        "version": _VERSION,
        "written_by": f"gpclml {__version__}",
        **content,
        "files": {name: sha256_of(folder / name) for name in sorted(names)},
    }
    # Of the record itself, so that no changed bit of it goes unseen.
    record["checksum"] = _checksum(record)
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(folder / f"{kind}.json", lambda file: file.write(text.encode()))


def read_record(folder: Path, kind: Kind) -> dict[str, Any] | None:
    """The record of a folder; None if there is none of this kind that can be read."""
    try:
        content = json.loads((folder / f"{kind}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_record = isinstance(content, dict) and content.get("format") == _FORMATS[kind]
    return content if is_record else None


def files_of(path: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files that a record names, by name; refuses a record that was changed."""
    if record.get("version") != _VERSION:
        wrong = "was written by another release"
    elif record.get("checksum") != _checksum(record):
        wrong = "is damaged, or has been changed since gpclml wrote it"
    else:
        return record["files"]
    raise DataError(f"{path} {wrong}. Move the folder elsewhere, or name another one.")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def work_folder_of(out: Path) -> Path:
    """The folder in which the result for a folder is written."""
    out = _resolved(out)
    return out.with_name(f"{out.name}.gpclml-work")


@contextlib.contextmanager
def open_work_folder(out: Path, kind: Kind) -> Iterator[Path]:
    """Gives the work folder of ``out``: a new one, or the one that an interrupted run left.

    At the end of the block it is renamed to ``out``. After an error it stays for the next run to go
    on from, unless nothing is in it.

    Raises:
        DataError: ``out`` or the work folder is a link, has files that the command did not write or
            that have been changed, or cannot be written; or ``out`` is the current folder.
    """
    out, work = _resolved(out), work_folder_of(out)
    _check_replaceable(out, kind)
    _check_no_link(work)
    try:
        work.mkdir(exist_ok=True)
    except OSError as error:
        said = f"--out: cannot write in {out.parent} ({error.strerror})"
        raise DataError(f"{said}. Name a folder elsewhere.") from error
    # Files half written by a run that was killed would be in the result, and not in its record.
    for path in work.rglob("gpclml.*.part"):
        path.unlink()
    try:
        yield work
        _check_replaceable(out, kind)  # somebody may have written there meanwhile
    except BaseException:
        if _is_empty(work):
            work.rmdir()
        raise
    # A run that is killed between the two renames leaves the work folder, which is complete.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as aside:
        if out.exists():
            os.replace(out, Path(aside, out.name))
        os.replace(work, out)


def _check_replaceable(folder: Path, kind: Kind) -> None:
    """Refuses a folder unless it is new, empty, or as the command wrote it."""
    _check_no_link(folder)
    if Path.cwd().is_relative_to(folder):
        raise DataError(f"--out: {folder} is the current folder, or holds it. Name a new one.")
    if not folder.exists() or _is_empty(folder):
        return
    path, record = folder / f"{kind}.json", read_record(folder, kind)
    if record is None:
        why = f"it has no {path.name}"
        if path.exists():
            why = f"its {path.name} is of another program"
        what = f"{folder} is there and was not written by this command ({why})"
        raise DataError(f"--out: {what}. Name another folder.")
    files = files_of(path, record)
    for path in sorted(folder.rglob("*")):
        name, is_link = path.relative_to(folder).as_posix(), path.is_symlink()
        if not is_link and (path.is_dir() or name == f"{kind}.json"):
            continue
        what = "is there and was not written by this command"
        if not is_link and name in files:
            if sha256_of(path) == files[name]:
                continue
            what = "has been changed since gpclml wrote it"
        raise DataError(f"--out: {path} {what}. Move it elsewhere, or name another folder.")


def _check_no_link(folder: Path) -> None:
    if folder.is_symlink():
        raise DataError(f"--out: {folder} is a link. Name the folder itself, or another one.")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _resolved(out: Path) -> Path:
    """The path of a folder without links, except that the folder itself may be one."""
    out = out.absolute()
    if out.name == "..":
        out = out.resolve()
    if not out.name:
        raise DataError(f"--out: {out} cannot be a new folder. Name a folder within it.")
    if not out.parent.is_dir():
        raise DataError(f"--out: there is no folder {out.parent}. Make it first.")
    return out.parent.resolve() / out.name


def _checksum(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record without its own checksum."""
    content = {name: value for name, value in record.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
