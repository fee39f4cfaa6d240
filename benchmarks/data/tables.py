"""Regression tables by name, and the published splits of their rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Generator, Tensor

from benchmarks.data.files import VARIABLE, data_files, data_folder, fetch
from gpclml._utils.arguments import seeded
from gpclml.errors import DataError, UnknownNameError
from gpclml.tables.data import TableOptions, read_table_data

EMBEDDED = "diabetes"
"""The table that comes with scikit-learn: no file, no network, and no published splits."""


@dataclass(frozen=True, eq=False)
class RegressionData:
    """A regression table: inputs and targets in original units, float64, on the CPU.

    They are not standardized, because that must use mean and scale of the training rows only.

    Attributes:
        inputs: Shape ``(n, d)``.
        targets: Shape ``(n,)``.
        origin: Absolute path and SHA-256 of a file that is not registered, as ``file``, ``sha256``.
        notes: Sentences on rows and columns of such a file that were left out or changed.
    """

    inputs: Tensor
    targets: Tensor
    origin: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def num_data(self) -> int:
        """Number of rows, n."""
        return self.inputs.shape[0]


@dataclass(frozen=True, eq=False)
class TrainTestSplit:
    """Row numbers of a table, from 0, split into training and test rows.

    Attributes:
        train: Training rows, ``(num_train,)``, int64.
        test: Test rows, ``(num_test,)``, int64.
    """

    train: Tensor
    test: Tensor


def split(n: int, seed: int | Generator, test_fraction: float = 0.1) -> TrainTestSplit:
    """A random split of ``n`` rows, of which the fraction, rounded, are test rows."""
    order, num_test = torch.randperm(n, generator=seeded(seed)), round(n * test_fraction)
    return TrainTestSplit(train=order[num_test:], test=order[:num_test])


def subset(train: Tensor, n: int, seed: int | Generator) -> Tensor:
    """Random training rows, ``(n,)``; with one seed those of a larger ``n`` begin with them."""
    return train[torch.randperm(len(train), generator=seeded(seed))[:n]]


def names() -> tuple[str, ...]:
    """Names of the tables that :func:`load` knows, sorted."""
    uci = {name for name, files in data_files().items() if files[0].folder == "uci"}
    return tuple(sorted({*uci, EMBEDDED}))


def load(name: str, file: str | None = None) -> RegressionData:
    """Loads a table from the data folder, downloaded if it is missing, or a file of the user's.

    A file of the user's is encoded as ``gpclml fit`` encodes it: texts become an input for each
    level, dates become days, rows without a target and copies of rows are left out, and other holes
    are filled with what the rest of the row lets expect. Levels and expectations are those of all
    rows, without their targets.

    Args:
        name: One of :func:`names`; or ``"file:target"``, a CSV or Parquet file and a column of it.
        file: Where the file of the user's is, if not there.

    Raises:
        UnknownNameError: The table or column is not known; the message lists the nearest names.
        ArgumentError: A column of the user's file cannot be used; the message names it.
        DataError: The file is not there and cannot be downloaded, is another than the registry's,
            or is not a table.
    """
    if ":" in name:
        path, _, target = name.rpartition(":")
        located = Path(file or path).absolute()
        # Two values are numbers here too.
        options = TableOptions(located, target, rows=sys.maxsize, task="regression")
        table = read_table_data(options, tests=False)
        origin = {"file": str(located), "sha256": table.sha256}
        return RegressionData(*table.train, origin, table.notes)
    if name == EMBEDDED:  # scaled by statistics of all rows, training inputs would see test rows
        inputs, targets = load_diabetes(return_X_y=True, scaled=False)
        return RegressionData(torch.tensor(inputs), torch.tensor(targets))
    if name not in names():
        raise UnknownNameError("name", name, names())
    [entry], [path] = data_files()[name], fetch(name)
    delimiter = "," if ".csv" in entry.file else None
    table = np.loadtxt(path, delimiter=delimiter, skiprows=entry.header_lines, ndmin=2)
    d = entry.num_features
    return RegressionData(torch.tensor(table[:, :d]), torch.tensor(table[:, d]))


def load_published_split(name: str, index: int) -> TrainTestSplit:
    """Loads a published split of a table from ``uci/splits/NAME.npz`` in the data folder.

    The file's keys are ``train_k`` and ``test_k``, k from 0, with row numbers from 0.

    Raises:
        DataError: The file is missing, or the split does not divide the rows of the table.
    """
    path = data_folder() / "uci" / "splits" / f"{name}.npz"
    if not path.is_file():
        raise DataError(
            f"{path}: no such file, so there are no published splits at hand. It has the numbers "
            f"in index_train_k.txt and index_test_k.txt beside {data_files()[name][0].address} as "
            f"arrays train_k and test_k. Put it there, or name its data folder by {VARIABLE}."
        )
    with np.load(path) as arrays:
        train, test = (torch.tensor(arrays[f"{side}_{index}"]).long() for side in ("train", "test"))
    rows = torch.arange(data_files()[name][0].num_data)
    if not torch.equal(torch.cat([train, test]).sort().values, rows):
        raise DataError(f"{path}: train_{index} and test_{index} do not divide {len(rows)} rows.")
    return TrainTestSplit(train=train, test=test)
