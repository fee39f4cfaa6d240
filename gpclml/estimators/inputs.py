"""Arrays and data frames as inputs of a stack, as training rows decide."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpclml._utils.arguments import callers_level
from gpclml.datasets.columns import (
    CategoryColumn,
    NumberColumn,
    category_places,
    column_of,
    columns_of,
    fit_column,
    kind_of,
)
from gpclml.errors import ArgumentError

if TYPE_CHECKING:
    import pandas
    from numpy.typing import NDArray

__all__ = ["InputEncoding", "check_names", "fit_inputs", "is_frame"]

_MOST_LEVELS = 50  # of a category


@dataclass(frozen=True)
class InputEncoding:
    """How the columns of a table become inputs; every row becomes a row of numbers.

    ``fills`` has for each input the median of the training rows, which stands for a value that is
    missing where none was missing among them; ``left_out`` the columns that are no inputs, and why.
    """

    columns: tuple[NumberColumn | CategoryColumn, ...]
    fills: tuple[float, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def categories(self) -> list[list[int]]:
        """For each category the places of its levels among the inputs."""
        return category_places(self.columns)

    def encode(self, table: pandas.DataFrame) -> NDArray[np.float64]:
        """The inputs of rows, ``(n, d)``; a level that no training row has is zero everywhere."""
        encoded = np.hstack(_encoded(self.columns, table))
        return np.where(np.isnan(encoded), np.array(self.fills), encoded)

    def to_content(self) -> dict[str, Any]:
        """All of it in lists and primitives."""
        return asdict(self)

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> InputEncoding:
        """What :meth:`to_content` gave; a KeyError or TypeError if it is something else."""
        columns = columns_of(content["columns"])
        return cls(columns, tuple(content["fills"]), content["left_out"])


def is_frame(X: object) -> bool:
    """Whether it is a data frame of pandas."""
    pandas = sys.modules.get("pandas")  # without it nothing can be one
    return pandas is not None and isinstance(X, pandas.DataFrame)


def check_names(table: pandas.DataFrame) -> None:
    """Refuses a data frame in which two columns have one name."""
    names = [str(name) for name in table.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        got = f"several columns named {', '.join(map(repr, twice))}"
        raise ArgumentError("X", got, "columns of different names")


def fit_inputs(table: pandas.DataFrame, kinds: str | None = None) -> InputEncoding:
    """Decides on training rows how columns become inputs; ``kinds`` is that of all, if known.

    Numbers stay numbers, booleans become 0 and 1, dates days since 1970, and a category one input
    for each of its levels, at most the 50 that most rows have. A missing number is replaced by the
    median, with an input that is 1 where it was missing; a missing category is a level of its own.
    Columns of one value, or of lists, are left out, with a warning.
    """
    columns, left_out = [], {}
    for name in table.columns:
        column = column_of(table, name)
        kind = kind_of(column) if kinds is None or column.isna().all() else kinds
        if kind in ("empty", "other"):
            left_out[str(name)] = "no values" if kind == "empty" else "values that are lists"
        else:
            columns.append(fit_column(column, kind, fills=True, most_levels=_MOST_LEVELS))  # pyright: ignore[reportArgumentType]
    if left_out:
        said = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        message = f"Columns that are no inputs: {said}."
        warnings.warn(message, UserWarning, stacklevel=callers_level())
    if not columns:
        got = f"no usable column of {table.shape[1]}"
        raise ArgumentError("X", got, "at least one column to predict from")
    fills: list[float] = []
    for column, encoded in zip(columns, _encoded(columns, table), strict=True):
        of_numbers = isinstance(column, NumberColumn)
        # A category that is missing is like a level that no training row has.
        fills += np.nanmedian(encoded, axis=0).tolist() if of_numbers else [0.0] * encoded.shape[1]
    return InputEncoding(tuple(columns), tuple(fills), left_out)


def _encoded(
    columns: Sequence[NumberColumn | CategoryColumn], table: pandas.DataFrame
) -> list[NDArray[np.float64]]:
    by_name = {str(name): name for name in table.columns}
    return [column.encode(column_of(table, by_name[column.name])) for column in columns]
