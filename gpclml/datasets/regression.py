"""Regression data sets by name, and splits of their rows: drawn from a seed, or published."""

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

from gpclml._utils.arguments import checked, seeded
from gpclml.datasets.sources import UciSource, data_folder, fetch, uci_source, uci_sources
from gpclml.errors import ArgumentError, DataError, ShapeError, UnknownNameError

__all__ = [
    "EMBEDDED",
    "RegressionData",
    "TrainTestSplit",
    "load",
    "load_published_split",
    "load_published_splits",
    "names",
    "num_published_splits",
    "read_table",
    "split",
    "subset",
]

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
    if name not in names():
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
    generator = seeded(seed)
    return torch.randperm(n, generator=generator, device=generator.device).cpu()


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
