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
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas
from pandas.api.types import is_numeric_dtype

from gpclml.errors import DataError
from gpclml.tables.encoding import column_of

_PARQUET = (".parquet", ".pq")


def read_table(
    path: str | os.PathLike[str], missing: Sequence[str] = (), decimal: str = ""
) -> pandas.DataFrame:
    """Reads a table from a Parquet file (.parquet, .pq) or from text such as CSV (any other name).

    Text files are in UTF-8, compressed if the name ends in ``.gz``, with the column names in the
    first line. The separator is comma, semicolon, tab or bar, whichever is most frequent in that
    line. Empty cells are missing values, and so are ``NA``, ``N/A``, ``NaN``, ``null``, ``None``
    and the other markers of pandas.

    Numbers may be written as 1,234.5 or as 1.234,5, with a sign of money before or after them or a
    percent sign, if all cells of their column are such numbers; ``table.attrs["amounts"]`` names
    these columns. A column in which each point, or comma, has three digits behind it, such as 1.234
    and 12.500, is read as the other columns are written. If they do not tell, a point is decimal,
    but beside semicolons ``decimal`` has to say so; ``table.attrs["decimal"]`` has what was found.

    Args:
        path: The file.
        missing: Further texts that stand for a missing value, e.g. ``"?"``.
        decimal: The decimal mark of columns that may be read in two ways, ``"."`` or ``","``.

    Returns:
        The table, its rows numbered from 0.

    Raises:
        DataError: There is no such file, it is not a table, it has no column names or the same name
            twice, it has no rows, or its decimal mark cannot be told.

    Note:
        Parquet needs the package ``pyarrow``: ``pip install 'gpclml[parquet]'``.
    """
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder. Give a CSV or Parquet file.")
    if not path.exists():
        raise DataError(f"There is no file {path}. {_nearest(path)}")
    is_parquet = path.suffix.lower() in _PARQUET
    table = _read_parquet(path) if is_parquet else _read_text(path, list(missing), decimal)
    if table.empty:
        raise DataError(f"{path} has column names and no rows. Give a table with rows.")
    return table


def _check_names(path: Path, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            columns = " and ".join(str(i) for i, other in enumerate(names, 1) if other == name)
            said = f"{path}: the column name {name!r} is there {count} times (columns {columns})"
            raise DataError(f"{said}. Rename or remove all but one.")


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f"There is no folder {path.parent} either."
    nearest = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"Did you mean {path.parent / nearest[0]}?" if nearest else "Check its name."


def _read_parquet(path: Path) -> pandas.DataFrame:
    try:
        table = pandas.read_parquet(path)
    except ImportError as error:
        raise DataError(
            f"{path}: reading Parquet needs the package pyarrow. Install it by pip install "
            "'gpclml[parquet]', or save the table as CSV."
        ) from error
    except Exception as error:  # pyarrow raises many kinds for damaged files
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be read as Parquet: {reason}. Write it again.") from error
    table = table.reset_index(drop=table.index.name is None)
    table.columns = [str(name).strip() for name in table.columns]
    _check_names(path, list(table.columns))
    return table


_SEPARATORS = (",", ";", "\t", "|")
_OF_NO_TEXT = re.compile(rb"[\0-\x08\x0e-\x19\x1c-\x1f]")


def _read_text(path: Path, missing: list[str], decimal: str) -> pandas.DataFrame:
    text = _text(path)
    if not text.strip():
        raise DataError(
            f"{path} is empty. Give a file with a line of column names and a line for each row."
        )
    if text.lstrip()[0] in "<{[":
        raise DataError(f"{path} is not a table (it looks like HTML or JSON). Save it as CSV.")
    # The separator is what is most frequent in the first line outside of quotes.
    first = next(line for line in text.splitlines() if line.strip())
    separator = max(_SEPARATORS, key="".join(first.split('"')[::2]).count)
    names = _column_names(path, text, separator)
    _check_names(path, names)
    # As pandas infers them, and as texts where a column may hold numbers of another style.
    table = _parsed(path, text, separator, names, missing)
    if separator != ";" and all(map(is_numeric_dtype, table.dtypes)):
        return table
    texts = _parsed(path, text, separator, names, missing, kind=str)
    return _read_amounts(path, table, texts, separator, decimal)


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


def _column_names(path: Path, text: str, separator: str) -> list[str]:
    lines = csv.reader(io.StringIO(text), delimiter=separator, skipinitialspace=True)
    try:
        names = [name.strip() for name in next(line for line in lines if line)]
    except csv.Error as error:
        raise DataError(f"{path} is not a table: {error}. Save the table as CSV.") from error
    if any(names) and _are_numbers(name for name in names if name):
        raise DataError(
            f"{path}: the first line has numbers, not column names ({', '.join(names[:4])}). Put a "
            "line of names before it."
        )
    return [name or f"column {number}" for number, name in enumerate(names, start=1)]


def _are_numbers(texts: Iterable[str]) -> bool:
    numbers: Any = pandas.to_numeric(pandas.Series(list(texts), dtype=object), errors="coerce")
    return bool(numbers.notna().all())


def _parsed(
    path: Path,
    text: str,
    separator: str,
    names: list[str],
    missing: list[str],
    kind: type | None = None,
) -> pandas.DataFrame:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            table = pandas.read_csv(
                io.StringIO(text), sep=separator, header=0, index_col=False, na_values=missing,
                skipinitialspace=True, low_memory=False, dtype=kind,
            )  # fmt: skip
        except (ValueError, pandas.errors.ParserWarning) as error:
            reason = str(error).strip().splitlines()[0]
            if "Length of header" in reason:
                reason = f"rows have more cells than the {len(names)} column names"
            reason = reason.removeprefix("Error tokenizing data. C error: ").rstrip(".")
            raise DataError(
                f"{path} is not a table: {reason}. Quote cells that contain the separator "
                f"{separator!r}, or save the table as CSV again."
            ) from error
    table.columns = names
    return table


_THOUSANDS = {".": ",", ",": "."}  # by the decimal mark; both may have spaces and apostrophes too
_AMOUNTS = {
    decimal: re.compile(
        r"\s*[+-]?\s*[$€£¥]?\s*"
        rf"(?:[1-9]\d{{0,2}}(?:[{thousands} '\u2019\u00a0\u202f]\d{{3}})+|\d+|(?=[{decimal}]))"
        rf"(?:[{decimal}]\d+)?(?:[eE][+-]?\d+)?\s*[$€£¥%]?\s*"
    )
    for decimal, thousands in _THOUSANDS.items()
}
_MARKED = re.compile(r"[.,]\d")


def _read_amounts(
    path: Path, table: pandas.DataFrame, texts: pandas.DataFrame, separator: str, decimal: str
) -> pandas.DataFrame:
    """The table with numbers in the columns that pandas takes for texts, or for other numbers.

    pandas knows one decimal mark and one of thousands, for all columns, and no signs of money.
    """
    cells = {name: column_of(texts, name).dropna().tolist() for name in texts}
    marks = {name: _decimal_marks(column) for name, column in cells.items()}
    # A column without points and commas, such as 5 €, tells nothing.
    telling = [name for name, column in cells.items() if any(map(_MARKED.search, column))]
    known = {mark for name in telling if len(marks[name]) == 1 for mark in marks[name]}
    usual = decimal or (known.pop() if len(known) == 1 else "")
    amounts = []
    for name, column in cells.items():
        if not marks[name]:
            continue
        if len(marks[name]) == 2 and not usual and separator == ";":
            shown = ", ".join(list(filter(_MARKED.search, column))[:3])
            raise DataError(
                f"{path}: column {name!r} has {shown}, which may be thousands or decimals, and no "
                "other column tells. Say what a decimal is: --decimal . or --decimal ,"
            )
        # pandas has read numbers with a decimal point right, unless the point is of thousands.
        mark = (usual or ".") if len(marks[name]) == 2 else marks[name][0]
        plain = re.compile(rf"\s*[+-]?\d*(?:[{mark}]\d+)?(?:[eE][+-]?\d+)?\s*")
        is_plain = all(map(plain.fullmatch, column))
        if is_plain and mark == separator and usual != mark:
            continue  # lists such as "1,2" in quotes
        if mark == "," or not is_numeric_dtype(table[name]):
            bare = column_of(texts, name).str.replace(rf"[^\d{mark}eE+-]", "", regex=True)
            table[name] = bare.str.replace(mark, ".", regex=False).astype(float)
        amounts += [] if is_plain else [name]
    table.attrs.update(decimal=usual, amounts=amounts)
    return table


def _decimal_marks(cells: list[str]) -> list[str]:
    """The decimal marks by which all texts of a column are numbers; none if all are whole."""
    marks = [mark for mark, amount in _AMOUNTS.items() if all(map(amount.fullmatch, cells))]
    if len(marks) < 2:
        return marks
    digits = [re.sub(r"[^\d.,]", "", cell) for cell in cells]
    marked = [number for number in digits if _MARKED.search(number)]
    whole = [number for number in digits if not _MARKED.search(number)]
    if not marked:
        return [] if _are_numbers(cells) else ["."]
    used = [mark for mark in marks if any(mark in number for number in marked)]
    if len(used) == 1 and whole:
        # Decimals are written in full, as 950.000, or without their last zeros, as 12.5.
        if any(len(number) > 3 for number in whole):
            return used
        if any(number.endswith("0") for number in marked):
            return [_THOUSANDS[used[0]]]
    return marks
