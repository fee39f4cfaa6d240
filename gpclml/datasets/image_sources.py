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
        repository: Public GitHub repository, ``owner/name``.
        commit: Commit or branch; the checksum pins the file.
        path: Path of the file in the repository.
        sha256: Checksum of the file.
        bytes: Size of the file.
        licence: What the source repository states.
    """

    name: str
    folder: str
    file: str
    repository: str
    commit: str
    path: str
    sha256: str
    bytes: int
    licence: str

    @property
    def address(self) -> str:
        """Download address of the file."""
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"


@cache
def image_files() -> dict[str, tuple[ImageFile, ...]]:
    """The whole registry: the files of each data set, in the order in which they are read."""
    table = resources.files("gpclml.datasets").joinpath("image_sources.csv")
    files: dict[str, tuple[ImageFile, ...]] = {}
    for row in csv.DictReader(table.read_text(encoding="utf-8").splitlines()):
        one = ImageFile(**{**row, "bytes": int(row["bytes"])})  # type: ignore[arg-type]
        files[one.name] = (*files.get(one.name, ()), one)
    return files
