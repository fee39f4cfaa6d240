"""The finished cells as a CSV file small enough to be kept with the code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpclml.errors import DataError

if TYPE_CHECKING:
    import pandas

__all__ = ["write_rows"]

_DIGITS = 6


def write_rows(
    done: pandas.DataFrame, path: str | os.PathLike, about: Sequence[str], skip: Sequence[str] = ()
) -> None:
    """Writes a row for each cell, its configuration and then its metrics.

    Numbers have six significant digits, lists are separated by spaces. Lines in front that begin
    with ``#`` say what made the file; ``pandas.read_csv(path, comment="#")`` passes over them. The
    same cells give the same bytes.

    Args:
        done: Finished cells; columns that begin with an underscore are left out.
        path: The file; compressed where its name ends in ``.gz``.
        about: The lines in front.
        skip: Further columns to leave out.

    Raises:
        DataError: The file cannot be written.
    """
    import gzip

    hidden = [name for name in done if name.startswith("_") or name in skip]
    table = done.drop(columns=hidden).map(_value)
    text = "".join(f"# {line}\n" for line in about) + table.to_csv(index=False)
    data = text.encode()
    try:
        packed = gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data
        Path(path).write_bytes(packed)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error}). Name another file.") from error


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(str(_value(item)) for item in value)
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) and value == value else value
