"""Splits of data sets into training and test rows: drawn from a seed, or published ones."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from gpclml._utils.arguments import checked
from gpclml.datasets.regression import EMBEDDED, RegressionData
from gpclml.datasets.sources import data_folder, uci_source
from gpclml.errors import ArgumentError, DataError, ShapeError

__all__ = [
    "TrainTestSplit",
    "load_published_split",
    "load_published_splits",
    "num_published_splits",
    "split",
    "subset",
]

_LAYOUT = "a .npz with integer arrays train_0, test_0, train_1, test_1, ... of row numbers"


@dataclass(frozen=True, eq=False)
class TrainTestSplit:
    """Row numbers of a data set, from 0, split into training and test rows.

    Attributes:
        train: Training rows, ``(num_train,)``, int64.
        test: Test rows, ``(num_test,)``, int64.
    """

    train: Tensor
    test: Tensor


@checked
def split(
    data_or_n: RegressionData | int, seed: int | Generator, test_fraction: float = 0.1
) -> TrainTestSplit:
    """Draws a random split; by default 90% of the rows are training rows.

    Args:
        data_or_n: The data set, or its number of rows.
        seed: Seed or generator of the permutation; one seed gives one split.
        test_fraction: Share of test rows, in (0, 1); their number is rounded.

    Raises:
        ArgumentError: ``test_fraction`` is outside (0, 1), or leaves no row on one side.
    """
    n = data_or_n.num_data if isinstance(data_or_n, RegressionData) else data_or_n
    if not 0.0 < test_fraction < 1.0:
        raise ArgumentError("test_fraction", test_fraction, "a number between 0 and 1")
    num_test = round(n * test_fraction)
    if not 0 < num_test < n:
        raise ArgumentError(
            "test_fraction",
            f"{test_fraction}, which tests on {num_test} of {n} rows",
            "at least one row to train on and one to test on",
            "Take another fraction or more rows.",
        )
    order = _permutation(n, seed)
    return TrainTestSplit(train=order[num_test:], test=order[:num_test])


@checked(train="integer (N,)")
def subset(train: Tensor, n: int, seed: int | Generator) -> Tensor:
    """Draws a small training set: random training rows, without replacement.

    One seed gives nested subsets: that of 100 rows begins with that of 50.

    Args:
        train: Training row numbers, shape ``(num_train,)``.
        n: Number of rows.
        seed: Seed or generator of the permutation.

    Returns:
        Row numbers, shape ``(n,)``, on the device of ``train``.

    Raises:
        ShapeError: ``train`` does not have one dimension.
        ArgumentError: ``n`` is below one or above the number of training rows.
    """
    if train.ndim != 1:
        raise ShapeError("train", tuple(train.shape), "(num_train,)")
    if not 1 <= n <= len(train):
        raise ArgumentError(
            "n", n, f"1 to {len(train)}, the number of training rows", "Ask for fewer rows."
        )
    return train[_permutation(len(train), seed)[:n].to(train.device)]


def num_published_splits(name: str, *, folder: str | os.PathLike[str] | None = None) -> int:
    """Number of published splits in the data folder, 0 if there is no file of them.

    Args:
        name: Name of a data set, one of ``names()``; an embedded one has no published splits.
        folder: The data folder. None: ``$GPCLML_DATA``, else the user's cache.

    Raises:
        UnknownNameError: The name is not known.
        DataError: The file cannot be used.
    """
    if name in EMBEDDED:
        return 0
    path = _path(name, folder)
    if not path.exists():
        return 0
    with _opened(path) as archive:
        return _count(archive)


def load_published_split(
    name: str, index: int, *, folder: str | os.PathLike[str] | None = None
) -> TrainTestSplit:
    """Loads one published split from ``uci/splits/NAME.npz`` in the data folder.

    The file's keys are ``train_k`` and ``test_k``, k from 0, with row numbers from 0.

    Args:
        name: Name of a UCI data set.
        index: Number of the split, from 0.
        folder: The data folder. None: ``$GPCLML_DATA``, else the user's cache.

    Raises:
        UnknownNameError: The registry has no such name.
        ArgumentError: There is no split of that number.
        DataError: The file is missing or corrupt, or its rows are not those of the data.
    """
    with _opened(_path(name, folder)) as archive:
        count = _count(archive)
        if not 0 <= index < count:
            raise ArgumentError("index", index, f"0 to {count - 1} for {name}")
        return _split(archive, index, uci_source(name).num_data)


def load_published_splits(
    name: str, *, folder: str | os.PathLike[str] | None = None
) -> list[TrainTestSplit]:
    """Loads all published splits of a data set, in order; see :func:`load_published_split`.

    Args:
        name: Name of a UCI data set.
        folder: As for :func:`load_published_split`.

    Raises:
        UnknownNameError: The registry has no such name.
        DataError: The file is missing or corrupt, or its rows are not those of the data.
    """
    num_data = uci_source(name).num_data
    with _opened(_path(name, folder)) as archive:
        return [_split(archive, k, num_data) for k in range(_count(archive))]


def _permutation(n: int, seed: int | Generator) -> Tensor:
    if isinstance(seed, Generator):
        return torch.randperm(n, generator=seed, device=seed.device).cpu()
    return torch.randperm(n, generator=Generator().manual_seed(seed))


def _path(name: str, folder: str | os.PathLike[str] | None) -> Path:
    return data_folder("uci", folder) / "splits" / f"{uci_source(name).name}.npz"


@contextmanager
def _opened(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Opens the archive; anything that makes it unreadable, then or later, is a DataError."""
    if not path.exists():
        raise DataError(
            f"{path}: no such file, so there are no published splits at hand; expected {_LAYOUT}. "
            "Put it there, name its data folder by GPCLML_DATA or folder=, or draw random splits "
            "with split(data, seed)."
        )
    try:
        # A stream of our own: given a path, numpy leaves a damaged archive open.
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("found a single array")
            with archive:
                yield archive
    except (DataError, ArgumentError):
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be used ({error}), expected {_LAYOUT}. Replace or remove it."
        ) from error


def _count(archive: np.lib.npyio.NpzFile) -> int:
    count = len(archive.files) // 2
    expected = {f"{side}_{k}" for side in ("train", "test") for k in range(count)}
    if count == 0 or set(archive.files) != expected:
        raise ValueError(f"found arrays {', '.join(sorted(archive.files)) or 'none'}")
    return count


def _split(archive: np.lib.npyio.NpzFile, index: int, num_data: int) -> TrainTestSplit:
    train, test = archive[f"train_{index}"], archive[f"test_{index}"]
    rows = np.concatenate([train, test])
    if rows.dtype.kind not in "iu" or not np.array_equal(np.sort(rows), np.arange(num_data)):
        raise ValueError(f"train_{index} and test_{index} do not divide rows 0 to {num_data - 1}")
    return TrainTestSplit(*(torch.tensor(side.astype(np.int64)) for side in (train, test)))
