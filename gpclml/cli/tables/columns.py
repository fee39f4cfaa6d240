"""Columns of a table as inputs of a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpclml.cli.tables.kinds import NumberKind, numbers_of, texts_of

if TYPE_CHECKING:
    import pandas
    from numpy.typing import NDArray

__all__ = ["CategoryColumn", "NumberColumn"]


@dataclass(frozen=True)
class NumberColumn:
    """A column that is a number: as it is, booleans as 0 and 1, dates as days since 1970.

    Attributes:
        name: Of the column.
        kind: What its values are.
        fill: What stands for missing values, beside an input that is 1 where they are missing;
            None if rows with missing values are not encoded.
    """

    name: str
    kind: NumberKind = "number"
    fill: float | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs it becomes."""
        return (self.name,) if self.fill is None else (self.name, f"{self.name} is missing")

    def encode(self, column: pandas.Series) -> NDArray[np.float64]:
        """Inputs ``(n, k)``, NaN in rows that cannot be encoded.

        Args:
            column: Values, ``(n,)``.

        Raises:
            ArgumentError: Values are of another kind, or infinite.
        """
        numbers = numbers_of(column, self.kind)
        if self.fill is None:
            return numbers[:, None]
        missing = np.isnan(numbers)
        return np.column_stack([np.where(missing, self.fill, numbers), missing])


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories: an input a level, 1 where the value is that level.

    A level that is not known has zeros everywhere.

    Attributes:
        name: Of the column.
        levels: The known levels.
        has_missing: Whether missing values are a level of their own, the last; if not, rows with
            missing values are not encoded.
    """

    name: str
    levels: tuple[str, ...]
    has_missing: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs it becomes."""
        names = tuple(f"{self.name} = {level}" for level in self.levels)
        return (*names, f"{self.name} is missing") if self.has_missing else names

    def encode(self, column: pandas.Series) -> NDArray[np.float64]:
        """Inputs ``(n, k)``, NaN in rows that cannot be encoded.

        Args:
            column: Values, ``(n,)``.
        """
        texts = texts_of(column)
        levels = np.array(self.levels, dtype=object)
        inputs = (texts[:, None] == levels).astype(np.float64)
        missing = column.isna().to_numpy()
        if self.has_missing:
            return np.column_stack([inputs, missing])
        inputs[missing] = np.nan
        return inputs

    def unknown(self, column: pandas.Series) -> dict[str, int]:
        """Levels that are not known, and how many rows have them.

        Args:
            column: Values, ``(n,)``.
        """
        counts = Counter(text for text in texts_of(column) if text is not None)
        return {level: count for level, count in counts.items() if level not in self.levels}
