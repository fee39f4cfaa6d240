"""What the columns of a table hold, and the inputs of a model that they become."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from gpclml.errors import ArgumentError

if TYPE_CHECKING:
    import pandas
    from numpy.typing import NDArray

__all__ = [
    "MOST_WILD",
    "CategoryColumn",
    "Kind",
    "NumberColumn",
    "NumberKind",
    "category_places",
    "column_of",
    "columns_of",
    "fit_column",
    "kind_of",
    "numbers_of",
    "texts_of",
    "unusual_values",
]

NumberKind = Literal["number", "boolean", "date"]
Kind = Literal["number", "boolean", "date", "category", "empty", "other"]

_ISO_DATE = r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
_DOTTED_DATE = re.compile(r"\s*(\d{1,2})\.(\d{1,2})\.(\d{4})((?: \d{2}:\d{2}(?::\d{2})?)?)\s*")
_MICROSECONDS_OF_A_DAY = 86_400_000_000
_BOOLEANS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
_SUGGESTION = "Leave those cells empty, or correct them."
_IF_MIXED = 'Set those values to NaN, or convert the column by astype("category").'


def column_of(table: pandas.DataFrame, name: str) -> pandas.Series:
    """The column of a table with a name that only one column has."""
    return cast("pandas.Series", table[name])


def kind_of(column: pandas.Series, if_mixed: str = _IF_MIXED) -> Kind:
    """The kind of the values in a column.

    Dates are values of a date type and texts such as 2024-05-31, or 31.05.2024 with the day before
    the month, with or without a time. A column
    of texts that are all numbers is a column of numbers. An ``"empty"`` column has no value;
    columns of lists, dictionaries and complex numbers are ``"other"``.

    Args:
        column: The values.
        if_mixed: The last sentence of the error, which says what to do.

    Raises:
        ArgumentError: Some of the texts are numbers, and others are not.
    """
    import pandas
    from pandas.api import types

    values = column.dropna()
    dtype = values.dtype
    if len(values) == 0:
        return "empty"
    if types.is_bool_dtype(dtype) and not isinstance(dtype, pandas.CategoricalDtype):
        return "boolean"
    if types.is_complex_dtype(dtype):
        return "other"
    if types.is_numeric_dtype(dtype) or types.is_timedelta64_dtype(dtype):
        return "number"
    if types.is_datetime64_any_dtype(dtype):
        return "date"
    if isinstance(dtype, pandas.CategoricalDtype):
        return "category"
    if values.map(lambda value: isinstance(value, bool | np.bool_)).all():
        return "boolean"
    if values.map(lambda value: not np.isscalar(value) and hasattr(value, "__len__")).any():
        return "other"
    return _kind_of_texts(values, if_mixed)


def numbers_of(column: pandas.Series, kind: NumberKind) -> NDArray[np.float64]:
    """The values of a column as numbers, NaN where missing.

    Booleans are 0 and 1, dates days since the first of January 1970 in UTC, durations days.
    """
    import pandas
    from pandas.api import types

    if kind == "date":
        dates = pandas.to_datetime(column.map(_in_iso), errors="coerce", utc=True, format="ISO8601")
        # The default of pandas, nanoseconds, ends in the year 2262.
        microseconds = dates.dt.as_unit("us").astype("int64").where(dates.notna())
        result = microseconds / _MICROSECONDS_OF_A_DAY
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
    _check_finite(column, numbers)
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
    values = zip(column.astype(object), column.isna(), strict=True)
    return np.array([None if missing else _text(value) for value, missing in values], dtype=object)


def _text(value: object) -> str:
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def _kind_of_texts(values: pandas.Series, if_mixed: str) -> Kind:
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


def _to_numeric(column: pandas.Series) -> pandas.Series:
    import pandas
    from pandas.api import types

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


def _check_finite(column: pandas.Series, numbers: NDArray[np.float64]) -> None:
    infinite = np.isinf(numbers)
    if infinite.any():
        rows = ", ".join(_row(row) for row in column.index[infinite][:3])
        got = f"{int(infinite.sum())} infinite values (row {rows})"
        raise ArgumentError(f"column {column.name!r}", got, "finite numbers", _SUGGESTION)


def _row(label: object) -> str:
    """The number of a row for the user: from 1, without the line of column names."""
    return str(int(label) + 1) if isinstance(label, int | np.integer) else str(label)


@dataclass(frozen=True)
class NumberColumn:
    """A column that becomes a number: booleans 0 and 1, dates days since 1970.

    Attributes:
        name: Name of the column.
        kind: Kind of its values.
        fill: The number in place of a missing value; a second input is then 1 where values are
            missing. None if a missing value stays NaN.
        codes: Numbers that stand for a missing value.
        limits: The least and the largest value; others are moved there. None for no limits.
        note: A sentence on codes or limits.
    """

    name: str
    kind: NumberKind = "number"
    fill: float | None = None
    codes: tuple[float, ...] = ()
    limits: tuple[float, float] | None = None
    note: str = ""

    @property
    def has_missing(self) -> bool:
        """Whether rows with missing values are encoded."""
        return self.fill is not None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that the column becomes."""
        return (self.name,) if self.fill is None else (self.name, f"{self.name} is missing")

    def lacks(self, column: pandas.Series) -> NDArray[np.bool_]:
        """Which values are missing, ``(n,)``."""
        return np.isnan(replace(self, fill=None).encode(column)[:, 0])

    def encode(self, column: pandas.Series) -> NDArray[np.float64]:
        """Inputs ``(n, k)``, NaN in rows that cannot be encoded."""
        numbers = numbers_of(column, self.kind)
        numbers = np.where(np.isin(numbers, self.codes), np.nan, numbers)
        if self.limits is not None:
            numbers = numbers.clip(*self.limits)
        if self.fill is None:
            return numbers[:, None]
        missing = np.isnan(numbers)
        return np.column_stack([np.where(missing, self.fill, numbers), missing])


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories: one input for each level, which is 1 where the value is that level.

    A value that is not among the levels has zeros everywhere.

    Attributes:
        name: Name of the column.
        levels: The levels.
        has_missing: Whether a missing value counts as one more level, the last; if not, rows with
            missing values are not encoded.
    """

    name: str
    levels: tuple[str, ...]
    has_missing: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that the column becomes."""
        names = tuple(f"{self.name} = {level}" for level in self.levels)
        return (*names, f"{self.name} is missing") if self.has_missing else names

    def lacks(self, column: pandas.Series) -> NDArray[np.bool_]:
        """Which values are missing, ``(n,)``."""
        return column.isna().to_numpy()

    def encode(self, column: pandas.Series) -> NDArray[np.float64]:
        """Inputs ``(n, k)``, NaN in rows that cannot be encoded."""
        texts = texts_of(column)
        levels = np.array(self.levels, dtype=object)
        inputs = (texts[:, None] == levels).astype(np.float64)
        missing = column.isna().to_numpy()
        if self.has_missing:
            return np.column_stack([inputs, missing])
        inputs[missing] = np.nan
        return inputs

    def unknown(self, column: pandas.Series) -> dict[str, int]:
        """Values that are not among the levels, and how many rows have each of them."""
        counts = Counter(text for text in texts_of(column) if text is not None)
        return {level: count for level, count in counts.items() if level not in self.levels}


def columns_of(stored: Iterable[Mapping[str, Any]]) -> tuple[NumberColumn | CategoryColumn, ...]:
    """The columns that ``asdict`` made mappings of, perhaps with lists for tuples."""
    made: list[NumberColumn | CategoryColumn] = []
    for one in stored:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in one.items()
        }
        made.append(CategoryColumn(**values) if "levels" in one else NumberColumn(**values))
    return tuple(made)


def category_places(columns: Iterable[NumberColumn | CategoryColumn]) -> list[list[int]]:
    """For each category the places of its levels among the inputs of all columns."""
    found, start = [], 0
    for column in columns:
        end = start + len(column.inputs)
        if isinstance(column, CategoryColumn):
            found.append(list(range(start, end)))
        start = end
    return found


def fit_column(
    column: pandas.Series, kind: Kind, least_missing: float | None, most_levels: int | None = None
) -> NumberColumn | CategoryColumn:
    """How a column of training rows becomes inputs.

    Numbers far from all others are codes for missing values, or wild (:func:`unusual_values`).
    Where so many values as ``least_missing`` are missing, and at least one, they are replaced and
    marked by an input: numbers and dates by their median, booleans by the more frequent value; a
    missing category is a level of its own. With None they stay missing. Of a category the
    ``most_levels`` that most rows have become inputs.
    """
    name = str(column.name)

    def fills(count: int) -> bool:
        return least_missing is not None and count >= max(1, least_missing)

    if kind == "category":
        counts = Counter(text for text in texts_of(column) if text is not None)
        ranked = sorted(counts, key=lambda text: (-counts[text], text))
        has_missing = fills(int(column.isna().sum()))
        return CategoryColumn(name, tuple(sorted(ranked[:most_levels])), has_missing)
    assert kind in ("number", "boolean", "date")
    numbers = numbers_of(column, kind)
    made = NumberColumn(name, kind)
    if kind != "boolean":
        made = _robust(made, numbers)
    known = made.encode(column)[:, 0]
    if not fills(int(np.isnan(known).sum())):
        return made
    middle = float(np.nanmedian(known))
    return replace(made, fill=float(middle >= 0.5) if kind == "boolean" else middle)


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
        numbers_out = np.where(upper, np.arange(1, len(values)), np.arange(len(values) - 1, 0, -1))
        nines = numbers_out == 1
        nines &= np.where(upper, _are_nines(values[:1]), _are_nines(values[-1:]))
        far = (ranges > 0) & (2 * out < total) & (gaps / np.where(nines, 1.0, _FAR) > ranges)
        if not far.any():
            break
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


def _robust(column: NumberColumn, numbers: NDArray[np.float64]) -> NumberColumn:
    """The column with its codes, its limits where numbers are beyond them, and a note on both."""
    codes, limits = unusual_values(numbers)
    if limits is None:
        return column
    least, most = limits
    said = [
        f"{int((numbers == code).sum())} values are {code:g}, taken for missing" for code in codes
    ]
    beyond = numbers[((numbers < least) | (numbers > most)) & ~np.isin(numbers, codes)]
    if len(beyond):
        values = "1 value is" if len(beyond) == 1 else f"{len(beyond)} values are"
        far = beyond[np.abs(beyond).argmax()]
        said.append(f"{values} moved to the nearest of the others, {far:g} the farthest")
    note = f"Column {column.name!r}: {', '.join(said)}; all others lie from {least:g} to {most:g}."
    return replace(column, codes=codes, limits=limits if len(beyond) else None, note=note)
