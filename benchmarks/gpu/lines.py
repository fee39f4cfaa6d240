"""Files to which a line of JSON is added as soon as it is known, so that a stopped run keeps it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["append_line", "lines_of"]


def append_line(file: Path, entry: Mapping[str, Any]) -> None:
    """Adds a line of JSON, also behind one that was cut while it was written."""
    with file.open("a+b") as lines:
        if lines.tell():
            lines.seek(-1, os.SEEK_END)
            lines.write(b"" if lines.read(1) == b"\n" else b"\n")
        lines.write(json.dumps(entry).encode() + b"\n")


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, if there is one; a line that was cut is passed over."""
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
