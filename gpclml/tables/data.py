"""The table of a command: read from a file, split into training and test rows, with notes on it."""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import io
import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from pandas.api.types import is_numeric_dtype
from torch import Tensor

from gpclml._utils.arguments import seeded
from gpclml.errors import ArgumentError, DataError, UnknownNameError
from gpclml.evaluation.copies import copied_rows
from gpclml.tables.averages import check_whole
from gpclml.tables.encoding import (
    MOST_LEVELS,
    InputEncoding,
    Kind,
    column_of,
    fit_inputs,
    kind_of,
    numbers_of,
    texts_of,
)
from gpclml.tables.missing import filled

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


LEAST_TRAINED, LEAST_TESTED = 20, 5
"""Numbers of rows to train and to test on, below which a command refuses a table."""

TASKS = ("regression", "classification", "counts")
"""What a command may take a target for."""

_SHARE, _MOST_TESTED = 0.2, 1000
_MOST_CLASSES = 20  # each has a model of its own
_PLURALS = {
    "boolean": "true and false", "date": "dates", "category": "texts", "other": "lists or objects",
}  # fmt: skip
_IF_MIXED = (
    "Leave those cells empty or list them under --missing; an input may also be named under --drop "
    "or --categories."
)

Rows = tuple[Tensor, Tensor]
"""Inputs ``(n, d)``, NaN where missing, and targets ``(n,)``."""


@dataclass(frozen=True)
class TableOptions:
    """Which table a command reads, and how; the options of the command have the same names."""

    data: Path
    target: str
    rows: int
    seed: int = 0
    drop: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    time_column: str | None = None
    decimal: str = ""
    task: str = ""  # if empty, that of the target's values

    def __post_init__(self) -> None:
        if self.task and self.task not in TASKS:
            raise UnknownNameError("--task", self.task, TASKS)
        if self.decimal not in ("", ".", ","):
            raise ArgumentError("--decimal", repr(self.decimal), "a point or a comma")
        for text in self.missing:
            if text.encode(errors="replace").decode() != text:
                raise ArgumentError("--missing", ascii(text), "a text that is valid UTF-8")


@dataclass(frozen=True, eq=False)
class TableData:
    """Training and test rows of a table, and notes on them.

    ``train`` has no missing inputs: they are replaced by their expectations. ``decimal`` is the
    decimal mark. ``classes`` has the labels of a classification, whose targets are numbers of
    these from 0 on; it is empty for a regression.
    """

    options: TableOptions
    sha256: str
    decimal: str
    encoding: InputEncoding
    train: Rows
    test: Rows
    notes: tuple[str, ...]
    classes: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """What the target is taken for, one of :data:`TASKS`."""
        return "classification" if self.classes else self.options.task or "regression"


def read_table_data(options: TableOptions, tests: bool) -> TableData:
    """Reads a table, leaves out copies of rows, splits the others and encodes the columns."""
    if not options.data.is_file() and options.data.exists() and not options.data.is_dir():
        # A pipe cannot be read again, for the checksum.
        raise DataError(f"{options.data} is not a regular file. Save the table to a file first.")
    table = read_table(options.data, options.missing, options.decimal)
    if len(table.columns) < 2:
        name = table.columns[0]
        raise DataError(
            f"{options.data} has one column only, {name!r}. Give a table of a target and inputs, "
            "their names and values separated by comma, semicolon, tab or bar."
        )
    targets, classes = _read_target(table, options)
    kinds = _kinds(table, options)
    # A copy among the test rows, as by oversampling or a join, would be predicted from its training
    # row, and a copy among the training rows says nothing new.
    known = (~targets.isnan()).numpy()
    copied = np.zeros(len(table), dtype=bool)
    inputs = fit_inputs(table.iloc[known], kinds).encode(table.iloc[known])
    if not classes:  # of few different inputs, equal rows of a class are rows of their own
        copied[known] = copied_rows(inputs, targets.numpy()[known])
    decimal, amounts = (table.attrs.get(name, "") for name in ("decimal", "amounts"))
    table, targets = table.iloc[~copied], targets[torch.from_numpy(~copied)]
    if options.time_column == options.target:
        expected = "a column that is not the target"
        raise ArgumentError("--time-column", repr(options.time_column), expected)
    times = read_times(table, options.time_column)
    _check_targets(targets if times is None else targets + 0 * times, options.target)
    train, test = split_rows(targets, options.seed, options.rows, times, tests)
    train_table, test_table = table.iloc[train.numpy()], table.iloc[test.numpy()]
    encoding = _fit_encoding(train_table, kinds, options)
    x, test_x = (torch.from_numpy(encoding.encode(rows)) for rows in (train_table, test_table))
    y, test_y = targets[train], targets[test]
    for number, label in enumerate(classes):
        if not bool((y == number).any()):
            got, suggestion = f"no training row of {label!r}", "Join this class to another one."
            raise ArgumentError(f"target {options.target!r}", got, "rows of each class", suggestion)
    # Test inputs stay missing, as those of new rows are.
    train_x = filled(x, encoding.categories, options.seed)
    notes = (
        *_notes_on_rows(options, targets, times, (len(train), len(test), int(copied.sum()))),
        *_notes_on_columns(encoding, x, amounts),
        *(_notes_on_time(options.time_column, encoding, table, times, test) if tests else ()),
        *encoding.notes,
        *_notes_on_targets(options, classes, y),
    )
    checksum = hashlib.sha256(options.data.read_bytes()).hexdigest()
    rows = (train_x, y), (test_x, test_y)
    return TableData(options, checksum, decimal, encoding, *rows, notes, classes)


def _kinds(table: pandas.DataFrame, options: TableOptions) -> dict[str, Kind]:
    """The kinds of the columns that may become inputs, by name; checks all their values."""
    for argument, names in (("drop", options.drop), ("categories", options.categories)):
        for name in names:
            _column(table, argument, name)
            if name == options.target:
                raise ArgumentError(argument, repr(name), "a column that is not the target")
    kinds: dict[str, Kind] = {}
    for name in table.columns:
        if name == options.target or name in options.drop:
            continue
        column = column_of(table, name)
        kind = "category" if name in options.categories else kind_of(column, _IF_MIXED)
        kinds[name] = kind
        if kind in ("number", "boolean", "date"):
            numbers_of(column, kind)
    return kinds


def _fit_encoding(
    train: pandas.DataFrame, kinds: Mapping[str, Kind], options: TableOptions
) -> InputEncoding:
    """How columns become inputs, as :class:`gpclml.Regressor` encodes them.

    Left out are columns as asked, and those that say nothing: of one value, and texts that differ
    in most rows and are not named as categories.
    """
    left_out = dict.fromkeys(options.drop, "as asked")
    for name, kind in kinds.items():
        if kind == "category" and name not in options.categories:
            texts = [text for text in texts_of(column_of(train, name)) if text is not None]
            if (count := len(set(texts))) > MOST_LEVELS:
                hint = "; write dates as 2024-05-31" if all(map(_OTHER_DATE.match, texts)) else ""
                left_out[name] = f"{count} different texts, more than {MOST_LEVELS}{hint}"
    # Columns of one value are found in the inputs, where codes and wild values are gone.
    encoding = fit_inputs(train, {name: kinds[name] for name in kinds if name not in left_out})
    x = encoding.encode(train)
    for name, inputs in encoding.slices.items():
        if (np.nanmin(x[:, inputs], axis=0) == np.nanmax(x[:, inputs], axis=0)).all():
            left_out[name] = "the same value in all rows"
    columns = tuple(column for column in encoding.columns if column.name not in left_out)
    encoding = InputEncoding(columns, {**left_out, **encoding.left_out})
    if not encoding.columns:
        reasons = "; ".join(f"{name!r}: {why}" for name, why in encoding.left_out.items())
        got = f"no usable column ({reasons or 'there is none beside the target'})"
        suggestion = "Correct one of them, or add another."
        raise ArgumentError("table", got, "at least one column to predict from", suggestion)
    return encoding


_OTHER_DATE = re.compile(r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}(?:[T ].*)?$")


def _column(table: pandas.DataFrame, argument: str, name: str) -> pandas.Series:
    """The column that an argument names."""
    if name not in table.columns:
        raise UnknownNameError(argument, name, map(str, table.columns))
    return column_of(table, name)


def _read_target(table: pandas.DataFrame, options: TableOptions) -> tuple[Tensor, tuple[str, ...]]:
    """The targets of all rows, NaN where missing, in float64; of classes their numbers, and labels.

    Classes are asked for, or a column of texts, of true and false, or of two values.
    """
    column, target = _column(table, "target", options.target), options.target
    kind, argument = kind_of(column, _IF_MIXED), f"target {target!r}"
    count = column.dropna().astype(str).nunique()
    has_labels = kind == "boolean" or (kind == "category" and count <= _MOST_CLASSES)
    task = options.task or TASKS[has_labels or (kind == "number" and count == 2)]
    if task == "classification":
        texts = texts_of(pandas.Series(numbers_of(column, kind)) if kind == "number" else column)
        labels = sorted({text for text in texts if text is not None})
        if kind == "number":
            labels.sort(key=float)
        if not 2 <= len(labels) <= _MOST_CLASSES:
            got = f"{len(labels)} different value{'' if len(labels) == 1 else 's'}"
            suggestion = "Name another column, or pass --task regression to predict numbers."
            raise ArgumentError(argument, got, f"2 to {_MOST_CLASSES} classes", suggestion)
        numbers = pandas.Series(texts).map({label: number for number, label in enumerate(labels)})
        return torch.from_numpy(numbers.to_numpy(np.float64)), tuple(labels)
    if kind == "empty":
        raise ArgumentError(argument, "no value at all", "numbers", "Name another column.")
    if kind != "number":
        names = list(map(str, table.select_dtypes("number", exclude="timedelta").columns))
        suggestion = "The table has no column of numbers."
        if names:
            more = ", ..." if len(names) > 8 else ""
            suggestion = f"Columns of numbers: {', '.join(names[:8])}{more}."
        suggestion += " Name another, or write its values as numbers."
        if kind == "boolean":
            suggestion = "Pass --task classification, or write 0 and 1 to predict numbers."
        if kind == "category" and count <= _MOST_CLASSES:
            suggestion = f"Pass --task classification. {suggestion}"
        raise ArgumentError(argument, _PLURALS[kind], "numbers", suggestion)
    targets = torch.from_numpy(np.array(numbers_of(column, "number")))
    if task == "counts":
        check_whole(argument, targets, "Correct the values, or leave out --task counts.")
    return targets, ()


def read_times(table: pandas.DataFrame, column: str | None) -> Tensor | None:
    """When each row was: dates as days since 1970, numbers as they are, NaN where missing.

    Without a column None; a column of other values, or one that is not there, is refused.
    """
    if column is None:
        return None
    values = _column(table, "--time-column", column)
    kind = kind_of(values, _IF_MIXED)
    if kind not in ("date", "number"):
        got = f"{column!r}, a column of {_PLURALS.get(kind, 'no values')}"
        suggestion = "Write dates as 2024-05-31, or name a column of years or of numbered days."
        raise ArgumentError("--time-column", got, "a column of dates or numbers", suggestion)
    return torch.from_numpy(np.array(numbers_of(values, kind)))


def _num_tested(count: int) -> int:
    """Number of test rows among those with a target: a fifth of them, and 1000 at most."""
    return min(round(_SHARE * count), _MOST_TESTED)


def split_rows(
    targets: Tensor,
    seed: int = 0,
    most_rows: int = 4000,
    times: Tensor | None = None,
    tests: bool = True,
) -> tuple[Tensor, Tensor]:
    """Numbers of training and of test rows among those that have a target, in ascending order.

    A fifth of the rows, and 1000 at most, are test rows; the others are training rows. If that
    makes more than ``most_rows`` training rows, there are ``most_rows`` of them and all others are
    test rows.

    With times the test rows are the latest, with all that are as late as the first of them. The
    training rows are earlier, the latest ``most_rows`` of those if there are more. Times that leave
    fewer than 20 rows to train on or five to test on are refused.

    If no row is to be set aside for ``tests``, at most ``most_rows`` rows, random ones or the
    latest, are training rows.
    """
    lacking = targets.isnan() if times is None else targets.isnan() | times.isnan()
    rows = (~lacking).nonzero()[:, 0]
    count = len(rows)
    if times is None:
        rows = rows[torch.randperm(count, generator=seeded(seed))]
        num_test = max(_num_tested(count), count - most_rows) if tests else 0
        train, test = rows[num_test:][:most_rows], rows[:num_test]
    else:
        rows = rows[times[rows].argsort(stable=True)]
        known, starts = times[rows], [count]
        if tests:
            # Rows of one time stay together: with the test rows or, where too few come before
            # them, with the training rows.
            first = known[-_num_tested(count)]
            ends = int((known < first).sum()), int((known <= first).sum())
            starts = [n for n in ends if LEAST_TRAINED <= n <= count - LEAST_TESTED]
        if not starts:
            got = f"{len(known.unique())} different times in {count} rows"
            expected = f"{LEAST_TRAINED} rows before the latest {LEAST_TESTED}"
            raise ArgumentError(
                "--time-column", got, expected, "Name a finer one, or leave it out."
            )
        train, test = rows[: starts[0]][-most_rows:], rows[starts[0] :]
    return train.sort().values, test.sort().values


def _check_targets(targets: Tensor, target: str) -> None:
    """Checks that enough rows have a target, and that it varies among them."""
    observed = targets[~targets.isnan()]
    if len(observed) < LEAST_TRAINED + LEAST_TESTED:
        got = f"{len(observed)} rows with a value, of {len(targets)}"
        expected = f"at least {LEAST_TRAINED + LEAST_TESTED}, 20 to train on and 5 to test on"
        raise ArgumentError(f"target {target!r}", got, expected, "Collect more rows.")
    if bool((observed == observed[0]).all()):
        got = f"the same value {float(observed[0]):g} in all {len(observed)} rows"
        expected = "a column that varies"
        raise ArgumentError(f"target {target!r}", got, expected, "Name another column.")


def _notes_on_rows(
    options: TableOptions, targets: Tensor, times: Tensor | None, counts: tuple[int, int, int]
) -> Iterator[str]:
    """Sentences on how many rows there are, and which of them are left out.

    ``counts`` are numbers of training rows, of test rows, and of copies, which are left out.
    """
    num_train, num_test, copies = counts
    lacking = int(targets.isnan().sum())
    undated = 0 if times is None else int((times.isnan() & ~targets.isnan()).sum())
    count = len(targets) - lacking - undated
    yield f"{options.data.name} has {_rows(len(targets) + copies)}."
    if copies:
        yield (
            f"Left out: {_rows(copies)} that repeat{'s' if copies == 1 else ''} another in all "
            f"inputs and {options.target}. A copy is no further observation."
        )
    for number, column in ((lacking, options.target), (undated, options.time_column)):
        if number:
            yield f"Left out: {_rows(number)} without {column}."
    if count - num_test > num_train:
        which = "random" if times is None else "latest"
        of = f"of the {count - num_test} earlier ones" if num_test else f"of {count}"
        yield f"{options.rows} {which} rows {of} are fitted, the limit of --rows."
    elif num_test and times is None and count - _num_tested(count) > options.rows:
        yield (
            f"{options.rows} random rows are compared and fitted, the limit of --rows; all "
            f"{num_test} others are test rows."
        )


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


_IDENTIFIER = re.compile(r"(?:.*[\s_-])?(?:id|index|number|no|nr)[ _-]*", re.IGNORECASE | re.DOTALL)


def _notes_on_columns(encoding: InputEncoding, x: Tensor, amounts: Sequence[str]) -> Iterator[str]:
    """Sentences on how columns were read, what they lack, and columns that number the rows."""
    if encoding.left_out:
        names = [f"{name!r} ({reason})" for name, reason in encoding.left_out.items()]
        more = len(names) - _MOST_TOLD
        listed = ", ".join(names[:_MOST_TOLD])
        yield f"Columns left out: {listed}{f' and {more} others' if more > 0 else ''}."
    if amounts:
        listed = ", ".join(map(repr, amounts))
        yield f"Read as numbers, without marks of thousands, money or percent: {listed}."
    inputs = {column: x[:, encoding.slices[column.name]] for column in encoding.columns}
    marked = [column.name for column in inputs if column.has_missing]
    lacking = [
        column.name
        for column, values in inputs.items()
        if column.has_missing or bool(values.isnan().any())
    ]
    if lacking:
        marks = f" A further input says where, for {', '.join(marked)}." if marked else ""
        yield (
            f"Missing values are filled in {', '.join(lacking)}, by what the other columns let "
            f"expect.{marks}"
        )
    for column, values in inputs.items():
        steps = values[:, 0].diff()
        is_ordered = bool((steps > 0).all() or (steps < 0).all())
        if (
            column.inputs == (column.name,)
            and column.kind == "number"
            and (is_ordered or _IDENTIFIER.fullmatch(column.name))
            and bool((values == values.round()).all())
            and len(values.unique()) == len(values)
        ):
            yield (
                f"Column {column.name!r} has another whole number in every row. If it only numbers "
                f"the rows, leave it out: --drop {column.name!r}."
            )


def _notes_on_time(
    column: str | None,
    encoding: InputEncoding,
    table: pandas.DataFrame,
    times: Tensor | None,
    test: Tensor,
) -> Iterator[str]:
    """Sentences on how rows were split by time, or could be."""
    if times is None:
        dates = [each.name for each in encoding.columns if each.kind == "date"]
        if dates:
            yield (
                f"Column {dates[0]!r} has dates, and the test rows were drawn at random. If you "
                f"want to predict later rows, test on the latest: --time-column {dates[0]!r}."
            )
        return
    first = table[column].iloc[int(test[times[test].argmin()])]
    yield f"The test rows are the latest: those from {column} {first} on. All others are earlier."
    if column in encoding.slices:
        yield (
            f"Column {column!r} is an input too, whose values in the test rows are beyond those of "
            f"all training rows. If it only says when a row was: --drop {column!r}."
        )


_EXTREME = 10.0  # robust standard deviations of a target that may decide scores by itself
_MOST_TOLD = 5
_ROBUST = 1.349  # standard deviations between the quartiles of a normal distribution


def _notes_on_targets(options: TableOptions, classes: tuple[str, ...], y: Tensor) -> Iterator[str]:
    """Sentences on the classes, or on values of a target that a regression may not fit."""
    if classes:
        counts = [f"{label!r} ({int((y == number).sum())})" for number, label in enumerate(classes)]
        are_numbers = all(label.lstrip("-").replace(".", "").isdigit() for label in classes)
        hint = " --task regression predicts a number instead."
        yield (
            f"{options.target!r} has {len(classes)} classes, so this is a classification; of the "
            f"training rows: {', '.join(counts)}.{hint if are_numbers and not options.task else ''}"
        )
        return
    target, values, zeros = options.target, y.unique(), float((y == 0).double().mean())
    is_whole = bool(((y >= 0) & (y == y.round())).all())
    if options.task == "counts":
        yield (
            f"{target!r} has counts, as asked; of the training rows the mean is "
            f"{float(y.mean()):.3g}, the largest {float(y.max()):g}, and {zeros:.0%} are zero."
        )
        return
    if is_whole and zeros and len(values) > 2 and not options.task:
        yield (
            f"{target!r} has whole numbers from 0 on, taken for numbers as any. If they are "
            "counts, --task counts predicts probabilities of counts."
        )
    if len(values) == 2:
        yield (
            f"The target {target!r} has two values only, {float(values[0]):g} and "
            f"{float(values[1]):g}. A regression predicts numbers between and beyond them; for "
            "probabilities of classes pass --task classification."
        )
        return
    lower, median, upper = torch.quantile(y, y.new_tensor([0.25, 0.5, 0.75]))
    limit = _EXTREME * (upper - lower) / _ROBUST
    away = (y - median).abs()
    if limit > 0 and bool((away > limit).any()):
        yield (
            f"{int((away > limit).sum())} of {len(y)} targets are far from all others (more than "
            f"{_EXTREME:g} robust standard deviations from the median); the farthest is "
            f"{float(y[away.argmax()]):g}. A few such rows can decide the scores: check whether "
            "they are errors, or predict the logarithm."
        )
