"""Regression tables by name, and the published splits of their rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Generator, Tensor

from benchmarks.data.files import VARIABLE, data_files, data_folder, fetch
from gpclml._utils.arguments import seeded
from gpclml.errors import DataError, UnknownNameError

__all__ = [
    "EMBEDDED",
    "RegressionData",
    "TrainTestSplit",
    "load",
    "load_published_split",
    "names",
    "split",
    "subset",
]

EMBEDDED = "diabetes"
"""The table that comes with scikit-learn: no file, no network, and no published splits."""


@dataclass(frozen=True, eq=False)
class RegressionData:
    """A regression table: inputs and targets in original units, float64, on the CPU.

    They are not standardized, because that must use mean and scale of the training rows only.

    Attributes:
        inputs: Shape ``(n, d)``.
        targets: Shape ``(n,)``.
    """

    inputs: Tensor
    targets: Tensor

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


def load(name: str) -> RegressionData:
    """Loads a table from the data folder; a missing file is downloaded.

    Raises:
        UnknownNameError: The name is not known; the message lists the nearest names.
        DataError: The file is another than the registry's, or cannot be downloaded.
    """
    if name == EMBEDDED:  # scaled by statistics of all rows, training inputs would see test rows
        inputs, targets = load_diabetes(return_X_y=True, scaled=False)
        return RegressionData(torch.tensor(inputs), torch.tensor(targets))
    if name not in names():
        raise UnknownNameError("name", name, names())
    [file], [path] = data_files()[name], fetch(name)
    delimiter = "," if ".csv" in file.file else None
    table = np.loadtxt(path, delimiter=delimiter, skiprows=file.header_lines, ndmin=2)
    d = file.num_features
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
            f"{path}: no such file, so there are no published splits at hand. Put it there, or "
            f"name its data folder by {VARIABLE}."
        )
    with np.load(path) as arrays:
        train, test = (torch.tensor(arrays[f"{side}_{index}"]).long() for side in ("train", "test"))
    rows = torch.arange(data_files()[name][0].num_data)
    if not torch.equal(torch.cat([train, test]).sort().values, rows):
        raise DataError(f"{path}: train_{index} and test_{index} do not divide {len(rows)} rows.")
    return TrainTestSplit(train=train, test=test)
