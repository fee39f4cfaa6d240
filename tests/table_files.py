"""Small tables in the layouts of the UCI files, in place of the registered ones."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from benchmarks.data.files import DataFile, data_files


def smooth_rows(num_data: int, num_features: int, noise: float = 0.05) -> numpy.ndarray:
    """Uniform inputs and, in the last column, a smooth function of them with noise."""
    rng = numpy.random.default_rng(0)
    x = rng.uniform(-1, 1, (num_data, num_features))
    y = 10 * numpy.sin(2 * x.mean(1)) + noise * rng.standard_normal(num_data)
    return numpy.column_stack([x, y])


def write_table(folder: Path, name: str, rows: numpy.ndarray) -> DataFile:
    """Writes a file as that of a data set is laid out, and gives the entry that describes it."""
    [file], (n, columns) = data_files()[name], rows.shape
    separator = "," if ".csv" in file.file else "  "
    lines = [separator.join(["name"] * columns)] * file.header_lines
    lines += [separator.join(f"{value:.8g}" for value in row) for row in rows]
    body = "".join(f"{line}\n" for line in lines).encode()
    path = folder / "uci" / file.file
    if path.suffix == ".gz":
        body = gzip.compress(body, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    checksum = f"sha256:{hashlib.sha256(body).hexdigest()}"
    return replace(file, checksum=checksum, num_data=n, num_features=columns - 1)


def register(patch: pytest.MonkeyPatch, files: Iterable[DataFile]) -> None:
    """Entries in place of those of the same names, until the patch is undone."""
    for file in files:
        patch.setitem(data_files(), file.name, (file,))
