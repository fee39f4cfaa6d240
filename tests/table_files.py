"""Small tables in the layouts of the UCI files, in place of the registered ones."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from gpclml.datasets.sources import UciSource, uci_source, uci_sources


def smooth_rows(num_data: int, num_features: int, noise: float = 0.05) -> numpy.ndarray:
    """Uniform inputs and, in the last column, a smooth function of them with noise."""
    rng = numpy.random.default_rng(0)
    x = rng.uniform(-1, 1, (num_data, num_features))
    y = 10 * numpy.sin(2 * x.mean(1)) + noise * rng.standard_normal(num_data)
    return numpy.column_stack([x, y])


def write_table(folder: Path, name: str, rows: numpy.ndarray) -> UciSource:
    """Writes a file as that of a data set is laid out, and gives the entry that describes it."""
    source, (n, columns) = uci_source(name), rows.shape
    separator = "," if source.delimiter == "comma" else "  "
    lines = [separator.join(["name"] * columns)] * source.header_lines
    lines += [separator.join(f"{value:.8g}" for value in row) for row in rows]
    body = "".join(f"{line}\n" for line in lines).encode()
    path = folder / "uci" / source.file
    if path.suffix == ".gz":
        body = gzip.compress(body, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return replace(
        source, sha256=hashlib.sha256(body).hexdigest(), bytes=len(body), num_data=n,
        num_features=columns - 1, target_column=-1 if source.target_column < 0 else columns - 1,
    )  # fmt: skip


def register(patch: pytest.MonkeyPatch, sources: Iterable[UciSource]) -> None:
    """Entries in place of those of the same names, until the patch is undone."""
    known = dict(uci_sources()) | {source.name: source for source in sources}
    for module in ("regression", "sources"):
        patch.setattr(f"gpclml.datasets.{module}.uci_sources", lambda: known)
