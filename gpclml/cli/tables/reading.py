"""Files to tables: CSV and Parquet, with errors that name the file and the mend."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpclml._utils.arguments import checked
from gpclml.cli.tables._separated_text import parse_separated_text
from gpclml.errors import DataError

if TYPE_CHECKING:
    import pandas

__all__ = ["read_table"]

_PARQUET = (".parquet", ".pq")


@checked
def read_table(path: str | os.PathLike[str], missing: Sequence[str] = ()) -> pandas.DataFrame:
    """A table from a Parquet file (.parquet, .pq) or from separated text (any other name).

    Text is UTF-8, compressed if its name ends in ``.gz``, with column names in its first line.
    The separator, one of comma, semicolon, tab and bar, is the one most frequent there; with
    semicolons decimal commas are understood. Empty cells are missing, and so are ``NA``, ``N/A``,
    ``NaN``, ``null``, ``None`` and the other markers of pandas.

    Args:
        path: The file.
        missing: Further texts that stand for a missing value, e.g. ``"?"``.

    Returns:
        Columns by name, rows numbered from 0.

    Raises:
        DataError: The file is missing, no table, has no column names, a name twice, or no rows.

    Note:
        Parquet needs the package ``pyarrow``: ``pip install 'gpclml[parquet]'``.
    """
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder. Give a CSV or Parquet file.")
    if not path.exists():
        raise DataError(f"There is no file {path}. {_nearest(path)}")
    if path.suffix.lower() in _PARQUET:
        table = _read_parquet(path)
    else:
        table = parse_separated_text(path, list(missing))
    table.columns = [str(name).strip() for name in table.columns]
    _check_names(path, list(table.columns))
    if table.empty:
        raise DataError(f"{path} has column names and no rows. Give a table with rows.")
    return table


def _read_parquet(path: Path) -> pandas.DataFrame:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(
            f"{path}: reading Parquet needs the package pyarrow. Install it by pip install "
            "'gpclml[parquet]', or save the table as CSV."
        ) from error
    try:
        with ParquetFile(path) as file:  # pandas.read_parquet fails where a name is there twice
            table = file.read().to_pandas()
    except Exception as error:  # pyarrow raises many kinds for damaged files
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be read as Parquet: {reason}. Write it again.") from error
    named = table.index.name is not None
    return table.reset_index(drop=not named)


def _check_names(path: Path, names: list[str]) -> None:
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names, start=1):
        places.setdefault(name, []).append(place)
    for name, where in places.items():
        if len(where) > 1:
            columns = " and ".join(str(place) for place in where)
            raise DataError(
                f"{path}: the column name {name!r} is there {len(where)} times (columns "
                f"{columns}). Rename or remove all but one."
            )


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f"There is no folder {path.parent} either."
    nearest = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"Did you mean {path.parent / nearest[0]}?" if nearest else "Check its name."
