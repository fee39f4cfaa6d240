"""Reads tables from CSV and Parquet files, their targets and times, and splits their rows."""

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

import numpy as np
import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.datasets import TrainTestSplit, split, subset
from gpclml.datasets.columns import Kind, column_of, kind_of, numbers_of
from gpclml.errors import ArgumentError, DataError, UnknownNameError

if TYPE_CHECKING:
    import pandas

__all__ = [
    "kind_in_file",
    "num_test_rows",
    "parse_separated_text",
    "read_table",
    "read_targets",
    "read_times",
    "split_rows",
    "subset_rows",
]

_PARQUET = (".parquet", ".pq")


@checked
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
    if path.suffix.lower() in _PARQUET:
        table = _read_parquet(path)
    else:
        table = parse_separated_text(path, list(missing), decimal)
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
_AMOUNTS = {
    decimal: re.compile(
        r"\s*([+-]?)\s*[$€£¥]?\s*"
        rf"([1-9]\d{{0,2}}(?:[{thousands} '\u2019\u00a0\u202f]\d{{3}})+|\d+|(?=[{decimal}]))"
        rf"((?:[{decimal}]\d+)?(?:[eE][+-]?\d+)?)\s*[$€£¥%]?\s*"
    )
    for decimal, thousands in ((".", ","), (",", "."))
}
_MARK = re.compile(r"[.,]\d")
_PLAIN = re.compile(r"\s*[+-]?\d+(?:[.,]\d+)?(?:[eE][+-]?\d+)?\s*")


def parse_separated_text(path: Path, missing: list[str], decimal: str = "") -> pandas.DataFrame:
    """Reads a table from a text file; arguments as for :func:`read_table`."""
    from pandas.api.types import is_numeric_dtype

    text = _text(path)
    if not text.strip():
        raise DataError(
            f"{path} is empty. Give a file with a line of column names and a line for each row."
        )
    if text.lstrip()[0] in "<{[":
        raise DataError(f"{path} is not a table (it looks like HTML or JSON). Save it as CSV.")
    separator = _separator(text)
    names = _column_names(path, text, separator)
    table = _parsed(path, text, separator, names, missing)
    if separator != ";" and all(map(is_numeric_dtype, table.dtypes)):
        return table
    texts = _parsed(path, text, separator, names, missing, as_texts=True)
    columns = {name: column_of(texts, name).dropna() for name in names}
    marks = {name: _decimal_marks(cells) for name, cells in columns.items()}
    # A column without points and commas, such as 5 €, tells nothing.
    telling = [name for name, cells in columns.items() if any(map(_MARK.search, cells))]
    known = {mark for name in telling if len(marks[name]) == 1 for mark in marks[name]}
    usual = decimal or (known.pop() if len(known) == 1 else "")
    plain = r"\s*[+-]?\d*(?:[{}]\d+)?(?:[eE][+-]?\d+)?\s*"
    for name, found in marks.items():
        cells = columns[name]
        if len(found) == 2 and not usual and separator == ";":
            shown = ", ".join(list(filter(_MARK.search, cells))[:3])
            raise DataError(
                f"{path}: column {name!r} has {shown}, which may be thousands or decimals, and no "
                "other column tells. Say what a decimal is: --decimal . or --decimal ,"
            )
        mark = usual or "." if len(found) == 2 else "".join(found)
        is_list = mark == "," and separator == "," and usual != ","  # such as "1,2" in quotes
        if not mark or (is_list and all(map(_PLAIN.fullmatch, cells))):
            continue
        if not is_numeric_dtype(table[name]) or mark == ",":
            table[name] = _amounts(cells, mark).reindex(table.index)
        if not all(re.fullmatch(plain.format(mark), cell) for cell in cells):
            table.attrs["amounts"] = [*table.attrs.get("amounts", ()), name]
    table.attrs["decimal"] = usual
    return table


def _decimal_marks(cells: pandas.Series) -> set[str]:
    """The decimal marks by which all texts of a column are numbers; none if all are whole."""
    if not len(cells):
        return set()
    found = {mark for mark, pattern in _AMOUNTS.items() if all(map(pattern.fullmatch, cells))}
    digits = cells.str.replace(r"[^\d.,]", "", regex=True)
    marked = digits.str.contains("[.,]", regex=True)
    if len(found) < 2:
        return found
    if not marked.any():
        return set() if all(map(_is_number, cells)) else {"."}
    used = set("".join(digits[marked])) & {".", ","}
    whole = digits[~marked]
    if len(used) == 1 and len(whole):
        # Decimals are written in full, as 950.000, or without their last zeros, as 12.5.
        if (whole.str.len() > 3).any():
            return used
        if digits[marked].str.endswith("0").any():
            return {".", ","} - used
    return found


def _amounts(cells: pandas.Series, decimal: str) -> pandas.Series:
    """The numbers of texts such as ``$1,250`` or, with a decimal comma, ``1.250,5 €``."""
    import pandas

    matches = (_AMOUNTS[decimal].fullmatch(cell) for cell in cells)
    parts = [match.groups() for match in matches if match]
    numbers = [
        float(sign + re.sub(r"\D", "", whole) + decimals.replace(",", "."))
        for sign, whole, decimals in parts
    ]
    return pandas.Series(numbers, cells.index, dtype=float)


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
    path: Path,
    text: str,
    separator: str,
    names: list[str],
    missing: list[str],
    as_texts: bool = False,
) -> pandas.DataFrame:
    import pandas

    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            table = pandas.read_csv(
                io.StringIO(text), sep=separator, header=0, index_col=False, na_values=missing,
                skipinitialspace=True, low_memory=False, dtype=str if as_texts else None,
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


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def kind_in_file(column: pandas.Series) -> Kind:
    """The kind of the values in a column of a file; an error names options of the command."""
    return kind_of(
        column,
        "Leave those cells empty or list them under --missing; an input may also be named under "
        "--drop or --categories.",
    )


_LEAST_TRAINED, _LEAST_TESTED = 20, 5
_LEAST_ROWS = _LEAST_TRAINED + _LEAST_TESTED


def read_targets(table: pandas.DataFrame, target: str) -> Tensor:
    """The targets of all rows, NaN where missing, in float64; checks that they can be modelled."""
    if target not in table.columns:
        raise UnknownNameError("target", target, map(str, table.columns))
    column = column_of(table, target)
    kind = kind_in_file(column)
    argument = f"target {target!r}"
    if kind == "empty":
        raise ArgumentError(argument, "no value at all", "numbers", "Name another column.")
    if kind != "number":
        suggestion = f"{_columns_of_numbers(table)} Name another, or write its values as numbers."
        if kind == "boolean":
            suggestion = "Write 0 and 1 to predict them as numbers; classes are not modelled here."
        raise ArgumentError(argument, _PLURALS[kind], "numbers", suggestion)
    numbers = torch.from_numpy(np.array(numbers_of(column, "number")))
    observed = numbers[~numbers.isnan()]
    if len(observed) < _LEAST_ROWS:
        got = f"{len(observed)} rows with a value, of {len(table)}"
        expected = f"at least {_LEAST_ROWS}, 20 to train on and 5 to test on"
        raise ArgumentError(argument, got, expected, "Collect more rows.")
    if bool((observed == observed[0]).all()):
        got = f"the same value {float(observed[0]):g} in all {len(observed)} rows"
        raise ArgumentError(argument, got, "a column that varies", "Name another column.")
    return numbers


@checked
def read_times(table: pandas.DataFrame, column: str | None) -> Tensor | None:
    """When each row was: dates as days since 1970, numbers as they are, NaN where missing.

    Args:
        table: The rows.
        column: Name of a column of dates or numbers; None gives None.

    Raises:
        UnknownNameError: There is no such column.
        ArgumentError: The column has other values.
    """
    if column is None:
        return None
    if column not in table.columns:
        raise UnknownNameError("--time-column", column, map(str, table.columns))
    values = column_of(table, column)
    kind = kind_in_file(values)
    if kind not in ("date", "number"):
        got = f"{column!r}, a column of {_PLURALS.get(kind, 'no values')}"
        suggestion = "Write dates as 2024-05-31, or name a column of years or of numbered days."
        raise ArgumentError("--time-column", got, "a column of dates or numbers", suggestion)
    return torch.from_numpy(np.array(numbers_of(values, kind)))


def _columns_of_numbers(table: pandas.DataFrame) -> str:
    names = list(map(str, table.select_dtypes("number", exclude="timedelta").columns))
    if not names:
        return "The table has no column of numbers."
    return f"Columns of numbers: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."


_PLURALS = {
    "boolean": "true and false", "date": "dates", "category": "texts", "other": "lists or objects",
}  # fmt: skip


_SHARE, _MOST_TESTED = 0.2, 1000


def num_test_rows(count: int) -> int:
    """Number of test rows among those with a target: a fifth of them, and 1000 at most."""
    return min(round(_SHARE * count), _MOST_TESTED)


@checked(targets="float (n,)", times="float (n,)")
def split_rows(
    targets: Tensor, seed: int = 0, most_rows: int = 4000, times: Tensor | None = None
) -> TrainTestSplit:
    """Splits the rows that have a target into training and test rows, at random or by time.

    A fifth of the rows, and 1000 at most, are test rows; the others are training rows. If that
    makes more than ``most_rows`` training rows, there are ``most_rows`` of them and all others are
    test rows.

    With times the test rows are the latest, with all that are as late as the first of them. The
    training rows are earlier, the latest ``most_rows`` of those if there are more.

    Args:
        targets: Targets of all rows, NaN where missing, ``(n,)``.
        seed: Seed of a random split.
        most_rows: Largest number of training rows.
        times: Times of all rows, NaN where missing, ``(n,)``; None for a random split.

    Returns:
        Row numbers, each part in ascending order.

    Raises:
        ArgumentError: ``most_rows`` is below 20, every target is missing, or the times leave
            fewer than 20 rows to train on or five to test on.
    """
    if most_rows < _LEAST_TRAINED:
        raise ArgumentError("most_rows", most_rows, f"at least {_LEAST_TRAINED}")
    observed = _observed(targets, times)
    count = len(observed)
    if count == 0:
        raise ArgumentError("targets", "none that is not missing", "at least one")
    if times is not None:
        return _latest_apart(observed, times[observed], most_rows)
    tested = max(num_test_rows(count), count - most_rows)
    parts = split(count, seed, tested / count)
    return TrainTestSplit(
        train=observed[parts.train.sort().values], test=observed[parts.test.sort().values]
    )


def _latest_apart(rows: Tensor, times: Tensor, most_rows: int) -> TrainTestSplit:
    first = times.sort().values[-num_test_rows(len(rows)) :][0]
    for is_late in (times >= first, times > first):
        early, late = rows[~is_late], rows[is_late]
        if len(early) >= _LEAST_TRAINED and len(late) >= _LEAST_TESTED:
            return TrainTestSplit(train=_latest(early, times[~is_late], most_rows), test=late)
    got = f"{len(times.unique())} different times in {len(rows)} rows"
    expected = f"{_LEAST_TRAINED} rows before the latest {_LEAST_TESTED}"
    raise ArgumentError("--time-column", got, expected, "Name a finer one, or leave it out.")


def _latest(rows: Tensor, times: Tensor, most_rows: int) -> Tensor:
    return rows[times.argsort(stable=True)[-most_rows:].sort().values]


def _observed(targets: Tensor, times: Tensor | None) -> Tensor:
    """Numbers of the rows that have a target, and a time if there are times."""
    lacking = targets.isnan() if times is None else targets.isnan() | times.isnan()
    return (~lacking).nonzero()[:, 0]


def subset_rows(
    targets: Tensor, seed: int = 0, most_rows: int = 4000, times: Tensor | None = None
) -> Tensor:
    """All rows that have a target; of more than ``most_rows`` a random choice or the latest."""
    observed = _observed(targets, times)
    if len(observed) <= most_rows:
        return observed
    if times is not None:
        return _latest(observed, times[observed], most_rows)
    return subset(observed, most_rows, seed).sort().values
