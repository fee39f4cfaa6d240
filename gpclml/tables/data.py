"""The table of a command: read, split into training and test rows, encoded, with notes on it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpclml.datasets import TrainTestSplit
from gpclml.datasets.columns import NumberColumn
from gpclml.errors import ArgumentError, DataError
from gpclml.tables.encoding import (
    FEW_MISSING,
    TableEncoding,
    check_columns,
    drop_copies,
    fit_encoding,
)
from gpclml.tables.reading import (
    num_test_rows,
    read_table,
    read_targets,
    read_times,
    split_rows,
    subset_rows,
)
from gpclml.tables.recipes import TableOptions
from gpclml.tables.words import percent

if TYPE_CHECKING:
    import pandas

__all__ = [
    "TableData",
    "data_notes",
    "read_table_data",
    "repeated_rows",
]

_LEAST_TRAINED, _LEAST_TESTED = 20, 5


@dataclass(frozen=True, eq=False)
class TableData:
    """Training and test rows of a table, inputs ``(n, d)`` and targets ``(n,)``, and notes on them.

    ``repeated`` says which test rows are equal to a training row, ``(t,)``.
    """

    options: TableOptions
    sha256: str
    encoding: TableEncoding
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    repeated: Tensor
    notes: tuple[str, ...]

    @property
    def made_from(self) -> dict[str, Any]:
        """All that decides the training rows: the bytes of the table, and the options."""
        options = json.loads(json.dumps(asdict(self.options), default=str))  # as read from a record
        del options["data"]
        return {"sha256": self.sha256, **options}


def read_table_data(options: TableOptions, tests: bool) -> TableData:
    """Reads a table, leaves out copies of rows, splits the others and encodes the columns."""
    if not options.data.is_file() and options.data.exists() and not options.data.is_dir():
        # A pipe cannot be read again, for the checksum and by the Python file of a report.
        raise DataError(f"{options.data} is not a regular file. Save the table to a file first.")
    table = read_table(options.data, options.missing, options.decimal)
    if len(table.columns) < 2:
        name = table.columns[0]
        raise DataError(
            f"{options.data} has one column only, {name!r}. Give a table of a target and inputs, "
            "their names and values separated by comma, semicolon, tab or bar."
        )
    read_targets(table, options.target)
    check_columns(table, options.target, options.drop, options.categories)
    count = len(table)
    table = drop_copies(table, options.target, drop=options.drop, categories=options.categories)
    targets = read_targets(table, options.target)
    if options.time_column == options.target:
        expected = "a column that is not the target"
        raise ArgumentError("--time-column", repr(options.time_column), expected)
    times = read_times(table, options.time_column)
    if tests:
        rows = split_rows(targets, options.seed, options.rows, times)
    else:
        none = torch.empty(0, dtype=torch.long)
        rows = TrainTestSplit(subset_rows(targets, options.seed, options.rows, times), none)
    training = table.iloc[rows.train.numpy()]
    encoding = fit_encoding(
        training, options.target, drop=options.drop, categories=options.categories,
        missing=options.missing, decimal=options.decimal or table.attrs.get("decimal", ""),
    )  # fmt: skip
    train, test = (encoding.tensors(table.iloc[part.numpy()]) for part in (rows.train, rows.test))
    _check_enough(train, test, tests, options.target)
    x, y = (torch.cat(parts) for parts in zip(train, test, strict=True))
    _check_sizes(y, f"target {options.target!r}", power=2)
    for name, values in zip(encoding.inputs, x.T, strict=True):
        _check_sizes(values, f"column {name!r}", power=1)
    incomplete = len(rows.train) - len(train[1]), len(rows.test) - len(test[1])
    repeated = repeated_rows(train, test)
    notes = (
        *_notes_on_rows(options, targets, times, rows, incomplete, count - len(table)),
        *_notes_on_amounts(table.attrs.get("amounts", ())),
        *_notes_on_time(options.time_column, encoding, table, times, rows.test),
        *_notes_on_columns(encoding, table.iloc[rows.test.numpy()]),
        *data_notes(encoding, train, repeated, targets if times is None else targets[:0]),
    )
    checksum = hashlib.sha256(options.data.read_bytes()).hexdigest()
    return TableData(options, checksum, encoding, train, test, repeated, notes)


def _check_enough(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], tests: bool, target: str
) -> None:
    for (_, y), least, what in ((train, _LEAST_TRAINED, "train"), (test, _LEAST_TESTED, "test")):
        if len(y) < least and (tests or what == "train"):
            got = f"{len(y)} rows to {what} on without missing values"
            raise ArgumentError("rows", got, f"at least {least}", "Collect more rows.")
    y = train[1]
    if bool((y == y[0]).all()):
        got = f"the same value {float(y[0]):g} in all rows to train on"
        suggestion = "Name another column, or another --seed."
        raise ArgumentError(f"target {target!r}", got, "a column that varies", suggestion)


def _check_sizes(values: Tensor, column: str, power: int) -> None:
    """Refuses values so large or so close together that they, to this power, cannot be computed."""
    limit = 10.0 ** (300 / power)
    largest = float(values.abs().max())
    spread = float((values / largest).std()) * largest if largest else 0.0
    got, expected = f"a value of size {largest:.3g}", f"sizes of at most {limit:g}"
    if 0 < spread < 1 / limit:
        got, expected = f"a standard deviation of {spread:.3g}", f"at least {1 / limit:g}"
    elif largest <= limit:
        return
    raise ArgumentError(column, got, expected, "Multiply or divide the column by a power of ten.")


def _notes_on_rows(
    options: TableOptions,
    targets: Tensor,
    times: Tensor | None,
    rows: TrainTestSplit,
    incomplete: tuple[int, int],
    copies: int,
) -> list[str]:
    """Sentences on how many rows there are, and which of them are left out."""
    tests = len(rows.test) > 0
    lacking = int(targets.isnan().sum())
    undated = 0 if times is None else int((times.isnan() & ~targets.isnan()).sum())
    count = len(targets) - lacking - undated
    said = [f"{options.data.name} has {_rows(len(targets) + copies)}."]
    if copies:
        said.append(
            f"Left out: {_rows(copies)} that repeat{'s' if copies == 1 else ''} another in all "
            f"inputs and {options.target}. A copy is no further observation."
        )
    if lacking:
        said.append(f"Left out: {_rows(lacking)} without {options.target}.")
    if undated:
        said.append(f"Left out: {_rows(undated)} without {options.time_column}.")
    if count - len(rows.test) > len(rows.train):
        which = "random" if times is None else "latest"
        of = f"of the {count - len(rows.test)} earlier ones" if tests else f"of {count}"
        said.append(f"{options.rows} {which} rows {of} are fitted, the limit of --rows.")
    elif tests and times is None and count - num_test_rows(count) > options.rows:
        said.append(
            f"{options.rows} random rows are compared and fitted, the limit of --rows; all "
            f"{len(rows.test)} others are test rows."
        )
    if any(incomplete):
        parts = f", {incomplete[0]} to train on and {incomplete[1]} to test on" if tests else ""
        said.append(f"Left out: {_rows(sum(incomplete))} with missing values{parts}.")
    return said


def _notes_on_amounts(names: Sequence[str]) -> Iterator[str]:
    if names:
        listed = ", ".join(map(repr, names))
        yield f"Read as numbers, without marks of thousands, money or percent: {listed}."


def _notes_on_time(
    column: str | None,
    encoding: TableEncoding,
    table: pandas.DataFrame,
    times: Tensor | None,
    test: Tensor,
) -> Iterator[str]:
    """Sentences on how rows were split by time, or could be."""
    if len(test) == 0:
        return
    dates = [one.name for one in encoding.columns if getattr(one, "kind", "") == "date"]
    if times is None:
        if dates:
            yield (
                f"Column {dates[0]!r} has dates, and the test rows were drawn at random. If you "
                f"want to predict later rows, test on the latest: --time-column {dates[0]!r}."
            )
        return
    first = table[column].iloc[int(test[times[test].argmin()])]
    yield f"The test rows are the latest: those from {column} {first} on. All others are earlier."
    if column in {one.name for one in encoding.columns}:
        yield (
            f"Column {column!r} is an input too, whose values in the test rows are beyond those of "
            f"all training rows. If it only says when a row was: --drop {column!r}."
        )


def _notes_on_columns(encoding: TableEncoding, test: pandas.DataFrame) -> Iterator[str]:
    """Sentences on columns that are filled, have new levels in test rows, or number the rows."""
    filled = [one.name for one in encoding.columns if one.has_missing]
    if filled:
        yield (
            f"Missing values are filled in {', '.join(filled)}, with a further input for each that "
            f"says where, because at least {percent(FEW_MISSING)} of the training rows have some."
        )
    for name, levels in encoding.encode(test).unknown.items():
        yield (
            f"Column {name!r}: {_rows(sum(levels.values()), 'test row')} with levels that no "
            f"training row has: {', '.join(levels)}."
        )
    yield from encoding.notes


def _rows(count: int, what: str = "row") -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


_EXTREME = 10.0  # robust standard deviations of a target that may decide scores by itself
_LIKE_THE_ROW_BEFORE = 0.3  # least correlation of targets of neighbouring rows
_CLEAR = 5.0  # standard errors of a correlation of zero
_AT_A_BOUND = 0.01  # least share of targets that are equal to the least or the greatest of all
_MOST_COMPARED = 300  # inputs, of which every pair is compared
_MOST_TOLD = 5
_ROBUST = 1.349  # standard deviations between the quartiles of a normal distribution


def data_notes(
    encoding: TableEncoding, train: tuple[Tensor, Tensor], repeated: Tensor, all_y: Tensor
) -> list[str]:
    """Sentences on values, targets and rows that a user may want to look at.

    ``all_y`` are the targets of all rows in the order of the file, NaN where missing; none where
    the test rows are the latest.
    """
    said: list[str] = []
    if encoding.left_out:
        names = [f"{name!r} ({reason})" for name, reason in encoding.left_out.items()]
        said.append(f"Columns left out: {_listed(names)}.")
    if count := int(repeated.sum()):
        said.append(
            f"{count} of {len(repeated)} test rows are equal to a training row in all inputs and "
            "the target. A model that has seen them predicts them better than new rows."
        )
    said += [one.note for one in encoding.columns if isinstance(one, NumberColumn) and one.note]
    said += _same_columns(encoding, train[0])
    said += _target_notes(encoding.target, train[1])
    said += _order_notes(encoding.target, all_y[~all_y.isnan()])
    return said


def repeated_rows(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Tensor:
    """Which test rows are equal to a training row in inputs and target, ``(t,)``."""
    known = {row.numpy().tobytes() for row in _rows_of(train)}
    return torch.tensor(
        [row.numpy().tobytes() in known for row in _rows_of(test)], dtype=torch.bool
    )


def _rows_of(part: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([part[0], part[1].unsqueeze(-1)], dim=-1) + 0.0  # -0 is 0


def _same_columns(encoding: TableEncoding, x: Tensor) -> Iterator[str]:
    """Columns that are others, up to an offset and a factor."""
    owner = [column.name for column in encoding.columns for _ in column.inputs]
    if len(owner) > _MOST_COMPARED:
        return
    z = x - x.mean(0)
    z = z / z.norm(dim=0).clamp_min(torch.finfo(x.dtype).tiny)
    same = ((z.T @ z).abs() > 1 - 1e-10).triu(1).nonzero().tolist()
    pairs = dict.fromkeys((owner[i], owner[j]) for i, j in same if owner[i] != owner[j])
    for one, other in list(pairs)[:_MOST_TOLD]:
        yield (
            f"Columns {one!r} and {other!r} carry the same information, up to a constant and a "
            f"factor. One of them is enough: --drop {other!r}."
        )


def _target_notes(target: str, y: Tensor) -> Iterator[str]:
    values, counts = y.unique(return_counts=True)
    if len(values) == 2:
        yield (
            f"The target {target!r} has two values only, {float(values[0]):g} and "
            f"{float(values[1]):g}. A regression predicts numbers between and beyond them; for "
            "classes use a classifier."
        )
        return
    quartiles = torch.quantile(y, torch.tensor([0.25, 0.5, 0.75], dtype=y.dtype))
    scale = float(quartiles[2] - quartiles[0]) / _ROBUST
    extreme = (y - quartiles[1]).abs() > _EXTREME * scale
    if scale > 0 and bool(extreme.any()):
        largest = float(y[(y - quartiles[1]).abs().argmax()])
        yield (
            f"{int(extreme.sum())} of {len(y)} targets are far from all others (more than "
            f"{_EXTREME:g} robust standard deviations from the median); the farthest is "
            f"{largest:g}. A few such rows can decide the scores: check whether they are errors, "
            "or predict the logarithm."
        )
    if bool((y == y.round()).all()) and len(values) <= len(y) // 4:
        below = " and, near zero, below it" if float(values[0]) >= 0 else ""
        yield (
            f"The target {target!r} has whole numbers only, {len(values)} different ones. "
            f"Intervals of single Gaussian processes end between them{below}."
        )
        return
    ends = [
        f"{float(value):g} ({int(count)} rows)"
        for value, count in ((values[0], counts[0]), (values[-1], counts[-1]))
        if int(count) > max(2.0, _AT_A_BOUND * len(y)) and int(count) > 3 * int(counts.median())
    ]
    if ends:
        yield (
            f"The target {target!r} seems to be bounded: its extreme value {' and '.join(ends)} is "
            "repeated. Intervals may reach beyond a bound."
        )


def _order_notes(target: str, y: Tensor) -> Iterator[str]:
    """Whether a row's target is like that of the row before it in the file."""
    steps = y.diff()
    if len(y) < 20 or bool((steps >= 0).all()) or bool((steps <= 0).all()):
        return  # a table sorted by its target
    one, other = y[:-1] - y.mean(), y[1:] - y.mean()
    size = float(y.var(correction=0)) * len(y)
    correlation = float((one * other).sum()) / size if size > 0 else 0.0
    if correlation > max(_LIKE_THE_ROW_BEFORE, _CLEAR / math.sqrt(len(y))):
        yield (
            f"Neighbouring rows have similar targets (correlation {correlation:.2f} of {target!r} "
            "with the row before). If rows are in order of time or in groups, test rows drawn at "
            "random are easier than rows to come: name a column that orders them, --time-column."
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_TOLD])
    more = len(names) - _MOST_TOLD
    return f"{shown} and {more} others" if more > 0 else shown
