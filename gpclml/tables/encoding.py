"""How the columns of a table become inputs: decided on training rows, the same for new ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pandas
from pandas.api import types

from gpclml.errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray


MOST_LEVELS = 50
"""Levels of a category that become inputs."""

_FEW_MISSING, _FEW_MISSING_SHARE = 5, 0.1  # rows from which on what they have in common is learned
_MOST_TOLD = 20  # names of columns

NumberKind = Literal["number", "boolean", "date"]
Kind = Literal["number", "boolean", "date", "category", "empty", "other"]

_ISO_DATE = r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
_DOTTED_DATE = re.compile(r"\s*(\d{1,2})\.(\d{1,2})\.(\d{4})((?: \d{2}:\d{2}(?::\d{2})?)?)\s*")
_BOOLEANS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
_INFERRED: dict[str, Kind] = {
    "boolean": "boolean", "complex": "other", "integer": "number", "floating": "number",
    "timedelta64": "number", "datetime64": "date", "categorical": "category",
}  # fmt: skip
_NO_INPUTS = {"empty": "no values", "other": "values that are lists or objects"}
_SUGGESTION = "Leave those cells empty, or correct them."
_IF_MIXED = 'Set those values to NaN, or convert the column by astype("category").'


def column_of(table: pandas.DataFrame, name: str) -> pandas.Series:
    """The column of a table with a name that only one column has."""
    return cast("pandas.Series", table[name])


def kind_of(column: pandas.Series, if_mixed: str = _IF_MIXED) -> Kind:
    """The kind of the values in a column.

    Dates are values of a date type and texts such as 2024-05-31, or 31.05.2024 with the day before
    the month, with or without a time. Texts that are all numbers are numbers. An ``"empty"`` column
    has no value; lists, dictionaries and complex numbers are ``"other"``. Texts of which some are
    numbers, and others not, are refused; ``if_mixed`` says what to do.
    """
    values = column.dropna()
    if len(values) == 0:
        return "empty"
    inferred = types.infer_dtype(values)
    if inferred in _INFERRED:
        return _INFERRED[inferred]
    if values.map(lambda value: not np.isscalar(value) and hasattr(value, "__len__")).any():
        return "other"
    numeric = _to_numeric(values).notna().to_numpy()
    if numeric.all():
        return "number"
    texts = values.astype(str).str.strip()
    if texts.map(_in_iso).str.fullmatch(_ISO_DATE).all():
        return "date"
    if numeric.any():
        expected = f"numbers alone, as the {int(numeric.sum())} others are"
        _check_all(values, numeric, expected, if_mixed)
    return "category"


def numbers_of(column: pandas.Series, kind: NumberKind) -> NDArray[np.float64]:
    """The values of a column as numbers, NaN where missing.

    Booleans are 0 and 1, dates days since the first of January 1970 in UTC, durations days.
    """
    if kind == "date":
        dates = pandas.to_datetime(column.map(_in_iso), errors="coerce", utc=True, format="ISO8601")
        # The default of pandas, nanoseconds, ends in the year 2262; that of this text is seconds.
        first = pandas.Timestamp("1970-01-01", tz="UTC")
        result = (dates.dt.as_unit("us") - first) / pandas.Timedelta(days=1)
        expected = "dates such as 2024-05-31 or 31.05.2024"
    elif kind == "boolean":
        result = column.astype(object).map(
            lambda value: _BOOLEANS.get(str(value).strip().lower(), np.nan)
        )
        expected = "true and false"
    elif types.is_timedelta64_dtype(column.dtype):
        result, expected = column / pandas.Timedelta(days=1), "durations"
    else:
        result, expected = _to_numeric(column), "numbers"
    numbers = result.to_numpy(dtype=np.float64, na_value=np.nan)
    _check_all(column, ~np.isnan(numbers) | column.isna().to_numpy(), expected)
    infinite = np.isinf(numbers)
    if infinite.any():
        rows = ", ".join(_row(row) for row in column.index[infinite][:3])
        got = f"{int(infinite.sum())} infinite values (row {rows})"
        raise ArgumentError(f"column {column.name!r}", got, "finite numbers", _SUGGESTION)
    return numbers


def _in_iso(value: Any) -> Any:
    """A date such as 31.05.2024 as 2024-05-31; whatever else it is stays."""
    match = _DOTTED_DATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    day, month, year, time = match.groups()
    return f"{year}-{int(month):02}-{int(day):02}{time}"


def texts_of(column: pandas.Series) -> NDArray[np.object_]:
    """The categories of a column as texts, None where missing; 2.0 is ``"2"``."""
    texts = [
        str(int(value)) if isinstance(value, float | np.floating) and float(value).is_integer()
        else str(value).strip()
        for value in column.astype(object)
    ]  # fmt: skip
    made = np.array(texts, dtype=object)
    made[column.isna().to_numpy()] = None
    return made


def _to_numeric(column: pandas.Series) -> pandas.Series:
    if types.is_numeric_dtype(column.dtype):
        return column
    texts = column.astype(object).map(
        lambda value: value.strip() if isinstance(value, str) else value
    )
    return cast("pandas.Series", pandas.to_numeric(texts, errors="coerce"))


def _check_all(
    column: pandas.Series, fine: NDArray[np.bool_], expected: str, suggestion: str = _SUGGESTION
) -> None:
    if not fine.all():
        bad = cast("pandas.Series", column[~fine])
        shown = ", ".join(f"{value!r} (row {_row(row)})" for row, value in bad.head(3).items())
        count = f"{len(bad)} of {len(column)} values such as {shown}"
        raise ArgumentError(f"column {column.name!r}", count, expected, suggestion)


def _row(label: object) -> str:
    """The number of a row for the user: from 1, without the line of column names."""
    return str(int(label) + 1) if isinstance(label, int | np.integer) else str(label)


@dataclass(frozen=True)
class Column:
    """How a column becomes inputs.

    A category becomes an input for each level, which is 1 where the value is that level; a value
    that is not among the levels has zeros everywhere. Other columns become one number: booleans 0
    and 1, dates days since 1970.

    Attributes:
        name: Name of the column.
        kind: Kind of its values.
        has_missing: Whether a further input, the last, is 1 where values are missing. For a
            category that is one more level; without it, levels are NaN where the value is missing.
        levels: The levels of a category.
        codes: Numbers that stand for a missing value.
        limits: The least and the largest number; others are moved there. None for no limits.
        note: A sentence on codes or limits.
    """

    name: str
    kind: NumberKind | Literal["category"] = "number"
    has_missing: bool = False
    levels: tuple[str, ...] = ()
    codes: tuple[float, ...] = ()
    limits: tuple[float, float] | None = None
    note: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that the column becomes."""
        names = tuple(f"{self.name} = {level}" for level in self.levels) or (self.name,)
        return (*names, f"{self.name} is missing") if self.has_missing else names

    def encode(self, column: pandas.Series) -> NDArray[np.float64]:
        """Inputs ``(n, k)``, a number NaN where it is missing."""
        if self.kind == "category":
            levels = np.array(self.levels, dtype=object)
            inputs = (texts_of(column)[:, None] == levels).astype(np.float64)
            missing = column.isna().to_numpy()
            if not self.has_missing:
                inputs[missing] = np.nan
        else:
            numbers = numbers_of(column, self.kind)
            missing = np.isnan(numbers) | np.isin(numbers, self.codes)
            inputs: NDArray[np.float64] = np.where(missing, np.nan, numbers)[:, None]
            if self.limits is not None:
                inputs = inputs.clip(*self.limits)
        return np.column_stack([inputs, missing.astype(float)]) if self.has_missing else inputs


@dataclass(frozen=True)
class InputEncoding:
    """How the columns of a table become inputs; every row becomes a row of numbers.

    ``left_out`` has the columns that are no inputs, and why.
    """

    columns: tuple[Column, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def slices(self) -> dict[str, slice]:
        """For each column the slice of its inputs among all inputs."""
        ends = np.cumsum([0, *(len(column.inputs) for column in self.columns)]).tolist()
        names = (column.name for column in self.columns)
        return dict(zip(names, map(slice, ends, ends[1:]), strict=False))

    @property
    def categories(self) -> list[list[int]]:
        """For each category the indices of its levels among the inputs."""
        slices = self.slices
        groups = [slices[column.name] for column in self.columns if column.kind == "category"]
        return [list(range(group.start, group.stop)) for group in groups]

    @property
    def notes(self) -> list[str]:
        """Sentences on numbers that are codes for missing values, or far from all others."""
        return [column.note for column in self.columns if column.note]

    def encode(self, table: pandas.DataFrame) -> NDArray[np.float64]:
        """The inputs of rows, ``(n, d)``.

        A missing number has NaN, a level that is not among those of its column zeros. Where hardly
        any training row lacks it, a missing category has NaN.
        """
        names = {str(name): name for name in table.columns}
        lacking = [column.name for column in self.columns if column.name not in names]
        if lacking:
            there = ", ".join(map(repr, list(names)[:_MOST_TOLD]))
            more = ", ..." if len(names) > _MOST_TOLD else ""
            raise ArgumentError(
                "table",
                f"no column {', '.join(map(repr, lacking[:_MOST_TOLD]))}",
                "all columns that are inputs of the model",
                f"Add or rename columns; there are {there}{more}.",
            )
        inputs = [column.encode(column_of(table, names[column.name])) for column in self.columns]
        return np.hstack([np.empty((len(table), 0)), *inputs])

    def note_on_unknown(self, unknown: NDArray[np.bool_]) -> str:
        """A sentence on unknown inputs ``(n, d)`` of columns that hardly any training row lacks."""
        seen = {column.name for column in self.columns if column.has_missing}
        lacks = {name: unknown[:, inputs].any(1) for name, inputs in self.slices.items()}
        new = {name: rows for name, rows in lacks.items() if rows.any() and name not in seen}
        if not new:
            return ""
        return (
            f"{int(np.any(list(new.values()), axis=0).sum())} of {len(unknown)} rows have values "
            "missing, or levels, where hardly any training row has that, in "
            f"{', '.join(map(repr, new))}. Predictions are averages over what these may be, with "
            "wider intervals."
        )

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> InputEncoding:
        """What ``asdict`` made of one; a KeyError or TypeError if it is something else."""
        columns: list[dict[str, Any]] = [
            {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in each.items()
            }
            for each in content["columns"]
        ]
        return cls(tuple(Column(**values) for values in columns), content["left_out"])


def fit_inputs(table: pandas.DataFrame, kinds: Mapping[Any, Kind]) -> InputEncoding:
    """Decides on training rows how the columns of these kinds become inputs.

    Numbers stay numbers, booleans become 0 and 1, dates days since 1970, and a category one input
    for each of its levels, at most the 50 that most rows have. Numbers far from all others are
    codes for missing values, or wild (:func:`unusual_values`). Where at least 10 % of the rows, and
    five of them, lack a value, an input is 1 there; a missing category is then a level of its own.
    Columns without a value, or of lists, are left out.
    """
    columns, left_out = [], {}
    least = max(_FEW_MISSING, _FEW_MISSING_SHARE * len(table))
    for label, kind in kinds.items():
        name, values = str(label), column_of(table, label)
        if kind in ("empty", "other"):
            left_out[name] = _NO_INPUTS[kind]
            continue
        if kind == "category":
            # Sorted, so that of levels of as many rows the first in the alphabet are taken.
            texts = Counter(sorted(text for text in texts_of(values) if text is not None))
            levels = tuple(sorted(text for text, _ in texts.most_common(MOST_LEVELS)))
            column, missing = Column(name, kind, levels=levels), values.isna().to_numpy()
        else:
            numbers = numbers_of(values, kind)
            column = Column(name, kind) if kind == "boolean" else _robust(name, kind, numbers)
            missing = np.isnan(numbers) | np.isin(numbers, column.codes)
        columns.append(replace(column, has_missing=int(missing.sum()) >= least))
    return InputEncoding(tuple(columns), left_out)


_FAR = 5.0  # ranges of the other values that unusual ones are away from them
_MOST_CODES = 3

MOST_WILD = 0.05
"""Largest share of the values of a column that are wild."""


def unusual_values(
    numbers: NDArray[np.float64],
) -> tuple[tuple[float, ...], tuple[float, float] | None]:
    """Codes for missing values among numbers, and the limits of the others if some are wild.

    Unusual are values of a minority, farther from all others than five times the range of these;
    or, of codes such as -999 or 9999, than the range. Up to 5 % of the numbers are wild: a slip of
    the keyboard, or a lost decimal point. If there are more, or they have no digits but nines, up
    to three different ones, each there at least twice, are codes. A column of which more than half
    is one value has no unusual ones: in it few values say anything.

    Args:
        numbers: The values, ``(n,)``, NaN where missing.

    Returns:
        The codes; and the least and the largest of the values that are not unusual, None where all
        are usual.
    """
    values, counts = np.unique(numbers[~np.isnan(numbers)], return_counts=True)
    total = counts.sum()
    # One gap after the other is looked at, from the outside: within are always the usual values.
    codes: list[float] = []
    all_values = len(values)
    while len(values) > 2 and 2 * counts.max() <= counts.sum():
        below = counts.cumsum()[:-1]
        upper = 2 * below < counts.sum()  # where those above the gap are most
        # At the other end a few values may be wild too.
        ends = np.array([MOST_WILD, 1 - MOST_WILD]) * counts.sum()
        low, high = values[np.searchsorted(counts.cumsum(), ends).clip(max=len(values) - 1)]
        with np.errstate(over="ignore"):
            ranges = np.where(upper, high - values[1:], values[:-1] - low)
            gaps = np.diff(values)
        out = np.where(upper, below, counts.sum() - below)
        # A single value of nines is a code at a shorter distance.
        numbers_out = np.where(upper, np.arange(1, len(values)), np.arange(len(values) - 1, 0, -1))
        nines = numbers_out == 1
        nines &= np.where(upper, _are_nines(values[:1]), _are_nines(values[-1:]))
        far = (ranges > 0) & (2 * out < total) & (gaps / np.where(nines, 1.0, _FAR) > ranges)
        if not far.any():
            break
        # Of gaps that are wide enough the one that parts most values.
        split = int(np.flatnonzero(far)[out[far].argmax()])
        outside = slice(0, split + 1) if upper[split] else slice(split + 1, None)
        inside = slice(split + 1, None) if upper[split] else slice(0, split + 1)
        few = counts[outside].sum() <= max(1.0, MOST_WILD * total)
        repeated = counts[outside].min() > 1 and len(values[outside]) + len(codes) <= _MOST_CODES
        if repeated and (not few or _are_nines(values[outside]).all()):
            codes += values[outside].tolist()
        elif not few:
            break
        values, counts = values[inside], counts[inside]
    limits = None if len(values) == all_values else (float(values[0]), float(values[-1]))
    return tuple(codes), limits


def _are_nines(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether a value has no digits but nines, and at least three of them."""
    size = np.abs(values)
    with np.errstate(divide="ignore"):
        return (size >= 999) & (np.log10(size + 1) % 1 == 0)


def _robust(name: str, kind: NumberKind, numbers: NDArray[np.float64]) -> Column:
    """A column with its codes, its limits where numbers are beyond them, and a note on both."""
    codes, limits = unusual_values(numbers)
    if limits is None:
        return Column(name, kind)
    least, most = limits
    said = [
        f"{int((numbers == code).sum())} values are {code:g}, taken for missing" for code in codes
    ]
    beyond = numbers[((numbers < least) | (numbers > most)) & ~np.isin(numbers, codes)]
    if len(beyond):
        values = "1 value is" if len(beyond) == 1 else f"{len(beyond)} values are"
        far = beyond[np.abs(beyond).argmax()]
        said.append(f"{values} moved to the nearest of the others, {far:g} the farthest")
    note = f"Column {name!r}: {', '.join(said)}; all others lie from {least:g} to {most:g}."
    return Column(name, kind, codes=codes, limits=limits if len(beyond) else None, note=note)
