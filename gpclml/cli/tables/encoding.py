"""How a table becomes inputs and targets: made once from training rows, saved with a model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpclml._utils.files import write_atomically
from gpclml.cli.tables.columns import CategoryColumn, NumberColumn
from gpclml.cli.tables.kinds import column_of, numbers_of
from gpclml.errors import ArgumentError, DataError, UnknownNameError

if TYPE_CHECKING:
    import pandas

__all__ = ["EncodedRows", "TableEncoding"]

_FORMAT, _VERSION = "gpclml.TableEncoding", 1
_MOST_TOLD = 20  # names of columns


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Rows of a table as inputs.

    Attributes:
        inputs: Of the rows that could be encoded, ``(m, d)``, float64.
        rows: Which rows of the table these are, counted from 0, ``(m,)``.
        missing: Columns for whose missing values other rows could not be encoded, and how many
            each has.
        unknown: Columns with levels that are not known, and how many rows have each level.
    """

    inputs: Tensor
    rows: Tensor
    missing: Mapping[str, int]
    unknown: Mapping[str, Mapping[str, int]]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be told of the rows, a sentence each."""
        said = [
            f"Column {name!r}: {count} {_values(count)} missing, which no training row was."
            for name, count in self.missing.items()
        ]
        for name, levels in self.unknown.items():
            shown = ", ".join(f"{level!r} ({count})" for level, count in list(levels.items())[:5])
            more = f" and {len(levels) - 5} others" if len(levels) > 5 else ""
            said.append(f"Column {name!r}: levels that no training row has: {shown}{more}.")
        return tuple(said)


@dataclass(frozen=True)
class TableEncoding:
    """What makes inputs and targets of a table, as :func:`fit_encoding` gives it.

    Attributes:
        target: Name of the column that is predicted.
        columns: The columns that are inputs, and how.
        left_out: Columns that are none, and why.
        missing: Texts that stand for a missing value, as for :func:`read_table`.
        notes: Further sentences on the columns.
    """

    target: str
    columns: tuple[NumberColumn | CategoryColumn, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, d of them."""
        return tuple(name for column in self.columns for name in column.inputs)

    def encode(self, table: pandas.DataFrame) -> EncodedRows:
        """The inputs of rows.

        Args:
            table: Rows with the columns of this encoding; others are not looked at.

        Raises:
            ArgumentError: A column is not there, or one of numbers has other values, or infinite
                ones.
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
            UnknownNameError: The column is not there.
            ArgumentError: It has values that are no numbers, or infinite ones.
        """
        if self.target not in table.columns:
            raise UnknownNameError("target", self.target, map(str, table.columns))
        return torch.from_numpy(np.array(numbers_of(column_of(table, self.target), "number")))

    def tensors(self, table: pandas.DataFrame) -> tuple[Tensor, Tensor]:
        """Inputs ``(m, d)`` and targets ``(m,)`` of the rows that have all of them, float64.

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
        """The encoding as text."""
        columns = [
            {"as": "category" if isinstance(column, CategoryColumn) else "number", **asdict(column)}
            for column in self.columns
        ]
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self), "columns": columns}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the encoding to a JSON file.

        Args:
            path: The file; replaced if it is there, whole or not at all.
        """
        content = self.to_json().encode()
        write_atomically(path, lambda file: file.write(content))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TableEncoding:
        """Reads what :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            DataError: It is missing, damaged, or no such file.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if (content["format"], content["version"]) != (_FORMAT, _VERSION):
                raise ValueError(f"format {content['format']} {content['version']}")
            return cls(
                target=content["target"],
                columns=tuple(_column(part) for part in content["columns"]),
                left_out=content["left_out"],
                missing=tuple(content["missing"]),
                notes=tuple(content["notes"]),
            )
        except FileNotFoundError as error:
            raise DataError(f"There is no file {path}. Check the path.") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            mend = "Write it again, with this release."
            raise DataError(f"{path} is damaged or no table encoding ({error}). {mend}") from error


def _column(part: Mapping[str, Any]) -> NumberColumn | CategoryColumn:
    if part["as"] == "number":
        return NumberColumn(part["name"], part["kind"], part["fill"])
    return CategoryColumn(part["name"], tuple(part["levels"]), part["has_missing"])


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


def _values(count: int) -> str:
    return "value is" if count == 1 else "values are"
