"""The record of a folder, and whether the files in the folder are as it says.

A record is the JSON file of a folder that says what the folder is and which of its files the
command wrote, with their checksums. Files are given by name, with their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gpclml import __version__
from gpclml.errors import DataError

__all__ = [
    "MODEL",
    "REPORT",
    "FolderKind",
    "check_complete",
    "check_places",
    "files_of",
    "is_file",
    "is_temporary",
    "own_files",
    "read_record",
    "record_text",
    "sha256_of",
    "status_of",
]

_VERSION = 2
_READ_ALSO = (1,)  # of models: without checksums, so that nothing of them is replaced


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that the command writes.

    Attributes:
        record: Name of the file by which it is known.
        format: The value of ``format`` in that file.
        names: A regular expression for the names of the other files.
    """

    record: str
    format: str
    names: str

    def is_record(self, record: Mapping[str, Any] | None) -> bool:
        """Whether what was read is a record of this kind."""
        return record is not None and record.get("format") == self.format

    def is_known_version(self, record: Mapping[str, Any]) -> bool:
        """Whether this release can read the folder of a record."""
        return record.get("version") in (_VERSION, *_READ_ALSO)


MODEL = FolderKind("model.json", "gpclml.TableModel", r"model\.pt|table\.json")
"""The folder of a model."""

REPORT = FolderKind(
    "report.json",
    "gpclml.Report",
    r"index\.html|model\.py|table\.json|models/\w+/(model\.json|model\.pt|table\.json)",
)
"""The folder of a report, with the folders of its models."""


def record_text(kind: FolderKind, content: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """The text of a record, with a checksum of the record itself."""
    record = {
        "format": kind.format,
        "version": _VERSION,
        "written_by": f"gpclml {__version__}",
        **content,
        "files": dict(sorted(files.items())),
    }
    record["checksum"] = _checksum(record)
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def read_record(path: Path) -> dict[str, Any] | None:
    """The content of a file that may be a record; None if it is unreadable or no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def files_of(path: Path, kind: FolderKind, record: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files that a record names, by name; refuses a record that was changed."""
    files = record.get("files")
    wrong = ""
    if record.get("version") != _VERSION:
        wrong = "was written by another release, which did not note the files that it wrote"
    elif record.get("checksum") != _checksum(record) or not isinstance(files, dict):
        wrong = "is damaged, or has been changed since gpclml wrote it"
    elif strange := [name for name in files if not re.fullmatch(kind.names, name)]:
        wrong = f"names the file {strange[0]!r}, which gpclml does not write"
    if wrong:
        raise DataError(f"{path} {wrong}. Move the folder elsewhere, or name another one.")
    assert isinstance(files, dict)
    return files


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def own_files(folder: Path, kind: FolderKind, name: str) -> dict[str, str]:
    """SHA-256 of the files in a folder that the command wrote, by name.

    A folder that it did not write is refused unless it is empty.

    Args:
        folder: The folder; it need not be there.
        kind: What it should be.
        name: Name of its record.
    """
    status = status_of(folder)
    if status is None:
        return {}
    if stat.S_ISLNK(status.st_mode):
        raise DataError(f"--out: {folder} is a link. Name the folder itself, or another one.")
    path = folder / name
    record = read_record(path) if is_file(path) else None
    if record is not None and kind.is_record(record):
        return files_of(path, kind, record)
    if stat.S_ISDIR(status.st_mode):
        if all(is_temporary(entry, [name]) for entry in folder.iterdir()):
            return {}
        link = f"its {name} is a link" if path.is_symlink() else ""
        other = f"its {name} is of another program" if os.path.lexists(path) else ""
        why = link or other or f"it has no {name}"
    else:
        why = "it is no folder"
    what = f"{folder} is there and was not written by this command ({why})"
    raise DataError(f"--out: {what}. Name another folder.")


def check_places(
    folder: Path, names: Iterable[str], accepted: Mapping[str, Collection[str | None]]
) -> None:
    """Checks that files may be written: nothing that others wrote has their names."""
    for name in sorted(names):
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            status = status_of(folder / parent)
            if status is not None and not stat.S_ISDIR(status.st_mode):
                raise _in_the_way(folder / parent, "is there and is no folder")
        path = folder / name
        if not os.path.lexists(path):
            continue
        if name not in accepted or not is_file(path):
            raise _in_the_way(path, "is there and was not written by this command")
        if not is_file(path, accepted[name]):
            raise _in_the_way(path, "has been changed since gpclml wrote it")


def check_complete(part: Path, out: Path, files: Mapping[str, str]) -> None:
    """Checks that each file is in the work folder, or else in its place, as it was written."""
    for name, checksum in files.items():
        place = part / name if os.path.lexists(part / name) else out / name
        if not is_file(place, {checksum}):
            said = f"{place} is missing or has been changed since gpclml wrote it"
            raise DataError(f"--out: {said}. Remove {part}, and run the command again.")


def status_of(path: Path) -> os.stat_result | None:
    """Status of a file or folder, of a link itself; None where there is nothing."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_file(path: Path, checksums: Collection[str | None] | None = None) -> bool:
    """Whether a plain file is there, with one of the checksums if some are given."""
    status = status_of(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return False
    return checksums is None or sha256_of(path) in checksums


def is_temporary(path: Path, names: Iterable[str]) -> bool:
    """Whether a file is a temporary one of these names, as a killed run leaves them behind."""
    stems = "|".join(re.escape(PurePosixPath(name).name) for name in names)
    return bool(re.fullmatch(rf"({stems})(\.[0-9a-f]{{32}}\.part)+", path.name)) and is_file(path)


def _in_the_way(path: Path, what: str) -> DataError:
    return DataError(f"--out: {path} {what}. Move it elsewhere, or name another folder.")


def _checksum(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record without its own checksum."""
    content = {name: value for name, value in record.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
