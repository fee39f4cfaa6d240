"""What the columns of a table hold, and the inputs of a model that they become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from gpclml.errors import ArgumentError

if TYPE_CHECKING:
    import pandas
    from numpy.typing import NDArray

__all__ = [
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
]

NumberKind = Literal["number", "boolean", "date"]
Kind = Literal["number", "boolean", "date", "category", "empty", "other"]

_ISO_DATE = r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
_MICROSECONDS_OF_A_DAY = 86_400_000_000
_BOOLEANS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
_SUGGESTION = "Leave those cells empty, or correct them."
_IF_MIXED = 'Set those values to NaN, or convert the column by astype("category").'


def column_of(table: pandas.DataFrame, name: str) -> pandas.Series:
    """The column of a table with a name that only one column has."""
    return cast("pandas.Series", table[name])


def kind_of(column: pandas.Series, if_mixed: str = _IF_MIXED) -> Kind:
    """The kind of the values in a column.

    Dates are values of a date type and texts such as 2024-05-31, with or without a time. A column
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
        dates = pandas.to_datetime(column, errors="coerce", utc=True, format="ISO8601")
        # The default of pandas, nanoseconds, ends in the year 2262.
        microseconds = dates.dt.as_unit("us").astype("int64").where(dates.notna())
        result = microseconds / _MICROSECONDS_OF_A_DAY
        expected = "dates such as 2024-05-31"
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
    if texts.str.fullmatch(_ISO_DATE).all():
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
            missing. None if rows with missing values are not encoded.
    """

    name: str
    kind: NumberKind = "number"
    fill: float | None = None

    @property
    def has_missing(self) -> bool:
        """Whether rows with missing values are encoded."""
        return self.fill is not None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that the column becomes."""
        return (self.name,) if self.fill is None else (self.name, f"{self.name} is missing")

    def encode(self, column: pandas.Series) -> NDArray[np.float64]:
        """Inputs ``(n, k)``, NaN in rows that cannot be encoded."""
        numbers = numbers_of(column, self.kind)
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
    return tuple(
        CategoryColumn(**{**one, "levels": tuple(one["levels"])})
        if "levels" in one
        else NumberColumn(**one)
        for one in stored
    )


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
    column: pandas.Series, kind: Kind, fills: bool, most_levels: int | None = None
) -> NumberColumn | CategoryColumn:
    """How a column of training rows becomes inputs.

    With ``fills`` missing values, if there are some, are replaced and marked by an input: of
    numbers and dates by their median, of booleans by the more frequent value; a missing category is
    a level of its own. Of a category the ``most_levels`` that most rows have become inputs.
    """
    name = str(column.name)
    fills = fills and bool(column.isna().any())
    if kind == "category":
        counts = Counter(text for text in texts_of(column) if text is not None)
        ranked = sorted(counts, key=lambda text: (-counts[text], text))
        return CategoryColumn(name, tuple(sorted(ranked[:most_levels])), fills)
    assert kind in ("number", "boolean", "date")
    if not fills:
        return NumberColumn(name, kind)
    numbers = numbers_of(column, kind)
    middle = float(np.nanmedian(numbers))
    return NumberColumn(name, kind, float(middle >= 0.5) if kind == "boolean" else middle)
