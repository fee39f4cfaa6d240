"""Reads tables from CSV and Parquet files."""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import os
import re
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpclml._utils.arguments import checked
from gpclml.errors import DataError

if TYPE_CHECKING:
    import pandas

__all__ = ["parse_separated_text", "read_table"]

_PARQUET = (".parquet", ".pq")


@checked
def read_table(path: str | os.PathLike[str], missing: Sequence[str] = ()) -> pandas.DataFrame:
    """Reads a table from a Parquet file (.parquet, .pq) or from text such as CSV (any other name).

    Text files are in UTF-8, compressed if the name ends in ``.gz``, with the column names in the
    first line. The separator is comma, semicolon, tab or bar, whichever is most frequent in that
    line. With semicolons, numbers may have decimal commas. Otherwise numbers may have commas
    between thousands, a sign of money before them or a percent sign after them, if all cells of
    their column are such numbers; ``table.attrs["amounts"]`` names these columns. Empty cells are
    missing values, and so are ``NA``, ``N/A``, ``NaN``, ``null``, ``None`` and the other markers of
    pandas.

    Args:
        path: The file.
        missing: Further texts that stand for a missing value, e.g. ``"?"``.

    Returns:
        The table, its rows numbered from 0.

    Raises:
        DataError: There is no such file, it is not a table, it has no column names or the same name
            twice, or it has no rows.

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
        with ParquetFile(path) as file:  # pandas.read_parquet fails if a name is there twice
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


_SEPARATORS = (",", ";", "\t", "|")
_OF_NO_TEXT = re.compile(rb"[\0-\x08\x0e-\x19\x1c-\x1f]")
_AMOUNT = re.compile(r"\s*([+-]?)\s*[$€£¥]?\s*((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*[$€£¥%]?\s*")
_DECIMAL_COMMA = r"\s*[+-]?\d+,\d+(?:[eE][+-]?\d+)?\s*"


def parse_separated_text(path: Path, missing: list[str]) -> pandas.DataFrame:
    """Reads a table from a text file."""
    text = _text(path)
    if not text.strip():
        raise DataError(
            f"{path} is empty. Give a file with a line of column names and a line for each row."
        )
    if text.lstrip()[0] in "<{[":
        raise DataError(f"{path} is not a table (it looks like HTML or JSON). Save it as CSV.")
    separator = _separator(text)
    names = _column_names(path, text, separator)
    table = _parsed(path, text, separator, names, missing, decimal=".")
    if separator == ";" and _has_decimal_commas(table):
        return _parsed(path, text, separator, names, missing, decimal=",")
    for name, column in table.items():
        numbers = _amounts(column)
        if numbers is not None:
            table[name] = numbers
            table.attrs["amounts"] = [*table.attrs.get("amounts", ()), name]
    return table


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        fix = "Check its permissions" if isinstance(error, PermissionError) else "Save it again"
        raise DataError(f"{path} cannot be read: {error}. {fix}.") from error
    if _OF_NO_TEXT.search(content):
        raise DataError(f"{path} is not a text file. Save the table as CSV, in UTF-8.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not in UTF-8 (byte {error.start} is 0x{content[error.start]:02x}). Save it "
            "as 'CSV UTF-8'."
        ) from error


def _separator(text: str) -> str:
    """The separator that is most frequent in the first line outside of quotes; else the comma."""
    first = next(line for line in text.splitlines() if line.strip())
    plain = "".join(first.split('"')[::2])
    return max(_SEPARATORS, key=plain.count)


def _column_names(path: Path, text: str, separator: str) -> list[str]:
    lines = csv.reader(io.StringIO(text), delimiter=separator, skipinitialspace=True)
    try:
        names = [name.strip() for name in next(line for line in lines if line)]
    except csv.Error as error:
        raise DataError(f"{path} is not a table: {error}. Save the table as CSV.") from error
    if any(names) and all(_is_number(name) for name in names if name):
        raise DataError(
            f"{path}: the first line has numbers, not column names ({', '.join(names[:4])}). Put a "
            "line of names before it."
        )
    return [name or f"column {place}" for place, name in enumerate(names, start=1)]


def _parsed(
    path: Path, text: str, separator: str, names: list[str], missing: list[str], decimal: str
) -> pandas.DataFrame:
    import pandas

    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            table = pandas.read_csv(
                io.StringIO(text), sep=separator, header=0, index_col=False, na_values=missing,
                skipinitialspace=True, low_memory=False, decimal=decimal,
            )  # fmt: skip
        except (ValueError, pandas.errors.ParserWarning) as error:
            raise DataError(
                f"{path} is not a table: {_reason(error, len(names))}. Quote cells that contain "
                f"the separator {separator!r}, or save the table as CSV again."
            ) from error
    table.columns = names
    return table


def _reason(error: Exception, count: int) -> str:
    text = str(error).strip().splitlines()[0]
    if "Length of header" in text:
        return f"rows have more cells than the {count} column names"
    return text.removeprefix("Error tokenizing data. C error: ").rstrip(".")


def _has_decimal_commas(table: pandas.DataFrame) -> bool:
    from pandas.api.types import is_numeric_dtype

    for name in table.columns:
        cells = table[name].dropna()
        if len(cells) and not is_numeric_dtype(cells):
            text = cells.astype(str)
            whole = text.str.fullmatch(r"\s*[+-]?\d+\s*")
            decimal = text.str.fullmatch(_DECIMAL_COMMA)
            if bool(decimal.any()) and bool((whole | decimal).all()):
                return True
    return False


def _amounts(column: pandas.Series) -> pandas.Series | None:
    """The numbers of a column of texts such as ``$1,250``; None where a text is something else."""
    import pandas

    cells = column.dropna()
    if not len(cells) or not all(isinstance(cell, str) for cell in cells):
        return None
    found = [_AMOUNT.fullmatch(cell) for cell in cells]
    if not all(found):
        return None
    numbers = [float((one[1] + one[2]).replace(",", "")) for one in found if one]
    return pandas.Series(numbers, cells.index, dtype=float).reindex(column.index)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
