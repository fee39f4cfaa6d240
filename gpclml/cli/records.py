"""Records: the JSON file of a folder that says what it is and which of its files are its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpclml import __version__
from gpclml.errors import DataError

__all__ = ["MODEL", "REPORT", "FolderKind", "files_of", "read_record", "record_text", "sha256_of"]

_VERSION = 2
_READ_ALSO = (1,)  # of models: it had no checksums, and so nothing of it is replaced


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that the command writes.

    Attributes:
        record: Name of the file by which it is known.
        format: What that file says it is.
        names: A regular expression of the names of its other files.
    """

    record: str
    format: str
    names: str

    def is_record(self, record: Mapping[str, Any] | None) -> bool:
        """Whether what was read is a record of this kind.

        Args:
            record: What :func:`read_record` gave.
        """
        return record is not None and record.get("format") == self.format

    def is_known_version(self, record: Mapping[str, Any]) -> bool:
        """Whether this release can read what the record is of.

        Args:
            record: Of this kind.
        """
        return record.get("version") in (_VERSION, *_READ_ALSO)


MODEL = FolderKind("model.json", "gpclml.TableModel", r"model\.pt|table\.json")
"""The folder of a model."""

REPORT = FolderKind(
    "report.json",
    "gpclml.Report",
    r"index\.html|model\.py|table\.json|models/\w+/(model\.json|model\.pt|table\.json)",
)
"""The folder of a report, with those of its models."""


def record_text(kind: FolderKind, content: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """The text of a record, with a checksum of itself.

    Args:
        kind: What it is a record of.
        content: Numbers, texts, lists and mappings of them.
        files: SHA-256 of the other files of the folder, by name.
    """
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
    """What is in a file that may be a record; None where it cannot be read or is no JSON object.

    Args:
        path: The file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def files_of(path: Path, kind: FolderKind, record: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files that a record names, by name.

    Args:
        path: Of the record, to be named in errors.
        kind: What it is a record of.
        record: What was read.

    Raises:
        DataError: It is of a release that noted none, or it has been changed.
    """
    if record.get("version") != _VERSION:
        said = f"{path} was written by another release, which did not note the files that it wrote."
        raise DataError(f"{said} Move the folder elsewhere, or name another one.")
    files = record.get("files")
    if record.get("checksum") != _checksum(record) or not isinstance(files, dict):
        said = f"{path} is damaged, or has been changed since gpclml wrote it"
        raise DataError(f"{said}. Move the folder elsewhere, or name another one.")
    strange = [name for name in files if not re.fullmatch(kind.names, name)]
    if strange:
        said = f"{path} names the file {strange[0]!r}, which gpclml does not write"
        raise DataError(f"{said}. Move the folder elsewhere, or name another one.")
    return files


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(record: Mapping[str, Any]) -> str:
    """SHA-256 of what a record says, its own checksum aside."""
    content = {name: value for name, value in record.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
