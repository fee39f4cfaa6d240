"""How a table becomes inputs and targets: decided on training rows, saved with a model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml._utils.files import write_atomically
from gpclml.datasets.columns import (
    CategoryColumn,
    Kind,
    NumberColumn,
    column_of,
    columns_of,
    fit_column,
    numbers_of,
    texts_of,
)
from gpclml.datasets.copies import copied_rows
from gpclml.errors import ArgumentError, DataError, UnknownNameError
from gpclml.tables.reading import kind_in_file

if TYPE_CHECKING:
    import pandas

__all__ = [
    "FEW_MISSING",
    "EncodedRows",
    "TableEncoding",
    "check_columns",
    "drop_copies",
    "fit_encoding",
]

_FORMAT, _VERSION = "gpclml.TableEncoding", 1
_MOST_TOLD = 20  # names of columns


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Rows of a table as inputs.

    Attributes:
        inputs: Inputs of the rows that could be encoded, ``(m, d)``, float64.
        rows: Numbers of these rows in the table, from 0, ``(m,)``.
        missing: Number of missing values by column, of columns whose missing values cannot be
            encoded.
        unknown: By column, the values that are not among its levels, and how many rows have each.
    """

    inputs: Tensor
    rows: Tensor
    missing: Mapping[str, int]
    unknown: Mapping[str, Mapping[str, int]]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user on missing values and unknown levels."""
        said = []
        for name, count in self.missing.items():
            values = "value is" if count == 1 else "values are"
            said.append(f"Column {name!r}: {count} {values} missing; such rows are left out.")
        for name, levels in self.unknown.items():
            shown = ", ".join(f"{level!r} ({count})" for level, count in list(levels.items())[:5])
            more = f" and {len(levels) - 5} others" if len(levels) > 5 else ""
            said.append(f"Column {name!r}: levels that no training row has: {shown}{more}.")
        return tuple(said)


@dataclass(frozen=True)
class TableEncoding:
    """How a table becomes inputs and targets, as :func:`fit_encoding` decides it.

    Attributes:
        target: Name of the column that is predicted.
        columns: The columns that become inputs, and how.
        left_out: The columns that do not, and why.
        missing: Texts that stand for a missing value, as for :func:`read_table`.
        notes: Further sentences on the columns.
        decimal: The decimal mark of the table, as for :func:`read_table`.
    """

    target: str
    columns: tuple[NumberColumn | CategoryColumn, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    decimal: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the d inputs."""
        return tuple(name for column in self.columns for name in column.inputs)

    def encode(self, table: pandas.DataFrame) -> EncodedRows:
        """Encodes rows as inputs.

        Args:
            table: Rows with the columns of this encoding; other columns are ignored.

        Raises:
            ArgumentError: A column is missing, or a column of numbers has other or infinite values.
        """
        _check_there(self.columns, table)
        parts, missing, unknown = [np.empty((len(table), 0))], {}, {}
        for column in self.columns:
            values = column_of(table, column.name)
            part = column.encode(values)
            lost = int(np.isnan(part).any(1).sum())
            if lost:
                missing[column.name] = lost
            if isinstance(column, CategoryColumn) and (levels := column.unknown(values)):
                unknown[column.name] = levels
            parts.append(part)
        inputs = torch.from_numpy(np.hstack(parts))
        rows = (~inputs.isnan().any(1)).nonzero()[:, 0]
        return EncodedRows(inputs[rows], rows, missing, unknown)

    def targets(self, table: pandas.DataFrame) -> Tensor:
        """The targets of rows, NaN where missing, ``(n,)``, float64.

        Args:
            table: Rows with the target's column.

        Raises:
            UnknownNameError: The table does not have the column.
            ArgumentError: The column has values that are no numbers, or infinite ones.
        """
        if self.target not in table.columns:
            raise UnknownNameError("target", self.target, map(str, table.columns))
        return torch.from_numpy(np.array(numbers_of(column_of(table, self.target), "number")))

    def tensors(self, table: pandas.DataFrame) -> tuple[Tensor, Tensor]:
        """Inputs ``(m, d)`` and targets ``(m,)`` of the rows without missing values, float64.

        Args:
            table: Rows with the columns of this encoding and the target.

        Raises:
            UnknownNameError, ArgumentError: As for :meth:`encode` and :meth:`targets`.
        """
        encoded = self.encode(table)
        targets = self.targets(table)[encoded.rows]
        observed = ~targets.isnan()
        return encoded.inputs[observed], targets[observed]

    def to_json(self) -> str:
        """The encoding as JSON text."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the encoding to a JSON file.

        Args:
            path: The file, which is replaced as a whole if it is there.
        """
        content = self.to_json().encode()
        write_atomically(path, lambda file: file.write(content))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TableEncoding:
        """Reads a file that :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            DataError: There is no such file, it is damaged, or it is no encoding.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if (content["format"], content["version"]) != (_FORMAT, _VERSION):
                raise ValueError(f"format {content['format']} {content['version']}")
            return cls(
                target=content["target"],
                columns=columns_of(content["columns"]),
                left_out=content["left_out"],
                missing=tuple(content["missing"]),
                notes=tuple(content["notes"]),
                decimal=content.get("decimal", ""),
            )
        except FileNotFoundError as error:
            raise DataError(f"There is no file {path}. Check the path.") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            suggestion = "Write it again, with this release."
            raise DataError(
                f"{path} is damaged or not a table encoding ({error}). {suggestion}"
            ) from error


def _check_there(
    columns: tuple[NumberColumn | CategoryColumn, ...], table: pandas.DataFrame
) -> None:
    lacking = [column.name for column in columns if column.name not in table.columns]
    if lacking:
        there = ", ".join(map(repr, table.columns[:_MOST_TOLD]))
        more = ", ..." if len(table.columns) > _MOST_TOLD else ""
        raise ArgumentError(
            "table",
            f"no column {', '.join(map(repr, lacking[:_MOST_TOLD]))}",
            "all columns that are inputs of the model",
            f"Add or rename columns; there are {there}{more}.",
        )


_MOST_LEVELS = 20  # of a category; columns with more are left out

FEW_MISSING = 0.05
"""If a smaller share of the rows has missing values, these rows are left out; else filled."""

_OTHER_DATE = r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}(?:[T ].*)?"


@checked
def fit_encoding(
    table: pandas.DataFrame,
    target: str,
    *,
    drop: Iterable[str] = (),
    categories: Iterable[str] = (),
    missing: Sequence[str] = (),
    decimal: str = "",
) -> TableEncoding:
    """Decides how the columns of a table become inputs.

    Numbers stay numbers, booleans become 0 and 1, dates become days since 1970, and categories of
    at most 20 levels become one input for each level. Columns are left out if they have no value,
    one value, lists, or texts of more levels; ``left_out`` of the result has the reasons.

    If fewer than 5 % of the rows have missing values, rows with missing values are not encoded,
    neither here nor in other tables. Otherwise missing numbers and dates are replaced by the median
    and booleans by the more frequent value, with a second input that is 1 where the value was
    missing, and a missing category is a level of its own. Numbers such as -999, far from all others
    and there several times, are missing; few others as far are moved to the nearest of the rest
    (``gpclml.datasets.columns.unusual_values``).

    Args:
        table: The training rows.
        target: Name of the column that is predicted.
        drop: Columns to leave out.
        categories: Columns whose values are categories, also where they are numbers.
        missing: Texts that stand for a missing value, kept for :func:`read_table`.
        decimal: The decimal mark, kept likewise.

    Raises:
        UnknownNameError: There is no column of a name.
        ArgumentError: A column has both numbers and other texts, or no column is left.
    """
    drop, categories = tuple(drop), tuple(categories)
    _check_names(table, target, drop, categories)
    kinds: dict[str, Kind] = {}
    left_out = dict.fromkeys(drop, "as asked")
    for name in table.columns:
        if name == target or name in drop:
            continue
        kind = "category" if name in categories else kind_in_file(column_of(table, name))
        reason = _reason_against(column_of(table, name), kind, asked=name in categories)
        if reason:
            left_out[name] = reason
        else:
            kinds[name] = kind
    columns = {name: fit_column(column_of(table, name), kind, 1) for name, kind in kinds.items()}
    lacks = [columns[name].lacks(column_of(table, name)) for name in kinds]
    incomplete = np.any(lacks, axis=0) if lacks else np.zeros(len(table), dtype=bool)
    fills = bool(incomplete.mean() >= FEW_MISSING)
    if not fills:
        table = table.iloc[np.flatnonzero(~incomplete)]
        for name in [name for name in kinds if _is_constant(column_of(table, name))]:
            del kinds[name]
            left_out[name] = "the same value in all rows without missing values"
    if not kinds:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        got = f"no usable column ({reasons or 'there is none beside the target'})"
        suggestion = "Correct one of them, or add another."
        raise ArgumentError("table", got, "at least one column to predict from", suggestion)
    return TableEncoding(
        target=target,
        columns=tuple(
            columns[name] if fills else _without_fill(columns[name], column_of(table, name))
            for name in kinds
        ),
        left_out=left_out,
        missing=tuple(missing),
        decimal=decimal,
        notes=tuple(
            _id_note(name) for name in kinds if _is_like_an_id(column_of(table, name), kinds[name])
        ),
    )


@checked
def drop_copies(
    table: pandas.DataFrame,
    target: str,
    *,
    drop: Iterable[str] = (),
    categories: Iterable[str] = (),
) -> pandas.DataFrame:
    """The rows that are no copies of earlier ones, as by oversampling or a join.

    A copy among the test rows would be predicted from its training row, and a copy among the
    training rows says nothing new. Only columns that become inputs are compared;
    ``gpclml.datasets.copies.copied_rows`` says which equal rows are copies.

    Args:
        table: The rows.
        target: Name of the column that is predicted.
        drop: Columns that are no inputs.
        categories: Columns whose values are categories, also where they are numbers.

    Raises:
        UnknownNameError, ArgumentError: As for :func:`fit_encoding`.
    """
    if target not in table.columns:
        raise UnknownNameError("target", target, map(str, table.columns))
    observed = np.flatnonzero(column_of(table, target).notna())
    known = table.iloc[observed]
    encoding = fit_encoding(known, target, drop=drop, categories=categories)
    encoded = encoding.encode(known)
    targets = encoding.targets(known)[encoded.rows]
    copied = copied_rows(encoded.inputs.numpy(), targets.numpy())
    return table.drop(index=table.index[observed[encoded.rows.numpy()[copied]]])


def _without_fill(
    column: NumberColumn | CategoryColumn, complete: pandas.Series
) -> NumberColumn | CategoryColumn:
    if isinstance(column, NumberColumn):
        return replace(column, fill=None)
    return fit_column(complete, "category", None)


def check_columns(
    table: pandas.DataFrame, target: str, drop: tuple[str, ...], categories: tuple[str, ...]
) -> None:
    """Checks all rows of the columns that may become inputs, before the rows are split."""
    _check_names(table, target, drop, categories)
    for name in table.columns:
        if name not in (target, *drop, *categories):
            column = column_of(table, name)
            kind = kind_in_file(column)
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
    """Why a column does not become an input; empty if it does."""
    if kind == "empty":
        return "no values"
    if kind == "other":
        return "its values are lists or objects"
    if column.isna().mean() < FEW_MISSING and _is_constant(column.dropna()):
        return "the same value in all rows"
    if kind == "category" and not asked:
        levels = {text for text in texts_of(column) if text is not None}
        if len(levels) > _MOST_LEVELS:
            return f"{len(levels)} different texts, more than {_MOST_LEVELS}{_date_hint(column)}"
    return ""


def _is_constant(column: pandas.Series) -> bool:
    return column.nunique(dropna=False) <= 1


def _date_hint(column: pandas.Series) -> str:
    texts = column.dropna().astype(str).str.strip()
    return "; write dates as 2024-05-31" if texts.str.fullmatch(_OTHER_DATE).all() else ""


def _is_like_an_id(column: pandas.Series, kind: Kind) -> bool:
    """Whether a column of different whole numbers is sorted, or is named like an identifier."""
    if kind != "number" or column.isna().any():
        return False
    numbers = numbers_of(column, kind)
    if not (numbers == np.round(numbers)).all() or len(np.unique(numbers)) < len(numbers):
        return False
    steps = np.diff(numbers)
    last = re.split(r"[\s_-]+", str(column.name).lower().strip(" _-"))[-1]
    named = last in ("id", "index", "number", "no", "nr")
    return bool(named or (steps > 0).all() or (steps < 0).all())


def _id_note(name: str) -> str:
    return (
        f"Column {name!r} has another whole number in every row. If it only numbers the rows, "
        f"leave it out: --drop {name!r}."
    )
