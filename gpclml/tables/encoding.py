"""How the columns of a table become inputs: decided on training rows, the same for new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpclml.errors import ArgumentError
from gpclml.tables.columns import (
    CategoryColumn,
    Kind,
    NumberColumn,
    category_places,
    column_of,
    columns_of,
    fit_column,
)

if TYPE_CHECKING:
    import pandas
    from numpy.typing import NDArray

__all__ = ["MOST_LEVELS", "InputEncoding", "fit_inputs"]

MOST_LEVELS = 50
"""Levels of a category that become inputs."""

_FEW_MISSING, _FEW_MISSING_SHARE = 5, 0.1  # rows from which on what they have in common is learned
_MOST_TOLD = 20  # names of columns


@dataclass(frozen=True)
class InputEncoding:
    """How the columns of a table become inputs; every row becomes a row of numbers.

    ``left_out`` has the columns that are no inputs, and why.
    """

    columns: tuple[NumberColumn | CategoryColumn, ...]
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
        return category_places(self.columns)

    @property
    def notes(self) -> list[str]:
        """Sentences on numbers that are codes for missing values, or far from all others."""
        return [each.note for each in self.columns if isinstance(each, NumberColumn) and each.note]

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
        inputs = [np.empty((len(table), 0))]
        for column in self.columns:
            values = column.encode(column_of(table, names[column.name]))
            if isinstance(column, NumberColumn) and column.has_missing:
                values[values[:, 1] == 1, 0] = np.nan
            inputs.append(values)
        return np.hstack(inputs)

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
        return cls(columns_of(content["columns"]), content["left_out"])


def fit_inputs(table: pandas.DataFrame, kinds: Mapping[Any, Kind]) -> InputEncoding:
    """Decides on training rows how the columns of these kinds become inputs.

    Numbers stay numbers, booleans become 0 and 1, dates days since 1970, and a category one input
    for each of its levels, at most the 50 that most rows have. A missing number is replaced by the
    median, with an input that is 1 where it was missing; a missing category is a level of its own.
    Columns without a value, or of lists, are left out.
    """
    columns, left_out = [], {}
    least = max(_FEW_MISSING, _FEW_MISSING_SHARE * len(table))
    for name, kind in kinds.items():
        if kind == "empty":
            left_out[str(name)] = "no values"
        elif kind == "other":
            left_out[str(name)] = "values that are lists or objects"
        else:
            columns.append(fit_column(column_of(table, name), kind, least, MOST_LEVELS))
    return InputEncoding(tuple(columns), left_out)
