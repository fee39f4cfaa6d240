"""The train/test splits that published results on the UCI sets were computed with."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from gpclml.datasets._embedded import EMBEDDED
from gpclml.datasets._folder import data_folder
from gpclml.datasets.sources import uci_source
from gpclml.datasets.splits import TrainTestSplit
from gpclml.errors import ArgumentError, DataError

_LAYOUT = "a .npz with integer arrays train_0, test_0, train_1, test_1, ... of row numbers"


def num_published_splits(name: str, *, folder: str | os.PathLike[str] | None = None) -> int:
    """Number of published splits at hand: 0 where there is no file of them.

    Args:
        name: Name of a data set, one of ``names()``; an embedded one has no published splits.
        folder: The data folder. None: ``$GPCLML_DATA``, else the user's cache.

    Raises:
        UnknownNameError: No such data set.
        DataError: The file is there and cannot be used.
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
    """One of the published splits, read from ``uci/splits/NAME.npz`` in the data folder.

    The file's keys are ``train_k`` and ``test_k``, k from 0, with row numbers from 0.

    Args:
        name: Name of a UCI data set.
        index: Which one, from 0.
        folder: The data folder. None: ``$GPCLML_DATA``, else the user's cache.

    Raises:
        UnknownNameError: The registry has no such name.
        ArgumentError: There is no split of that index.
        DataError: There is no file, or it is corrupt, or its rows are not those of the data.
    """
    with _opened(_path(name, folder)) as archive:
        count = _count(archive)
        if not 0 <= index < count:
            raise ArgumentError("index", index, f"0 to {count - 1} for {name}")
        return _split(archive, index, uci_source(name).num_data)


def load_published_splits(
    name: str, *, folder: str | os.PathLike[str] | None = None
) -> list[TrainTestSplit]:
    """All published splits of a data set, in order; see ``load_published_split``.

    Raises:
        UnknownNameError: The registry has no such name.
        DataError: There is no file, or it is corrupt, or its rows are not those of the data.
    """
    num_data = uci_source(name).num_data
    with _opened(_path(name, folder)) as archive:
        return [_split(archive, k, num_data) for k in range(_count(archive))]


def _path(name: str, folder: str | os.PathLike[str] | None) -> Path:
    return data_folder("uci", folder) / "splits" / f"{uci_source(name).name}.npz"


@contextmanager
def _opened(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """The archive; whatever makes it unreadable, then or later, is a DataError."""
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
        raise ValueError(f"train_{index} and test_{index} do not part rows 0 to {num_data - 1}")
    return TrainTestSplit(*(torch.tensor(side.astype(np.int64)) for side in (train, test)))
