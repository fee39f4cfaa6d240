"""The table of a command: read, split into training and test rows, encoded, with notes on it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpclml.errors import ArgumentError, DataError, UnknownNameError
from gpclml.evaluation.copies import copied_rows
from gpclml.tables.encoding import (
    MOST_LEVELS,
    CategoryColumn,
    InputEncoding,
    Kind,
    column_of,
    fit_inputs,
    numbers_of,
    texts_of,
)
from gpclml.tables.missing import filled
from gpclml.tables.reading import (
    LEAST_TESTED,
    LEAST_TRAINED,
    TrainTestSplit,
    kind_in_file,
    num_test_rows,
    read_table,
    read_targets,
    read_times,
    split_rows,
    subset_rows,
)
from gpclml.tables.recipes import TableOptions

if TYPE_CHECKING:
    import pandas

__all__ = ["TableData", "data_notes", "fit_encoding", "read_table_data"]

Rows = tuple[Tensor, Tensor]
"""Inputs ``(n, d)``, NaN where missing, and targets ``(n,)``."""


@dataclass(frozen=True, eq=False)
class TableData:
    """Training and test rows of a table, and notes on them.

    ``train`` has no missing inputs: they are replaced by their expectations. ``repeated`` says
    which test rows are equal to a training row, ``(t,)``; ``decimal`` is the decimal mark.
    """

    options: TableOptions
    sha256: str
    decimal: str
    encoding: InputEncoding
    train: Rows
    test: Rows
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
        # A pipe cannot be read again, for the checksum.
        raise DataError(f"{options.data} is not a regular file. Save the table to a file first.")
    table = read_table(options.data, options.missing, options.decimal)
    if len(table.columns) < 2:
        name = table.columns[0]
        raise DataError(
            f"{options.data} has one column only, {name!r}. Give a table of a target and inputs, "
            "their names and values separated by comma, semicolon, tab or bar."
        )
    targets = read_targets(table, options.target)
    kinds = _kinds(table, options)
    copied = _copied_rows(table, kinds, targets)
    decimal, amounts = (table.attrs.get(name, "") for name in ("decimal", "amounts"))
    table, targets = table.iloc[~copied], targets[torch.from_numpy(~copied)]
    if options.time_column == options.target:
        expected = "a column that is not the target"
        raise ArgumentError("--time-column", repr(options.time_column), expected)
    times = read_times(table, options.time_column)
    if tests:
        rows = split_rows(targets, options.seed, options.rows, times)
    else:
        none = torch.empty(0, dtype=torch.long)
        rows = TrainTestSplit(subset_rows(targets, options.seed, options.rows, times), none)
    train_table, test_table = table.iloc[rows.train.numpy()], table.iloc[rows.test.numpy()]
    encoding = fit_encoding(train_table, kinds, options)
    x, test_x = (torch.from_numpy(encoding.encode(rows)) for rows in (train_table, test_table))
    y, test_y = targets[rows.train], targets[rows.test]
    repeated = _repeated_rows((x, y), (test_x, test_y))
    train = filled(x, encoding.categories, options.seed), y
    _check_enough(y, test_y, tests, options.target)
    _check_sizes(torch.cat([y, test_y]), f"target {options.target!r}", power=2)
    for name, values in zip(encoding.names, torch.cat([train[0], test_x]).T, strict=True):
        _check_sizes(values[~values.isnan()], f"column {name!r}", power=1)
    notes = (
        *_notes_on_rows(options, targets, times, rows, int(copied.sum())),
        *_notes_on_columns(encoding, x, test_table, amounts),
        *_notes_on_time(options.time_column, encoding, table, times, rows.test),
        *data_notes(options.target, encoding, train, repeated),
        *(_order_notes(options.target, targets) if times is None else ()),
    )
    checksum = hashlib.sha256(options.data.read_bytes()).hexdigest()
    return TableData(options, checksum, decimal, encoding, train, (test_x, test_y), repeated, notes)


def _kinds(table: pandas.DataFrame, options: TableOptions) -> dict[str, Kind]:
    """The kinds of the columns that may become inputs, by name; checks all their values."""
    for argument, names in (("drop", options.drop), ("categories", options.categories)):
        for name in names:
            if name not in table.columns:
                raise UnknownNameError(argument, name, map(str, table.columns))
            if name == options.target:
                raise ArgumentError(argument, repr(name), "a column that is not the target")
    kinds: dict[str, Kind] = {}
    for name in table.columns:
        if name == options.target or name in options.drop:
            continue
        column = column_of(table, name)
        kinds[name] = kind = "category" if name in options.categories else kind_in_file(column)
        if kind in ("number", "boolean", "date"):
            numbers_of(column, kind)
    return kinds


def _copied_rows(table: pandas.DataFrame, kinds: Mapping[str, Kind], targets: Tensor) -> np.ndarray:
    """Which rows are copies of earlier ones, as by oversampling or a join.

    A copy among the test rows would be predicted from its training row, and a copy among the
    training rows says nothing new.
    """
    known = (~targets.isnan()).numpy()
    rows = table.iloc[known]
    inputs = fit_inputs(rows, kinds).encode(rows)
    copied = np.zeros(len(table), dtype=bool)
    copied[known] = copied_rows(inputs, targets.numpy()[known])
    return copied


def fit_encoding(
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


def _check_enough(train_y: Tensor, test_y: Tensor, tests: bool, target: str) -> None:
    for y, least, what in ((train_y, LEAST_TRAINED, "train"), (test_y, LEAST_TESTED, "test")):
        if len(y) < least and (tests or what == "train"):
            got = f"{len(y)} rows to {what} on"
            raise ArgumentError("rows", got, f"at least {least}", "Collect more rows.")
    if bool((train_y == train_y[0]).all()):
        got = f"the same value {float(train_y[0]):g} in all rows to train on"
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
    options: TableOptions, targets: Tensor, times: Tensor | None, rows: TrainTestSplit, copies: int
) -> Iterator[str]:
    """Sentences on how many rows there are, and which of them are left out."""
    tested = len(rows.test)
    lacking = int(targets.isnan().sum())
    undated = 0 if times is None else int((times.isnan() & ~targets.isnan()).sum())
    count = len(targets) - lacking - undated
    yield f"{options.data.name} has {_rows(len(targets) + copies)}."
    if copies:
        yield (
            f"Left out: {_rows(copies)} that repeat{'s' if copies == 1 else ''} another in all "
            f"inputs and {options.target}. A copy is no further observation."
        )
    if lacking:
        yield f"Left out: {_rows(lacking)} without {options.target}."
    if undated:
        yield f"Left out: {_rows(undated)} without {options.time_column}."
    if count - tested > len(rows.train):
        which = "random" if times is None else "latest"
        of = f"of the {count - tested} earlier ones" if tested else f"of {count}"
        yield f"{options.rows} {which} rows {of} are fitted, the limit of --rows."
    elif tested and times is None and count - num_test_rows(count) > options.rows:
        yield (
            f"{options.rows} random rows are compared and fitted, the limit of --rows; all "
            f"{tested} others are test rows."
        )


def _notes_on_columns(
    encoding: InputEncoding, x: Tensor, test: pandas.DataFrame, amounts: Sequence[str]
) -> Iterator[str]:
    """Sentences on how columns were read, what they lack, and columns that number the rows."""
    if amounts:
        listed = ", ".join(map(repr, amounts))
        yield f"Read as numbers, without marks of thousands, money or percent: {listed}."
    marked = [column.name for column in encoding.columns if column.has_missing]
    lacks = {name: x[:, inputs].isnan().any() for name, inputs in encoding.slices.items()}
    filled_in = [name for name in lacks if lacks[name] or name in marked]
    if filled_in:
        marks = f" A further input says where, for {', '.join(marked)}." if marked else ""
        yield (
            f"Missing values are filled in {', '.join(filled_in)}, by what the other columns let "
            f"expect.{marks}"
        )
    for column in encoding.columns:
        name = column.name
        if isinstance(column, CategoryColumn):
            if levels := column.unknown(column_of(test, name)):
                yield (
                    f"Column {name!r}: {_rows(sum(levels.values()), 'test row')} with levels that "
                    f"no training row has: {_listed(list(levels))}."
                )
        elif column.kind == "number" and _numbers_rows(name, x[:, encoding.slices[name]]):
            yield (
                f"Column {name!r} has another whole number in every row. If it only numbers the "
                f"rows, leave it out: --drop {name!r}."
            )


def _numbers_rows(name: str, values: Tensor) -> bool:
    """Whether a column of different whole numbers is sorted, or is named like an identifier."""
    steps = values[:, 0].diff()
    is_whole = bool((values == values.round()).all())
    if values.shape[1] > 1 or not is_whole or len(values.unique()) < len(values):
        return False
    last = re.split(r"[\s_-]+", name.lower().strip(" _-"))[-1]
    named = last in ("id", "index", "number", "no", "nr")
    return named or bool((steps > 0).all() or (steps < 0).all())


def _notes_on_time(
    column: str | None,
    encoding: InputEncoding,
    table: pandas.DataFrame,
    times: Tensor | None,
    test: Tensor,
) -> Iterator[str]:
    """Sentences on how rows were split by time, or could be."""
    if len(test) == 0:
        return
    if times is None:
        dates = [each.name for each in encoding.columns if getattr(each, "kind", "") == "date"]
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
    target: str, encoding: InputEncoding, train: Rows, repeated: Tensor
) -> Iterator[str]:
    """Sentences on values, targets and rows that a user may want to look at."""
    if encoding.left_out:
        names = [f"{name!r} ({reason})" for name, reason in encoding.left_out.items()]
        yield f"Columns left out: {_listed(names)}."
    if count := int(repeated.sum()):
        yield (
            f"{count} of {len(repeated)} test rows are equal to a training row in all inputs and "
            "the target. A model that has seen them predicts them better than new rows."
        )
    yield from encoding.notes
    yield from _same_columns(encoding, train[0])
    yield from _target_notes(target, train[1])


def _repeated_rows(train: Rows, test: Rows) -> Tensor:
    """Which test rows are equal to a training row in inputs and target, ``(t,)``."""
    train_rows, test_rows = (
        [row.tobytes() for row in (torch.column_stack(rows) + 0.0).numpy()]  # -0 is 0
        for rows in (train, test)
    )
    known = set(train_rows)
    return torch.tensor([row in known for row in test_rows], dtype=torch.bool)


def _same_columns(encoding: InputEncoding, x: Tensor) -> Iterator[str]:
    """Columns that are others, up to an offset and a factor."""
    owner = [column.name for column in encoding.columns for _ in column.inputs]
    if len(owner) > _MOST_COMPARED:
        return
    z = x - x.mean(0)
    z = z / z.norm(dim=0).clamp_min(torch.finfo(x.dtype).tiny)
    same = ((z.T @ z).abs() > 1 - 1e-10).triu(1).nonzero().tolist()
    pairs = dict.fromkeys((owner[i], owner[j]) for i, j in same if owner[i] != owner[j])
    for name, other in list(pairs)[:_MOST_TOLD]:
        yield (
            f"Columns {name!r} and {other!r} carry the same information, up to a constant and a "
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
    y = y[~y.isnan()]
    steps = y.diff()
    if len(y) < 20 or bool((steps >= 0).all()) or bool((steps <= 0).all()):
        return  # a table sorted by its target
    earlier, later = y[:-1] - y.mean(), y[1:] - y.mean()
    size = float(y.var(correction=0)) * len(y)
    correlation = float((earlier * later).sum()) / size if size > 0 else 0.0
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
