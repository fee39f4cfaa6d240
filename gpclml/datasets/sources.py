"""The registry of UCI files: where each original file is, its checksum and its layout."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from gpclml.errors import UnknownNameError

__all__ = ["UciSource", "uci_source", "uci_sources"]


@dataclass(frozen=True)
class UciSource:
    """One original file: what it is called, where it comes from and how to read it.

    Attributes:
        name: Name of the data set.
        file: File name in the cache folder.
        repository: Public GitHub repository, ``owner/name``.
        commit: Commit that pins the file.
        path: Path of the file in the repository.
        sha256: Checksum of the file.
        bytes: Size of the file.
        num_data: Number of rows.
        num_features: Number of input columns: those before the target column.
        delimiter: ``"comma"`` or ``"whitespace"``.
        header_lines: Lines to skip at the top.
        target_column: Column of the target, from 0; -1 is the last.
        note: What the target is, and what is odd about the file.
        licence: What the source repository states.
    """

    name: str
    file: str
    repository: str
    commit: str
    path: str
    sha256: str
    bytes: int
    num_data: int
    num_features: int
    delimiter: str
    header_lines: int
    target_column: int
    note: str
    licence: str

    @property
    def address(self) -> str:
        """Download address of the file at its pinned commit."""
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"

    @property
    def checksum(self) -> str:
        """Checksum of the file with its algorithm, ``"sha256:..."``."""
        return f"sha256:{self.sha256}"


@cache
def uci_sources() -> Mapping[str, UciSource]:
    """The whole registry: data set name to source, read-only."""
    table = resources.files("gpclml.datasets").joinpath("uci_sources.csv")
    rows = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    sources = [_source(row) for row in rows]
    return MappingProxyType({source.name: source for source in sources})


def uci_source(name: str) -> UciSource:
    """The registry's entry of one data set.

    Raises:
        UnknownNameError: The registry has no such name.
    """
    sources = uci_sources()
    if not isinstance(name, str) or name not in sources:
        raise UnknownNameError("name", name, sources)
    return sources[name]


def _source(row: dict[str, str]) -> UciSource:
    # Annotations are strings here: the dataclass itself says which columns are numbers.
    numbers = {field.name for field in fields(UciSource) if field.type == "int"}
    values: dict[str, Any] = {
        key: int(value) if key in numbers else value for key, value in row.items()
    }
    return UciSource(**values)
