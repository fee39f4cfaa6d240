"""Regression data sets by name."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.datasets.sources import UciSource, fetch, uci_source, uci_sources
from gpclml.errors import DataError, ShapeError, UnknownNameError

__all__ = ["EMBEDDED", "RegressionData", "load", "names", "read_table"]

_DELIMITERS = {"comma": ",", "whitespace": None}
_SUGGESTION = "The registry's entry does not describe this file: please report it."


@checked
@dataclass(frozen=True, eq=False)
class RegressionData:
    """A regression data set: inputs and targets in original units, float64, on the CPU.

    They are not standardized, because that must use mean and scale of the training rows only.

    Attributes:
        name: Name of the data set.
        inputs: Shape ``(n, d)``.
        targets: Shape ``(n,)``.
        note: Meaning of the target, and peculiarities of the data.
        source: Origin of the data: a download address, or the package they ship with.
        licence: Licence that the source states.

    Raises:
        ShapeError: The shapes of inputs and targets do not fit each other.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    note: str = ""
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if self.inputs.ndim != 2:
            raise ShapeError("inputs", tuple(self.inputs.shape), "(n, d)")
        expected = (self.inputs.shape[0],)
        if self.targets.shape != expected:
            raise ShapeError(
                "targets", tuple(self.targets.shape), f"{expected}, one for each row of inputs"
            )

    def __repr__(self) -> str:
        rows, columns = self.inputs.shape
        return f"RegressionData({self.name!r}: {rows} rows of {columns} inputs; {self.note})"

    @property
    def num_data(self) -> int:
        """Number of rows, n."""
        return self.inputs.shape[0]

    @property
    def num_features(self) -> int:
        """Number of input columns, d."""
        return self.inputs.shape[1]


def names() -> tuple[str, ...]:
    """Names of the regression data sets that :func:`load` knows, sorted."""
    return tuple(sorted({*uci_sources(), *EMBEDDED}))


@checked
def load(
    name: str, *, folder: str | os.PathLike[str] | None = None, progress: bool | None = None
) -> RegressionData:
    """Loads a regression data set by name from the data folder; a missing file is downloaded.

    ``"diabetes"`` ships with scikit-learn and needs no file. :func:`fetch` says how files are kept
    and checked.

    Args:
        name: One of ``names()``.
        folder: The data folder; UCI files are in ``uci`` under it. None: ``$GPCLML_DATA``,
            else the user's cache.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Raises:
        UnknownNameError: The name is not known; the message lists the nearest names.
        DataError: The file is corrupt, cannot be downloaded or is not that of the registry.
    """
    if not isinstance(name, str) or name not in names():
        raise UnknownNameError("name", name, names())
    if name in EMBEDDED:
        return EMBEDDED[name]()
    return read_table(fetch(name, folder=folder, progress=progress), uci_source(name))


def load_diabetes() -> RegressionData:
    """The diabetes data of scikit-learn (Efron et al. 2004): n = 442, d = 10.

    Inputs and targets are in original units. scikit-learn's default scales the inputs by statistics
    of all rows, through which test rows would leak into the training inputs.
    """
    from sklearn import datasets

    inputs, targets = datasets.load_diabetes(return_X_y=True, scaled=False)
    return RegressionData(
        name="diabetes",
        inputs=torch.as_tensor(inputs, dtype=torch.float64),
        targets=torch.as_tensor(targets, dtype=torch.float64),
        note="target: disease progression one year after baseline; original units",
        source="scikit-learn: sklearn.datasets.load_diabetes(scaled=False)",
        licence="BSD-3-Clause (scikit-learn)",
    )


EMBEDDED = {"diabetes": load_diabetes}
"""Data sets that ship with a dependency: no file, no network."""


def read_table(path: Path, source: UciSource) -> RegressionData:
    """Reads the table of a UCI file; one whose name ends in ``.gz`` is decompressed.

    Raises:
        DataError: The file is not a table of numbers, has other numbers of rows or columns than
            registered, or values that are not finite.
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
            f"{source.target_column}. {_SUGGESTION}"
        )
    table = table[:, : target + 1]
    if not np.isfinite(table).all():
        row, column = np.argwhere(~np.isfinite(table))[0]
        raise DataError(
            f"{path}: found {table[row, column]} in row {row}, column {column} (from 0, without "
            f"header), expected finite numbers. {_SUGGESTION}"
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
        raise DataError(f"{path}: not a table of numbers ({error}). {_SUGGESTION}") from error
