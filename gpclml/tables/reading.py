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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Generator, Tensor

from gpclml._utils.arguments import seeded
from gpclml.errors import ArgumentError, DataError, UnknownNameError
from gpclml.tables.encoding import Kind, column_of, kind_of, numbers_of

if TYPE_CHECKING:
    import pandas

__all__ = [
    "LEAST_TESTED",
    "LEAST_TRAINED",
    "TrainTestSplit",
    "kind_in_file",
    "num_test_rows",
    "read_table",
    "read_targets",
    "read_times",
    "split",
    "split_rows",
    "subset",
    "subset_rows",
]

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
    for name in names:
        if names.count(name) > 1:
            columns = " and ".join(str(i) for i, other in enumerate(names, 1) if other == name)
            raise DataError(
                f"{path}: the column name {name!r} is there {names.count(name)} times (columns "
                f"{columns}). Rename or remove all but one."
            )


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f"There is no folder {path.parent} either."
    nearest = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"Did you mean {path.parent / nearest[0]}?" if nearest else "Check its name."


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
    table = table.reset_index(drop=table.index.name is None)
    table.columns = [str(name).strip() for name in table.columns]
    _check_names(path, list(table.columns))
    return table


_SEPARATORS = (",", ";", "\t", "|")
_OF_NO_TEXT = re.compile(rb"[\0-\x08\x0e-\x19\x1c-\x1f]")


def _read_text(path: Path, missing: list[str], decimal: str) -> pandas.DataFrame:
    from pandas.api.types import is_numeric_dtype

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
    table = _parsed(path, text, separator, names, missing)
    if separator != ";" and all(map(is_numeric_dtype, table.dtypes)):
        return table
    texts = _parsed(path, text, separator, names, missing, kind=str)
    return _with_amounts(path, table, texts, separator, decimal)


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
    if any(names) and all(_is_number(name) for name in names if name):
        raise DataError(
            f"{path}: the first line has numbers, not column names ({', '.join(names[:4])}). Put a "
            "line of names before it."
        )
    return [name or f"column {number}" for number, name in enumerate(names, start=1)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parsed(
    path: Path,
    text: str,
    separator: str,
    names: list[str],
    missing: list[str],
    kind: type | None = None,
) -> pandas.DataFrame:
    import pandas

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
        r"\s*([+-]?)\s*[$€£¥]?\s*"
        rf"([1-9]\d{{0,2}}(?:[{thousands} '\u2019\u00a0\u202f]\d{{3}})+|\d+|(?=[{decimal}]))"
        rf"((?:[{decimal}]\d+)?(?:[eE][+-]?\d+)?)\s*[$€£¥%]?\s*"
    )
    for decimal, thousands in _THOUSANDS.items()
}
_MARKED = re.compile(r"[.,]\d")


def _with_amounts(
    path: Path, table: pandas.DataFrame, texts: pandas.DataFrame, separator: str, decimal: str
) -> pandas.DataFrame:
    """The table with numbers in the columns that pandas takes for texts, or for other numbers.

    pandas knows one decimal mark and one of thousands, for all columns, and no signs of money.
    """
    from pandas.api.types import is_numeric_dtype

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
        mark = (usual or ".") if len(marks[name]) == 2 else marks[name][0]
        plain = re.compile(rf"\s*[+-]?\d*(?:[{mark}]\d+)?(?:[eE][+-]?\d+)?\s*")
        is_plain = all(map(plain.fullmatch, column))
        if is_plain and mark == separator and usual != mark:
            continue  # lists such as "1,2" in quotes
        if mark == "," or not is_numeric_dtype(table[name]):
            numbers = iter([_amount(text, mark) for text in column])
            table[name] = [next(numbers) if there else np.nan for there in texts[name].notna()]
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
        return [] if all(map(_is_number, cells)) else ["."]
    used = [mark for mark in marks if any(mark in number for number in marked)]
    if len(used) == 1 and whole:
        # Decimals are written in full, as 950.000, or without their last zeros, as 12.5.
        if any(len(number) > 3 for number in whole):
            return used
        if any(number.endswith("0") for number in marked):
            return [_THOUSANDS[used[0]]]
    return marks


def _amount(text: str, decimal: str) -> float:
    """The number of a text such as ``$1,250`` or, with a decimal comma, ``1.250,5 €``."""
    match = _AMOUNTS[decimal].fullmatch(text)
    assert match is not None
    sign, whole, decimals = match.groups()
    return float(sign + re.sub(r"\D", "", whole) + decimals.replace(",", "."))


def kind_in_file(column: pandas.Series) -> Kind:
    """The kind of the values in a column of a file; an error names options of the command."""
    return kind_of(
        column,
        "Leave those cells empty or list them under --missing; an input may also be named under "
        "--drop or --categories.",
    )


LEAST_TRAINED, LEAST_TESTED = 20, 5
"""Numbers of rows to train and to test on, below which a command refuses a table."""

_SHARE, _MOST_TESTED = 0.2, 1000
_PLURALS = {
    "boolean": "true and false", "date": "dates", "category": "texts", "other": "lists or objects",
}  # fmt: skip


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
        names = list(map(str, table.select_dtypes("number", exclude="timedelta").columns))
        there = f"Columns of numbers: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
        there = there if names else "The table has no column of numbers."
        suggestion = f"{there} Name another, or write its values as numbers."
        if kind == "boolean":
            suggestion = "Write 0 and 1 to predict them as numbers; classes are not modelled here."
        raise ArgumentError(argument, _PLURALS[kind], "numbers", suggestion)
    numbers = torch.from_numpy(np.array(numbers_of(column, "number")))
    observed = numbers[~numbers.isnan()]
    if len(observed) < LEAST_TRAINED + LEAST_TESTED:
        got = f"{len(observed)} rows with a value, of {len(table)}"
        expected = f"at least {LEAST_TRAINED + LEAST_TESTED}, 20 to train on and 5 to test on"
        raise ArgumentError(argument, got, expected, "Collect more rows.")
    if bool((observed == observed[0]).all()):
        got = f"the same value {float(observed[0]):g} in all {len(observed)} rows"
        raise ArgumentError(argument, got, "a column that varies", "Name another column.")
    return numbers


def read_times(table: pandas.DataFrame, column: str | None) -> Tensor | None:
    """When each row was: dates as days since 1970, numbers as they are, NaN where missing.

    Without a column None; a column of other values, or one that is not there, is refused.
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


@dataclass(frozen=True, eq=False)
class TrainTestSplit:
    """Row numbers of a table, from 0, split into training and test rows.

    Attributes:
        train: Training rows, ``(num_train,)``, int64.
        test: Test rows, ``(num_test,)``, int64.
    """

    train: Tensor
    test: Tensor


def split(n: int, seed: int | Generator, test_fraction: float = 0.1) -> TrainTestSplit:
    """A random split of ``n`` rows, of which the fraction, rounded, are test rows."""
    order, num_test = torch.randperm(n, generator=seeded(seed)), round(n * test_fraction)
    return TrainTestSplit(train=order[num_test:], test=order[:num_test])


def subset(train: Tensor, n: int, seed: int | Generator) -> Tensor:
    """Random training rows, ``(n,)``; with one seed those of a larger ``n`` begin with them."""
    return train[torch.randperm(len(train), generator=seeded(seed))[:n]]


def num_test_rows(count: int) -> int:
    """Number of test rows among those with a target: a fifth of them, and 1000 at most."""
    return min(round(_SHARE * count), _MOST_TESTED)


def split_rows(
    targets: Tensor, seed: int = 0, most_rows: int = 4000, times: Tensor | None = None
) -> TrainTestSplit:
    """Splits the rows that have a target into training and test rows, at random or by time.

    A fifth of the rows, and 1000 at most, are test rows; the others are training rows. If that
    makes more than ``most_rows`` training rows, there are ``most_rows`` of them and all others are
    test rows.

    With times the test rows are the latest, with all that are as late as the first of them. The
    training rows are earlier, the latest ``most_rows`` of those if there are more. Times that leave
    fewer than 20 rows to train on or five to test on are refused.

    Args:
        targets: Targets of all rows, NaN where missing, ``(n,)``.
        seed: Seed of a random split.
        most_rows: Largest number of training rows.
        times: Times of all rows, NaN where missing, ``(n,)``; None for a random split.

    Returns:
        Row numbers, each part in ascending order.
    """
    observed = _observed(targets, times)
    count = len(observed)
    if times is None:
        tested = max(num_test_rows(count), count - most_rows)
        parts = split(count, seed, tested / count)
        train, test = (observed[rows.sort().values] for rows in (parts.train, parts.test))
        return TrainTestSplit(train=train, test=test)
    times = times[observed]
    first = times.sort().values[-num_test_rows(count)]
    for is_late in (times >= first, times > first):
        early, late = observed[~is_late], observed[is_late]
        if len(early) >= LEAST_TRAINED and len(late) >= LEAST_TESTED:
            return TrainTestSplit(train=_latest(early, times[~is_late], most_rows), test=late)
    got = f"{len(times.unique())} different times in {count} rows"
    expected = f"{LEAST_TRAINED} rows before the latest {LEAST_TESTED}"
    raise ArgumentError("--time-column", got, expected, "Name a finer one, or leave it out.")


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


def _observed(targets: Tensor, times: Tensor | None) -> Tensor:
    """Numbers of the rows that have a target, and a time if there are times."""
    lacking = targets.isnan() if times is None else targets.isnan() | times.isnan()
    return (~lacking).nonzero()[:, 0]


def _latest(rows: Tensor, times: Tensor, most_rows: int) -> Tensor:
    return rows[times.argsort(stable=True)[-most_rows:].sort().values]
