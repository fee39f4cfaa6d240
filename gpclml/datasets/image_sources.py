"""The registry of image files: where each original file is, and its checksum."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

__all__ = ["ImageFile", "image_files"]


@dataclass(frozen=True)
class ImageFile:
    """One original file.

    Attributes:
        name: Name of the data set.
        folder: Folder under the data folder.
        file: File name there.
        address: Download address; empty where the file has none.
        source: Where the images come from, for people.
        checksum: Checksum of the file, ``"sha256:..."`` or, where only that is published,
            ``"md5:..."``.
        bytes: Size of the file.
        licence: What the source states.
    """

    name: str
    folder: str
    file: str
    address: str
    source: str
    checksum: str
    bytes: int
    licence: str


@cache
def image_files() -> dict[str, tuple[ImageFile, ...]]:
    """The whole registry: the files of each data set, in the order in which they are read."""
    table = resources.files("gpclml.datasets").joinpath("image_sources.csv")
    files: dict[str, tuple[ImageFile, ...]] = {}
    for row in csv.DictReader(table.read_text(encoding="utf-8").splitlines()):
        one = ImageFile(**{**row, "bytes": int(row["bytes"])})  # type: ignore[arg-type]
        files[one.name] = (*files.get(one.name, ()), one)
    return files
