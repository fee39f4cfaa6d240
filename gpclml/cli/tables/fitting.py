"""Which columns of a table become inputs, and how: decided on training rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpclml._utils.arguments import checked
from gpclml.cli.tables.columns import CategoryColumn, NumberColumn
from gpclml.cli.tables.encoding import TableEncoding
from gpclml.cli.tables.kinds import Kind, column_of, kind_of, numbers_of, texts_of
from gpclml.errors import ArgumentError, UnknownNameError

if TYPE_CHECKING:
    import pandas

__all__ = ["FEW_MISSING", "MOST_LEVELS", "check_columns", "fit_encoding"]

MOST_LEVELS = 20
"""Levels of a category above which it is left out."""

FEW_MISSING = 0.05
"""Share of rows with missing values below which these rows are left out, not filled."""

_OTHER_DATE = r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}(?:[T ].*)?"


@checked
def fit_encoding(
    table: pandas.DataFrame,
    target: str,
    *,
    drop: Iterable[str] = (),
    categories: Iterable[str] = (),
    missing: Sequence[str] = (),
) -> TableEncoding:
    """How the columns of these rows become inputs.

    Numbers stay numbers, booleans become 0 and 1, dates days since 1970, categories of at most 20
    levels an input a level. Left out are columns without values, with one value, with lists, and
    texts of more levels; ``left_out`` of the result has the reasons. Where fewer than 5 % of the
    rows lack values they are not encoded, neither here nor in other tables. Otherwise missing
    numbers and dates are filled by the median, booleans by the more frequent value, each beside an
    input that is 1 where they are missing, and a missing category is a level of its own.

    Args:
        table: Training rows.
        target: The column that is predicted.
        drop: Columns to leave out.
        categories: Columns whose values are categories, also where they are numbers.
        missing: Texts that stand for a missing value, kept for :func:`read_table`.

    Raises:
        UnknownNameError: A name is of no column.
        ArgumentError: A column has numbers and other texts, or no column is left.
    """
    drop, categories = tuple(drop), tuple(categories)
    _check_names(table, target, drop, categories)
    kinds: dict[str, Kind] = {}
    left_out = dict.fromkeys(drop, "as asked")
    for name in table.columns:
        if name == target or name in drop:
            continue
        kind = "category" if name in categories else kind_of(column_of(table, name))
        reason = _reason_against(column_of(table, name), kind, asked=name in categories)
        if reason:
            left_out[name] = reason
        else:
            kinds[name] = kind
    lacks = [column_of(table, name).isna().to_numpy() for name in kinds]
    incomplete = np.any(lacks, axis=0) if lacks else np.zeros(len(table), dtype=bool)
    fills = bool(incomplete.mean() >= FEW_MISSING)
    if not fills:
        table = table.iloc[np.flatnonzero(~incomplete)]
        for name in [name for name in kinds if _is_constant(column_of(table, name))]:
            del kinds[name]
            left_out[name] = "the same value in all rows that have all values"
    if not kinds:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        got = f"no usable column ({reasons or 'there is none beside the target'})"
        mend = "Put one of them right, or add another."
        raise ArgumentError("table", got, "at least one column to predict from", mend)
    return TableEncoding(
        target=target,
        columns=tuple(_fitted(column_of(table, name), kind, fills) for name, kind in kinds.items()),
        left_out=left_out,
        missing=tuple(missing),
        notes=tuple(
            _id_note(name) for name in kinds if _is_like_an_id(column_of(table, name), kinds[name])
        ),
    )


@checked
def check_columns(
    table: pandas.DataFrame,
    target: str,
    *,
    drop: Iterable[str] = (),
    categories: Iterable[str] = (),
) -> None:
    """Raises where a column can be no input, so that it is told of all rows before they are parted.

    Args:
        table: All rows.
        target: The column that is predicted, which is not looked at.
        drop: Columns to leave out.
        categories: Columns whose values are categories.

    Raises:
        UnknownNameError: A name is of no column.
        ArgumentError: A column has numbers and other texts, or infinite values.
    """
    drop, categories = tuple(drop), tuple(categories)
    _check_names(table, target, drop, categories)
    for name in table.columns:
        if name not in (target, *drop, *categories):
            column = column_of(table, name)
            kind = kind_of(column)
            if kind in ("number", "boolean", "date"):
                numbers_of(column, kind)


def _check_names(
    table: pandas.DataFrame, target: str, drop: tuple[str, ...], categories: tuple[str, ...]
) -> None:
    for argument, names in (("drop", drop), ("categories", categories)):
        for name in names:
            if name not in table.columns:
                raise UnknownNameError(argument, name, map(str, table.columns))
            if name == target:
                raise ArgumentError(argument, repr(name), "a column that is not the target")


def _reason_against(column: pandas.Series, kind: Kind, asked: bool) -> str:
    """Why a column is no input; empty if it is one."""
    if kind == "empty":
        return "no values"
    if kind == "other":
        return "its values are lists or such"
    if column.isna().mean() < FEW_MISSING and _is_constant(column.dropna()):
        return "the same value in all rows"
    if kind == "category" and not asked:
        levels = {text for text in texts_of(column) if text is not None}
        if len(levels) > MOST_LEVELS:
            return f"{len(levels)} different texts, more than {MOST_LEVELS}{_date_hint(column)}"
    return ""


def _is_constant(column: pandas.Series) -> bool:
    return column.nunique(dropna=False) <= 1


def _date_hint(column: pandas.Series) -> str:
    texts = column.dropna().astype(str).str.strip()
    return "; write dates as 2024-05-31" if texts.str.fullmatch(_OTHER_DATE).all() else ""


def _fitted(column: pandas.Series, kind: Kind, fills: bool) -> NumberColumn | CategoryColumn:
    name = str(column.name)
    fills = fills and bool(column.isna().any())
    if kind == "category":
        levels = sorted({text for text in texts_of(column) if text is not None})
        return CategoryColumn(name, tuple(levels), fills)
    assert kind in ("number", "boolean", "date")
    if not fills:
        return NumberColumn(name, kind)
    numbers = numbers_of(column, kind)
    middle = float(np.nanmedian(numbers))
    return NumberColumn(name, kind, float(middle >= 0.5) if kind == "boolean" else middle)


def _is_like_an_id(column: pandas.Series, kind: Kind) -> bool:
    """Whether whole numbers, each there once, are in order or have an identifier's name."""
    if kind != "number" or column.isna().any():
        return False
    numbers = numbers_of(column, kind)
    if not (numbers == np.round(numbers)).all() or len(np.unique(numbers)) < len(numbers):
        return False
    before, after = numbers[:-1], numbers[1:]
    words = str(column.name).lower().replace("_", " ").replace("-", " ").split()
    return bool(
        (before < after).all() or (before > after).all() or (words and words[-1] in _ID_NAMES)
    )


_ID_NAMES = ("id", "index", "number", "no", "nr")


def _id_note(name: str) -> str:
    return (
        f"Column {name!r} has another whole number in every row. If it only numbers the rows, "
        f"leave it out: --drop {name!r}."
    )
