"""From an original UCI file to numbers."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import torch

from gpclml.datasets.regression_data import RegressionData
from gpclml.datasets.sources import UciSource
from gpclml.errors import DataError

_DELIMITERS = {"comma": ",", "whitespace": None}
_MEND = "The registry's entry does not describe this file: please report it."


def read_table(path: Path, source: UciSource) -> RegressionData:
    """The data set that a file holds; a name ending in ``.gz`` is decompressed.

    Raises:
        DataError: The file is no table of numbers, or not of the registered n and d, or
            has values that are not finite.
    """
    table = _numbers(path, source)
    num_columns = table.shape[1]
    target = source.target_column
    if target < 0:
        target += num_columns
    has_target = target < num_columns
    if not has_target or (len(table), target) != (source.num_data, source.num_features):
        raise DataError(
            f"{path}: found {len(table)} rows of {num_columns} columns, expected "
            f"{source.num_data} rows with {source.num_features} features before target column "
            f"{source.target_column}. {_MEND}"
        )
    table = table[:, : target + 1]
    if not np.isfinite(table).all():
        row, column = np.argwhere(~np.isfinite(table))[0]
        raise DataError(
            f"{path}: found {table[row, column]} in row {row}, column {column} (from 0, without "
            f"header), expected finite numbers. {_MEND}"
        )
    return RegressionData(
        name=source.name,
        inputs=torch.tensor(table[:, :target]),
        targets=torch.tensor(table[:, target]),
        note=source.note,
        source=source.address,
        licence=source.licence,
    )


def _numbers(path: Path, source: UciSource) -> np.ndarray:
    try:
        return np.loadtxt(
            path,
            dtype=np.float64,
            delimiter=_DELIMITERS[source.delimiter],
            skiprows=source.header_lines,
            comments=None,
            ndmin=2,
        )
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a table of numbers ({error}). {_MEND}") from error
