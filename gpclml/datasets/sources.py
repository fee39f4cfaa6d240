"""Registries of original data files, with their checksums, and the download of these files."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from gpclml._utils.environment import progress_bar
from gpclml.errors import DataError, UnknownNameError

__all__ = [
    "VARIABLE",
    "ImageFile",
    "UciSource",
    "data_folder",
    "fetch",
    "fetch_file",
    "image_files",
    "uci_source",
    "uci_sources",
]

VARIABLE = "GPCLML_DATA"
"""Environment variable that names the data folder."""

_CHUNK = 1 << 16  # bytes


T = TypeVar("T", "UciSource", "ImageFile")


@dataclass(frozen=True)
class UciSource:
    """Registry entry of a UCI data set's original file: its name, address, checksum and layout.

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
        note: Meaning of the target, and peculiarities of the file.
        licence: Licence that the source repository states.
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


@dataclass(frozen=True)
class ImageFile:
    """Registry entry of an original file of images, in a folder under the data folder.

    The checksum is ``"sha256:..."`` or, where only that is published, ``"md5:..."``.
    """

    name: str
    folder: str
    file: str
    address: str
    source: str
    checksum: str
    bytes: int
    licence: str


def _registry(file: str, kind: type[T]) -> list[T]:
    table = resources.files("gpclml.datasets").joinpath(file).read_text(encoding="utf-8")
    # Annotations are strings here, so that they tell which columns are numbers.
    numbers = {field.name for field in fields(kind) if field.type == "int"}
    found = []
    for row in csv.DictReader(table.splitlines()):
        values: dict[str, Any] = row | {name: int(row[name]) for name in numbers}
        found.append(kind(**values))
    return found


@cache
def uci_sources() -> Mapping[str, UciSource]:
    """All entries of the registry by data set name, read-only."""
    return MappingProxyType({one.name: one for one in _registry("uci_sources.csv", UciSource)})


def uci_source(name: str) -> UciSource:
    """The registry's entry of one data set.

    Raises:
        UnknownNameError: The registry has no such name.
    """
    sources = uci_sources()
    if not isinstance(name, str) or name not in sources:
        raise UnknownNameError("name", name, sources)
    return sources[name]


@cache
def image_files() -> dict[str, tuple[ImageFile, ...]]:
    """The files of each data set of images by name, in the order in which they are read."""
    files: dict[str, tuple[ImageFile, ...]] = {}
    for one in _registry("image_sources.csv", ImageFile):
        files[one.name] = (*files.get(one.name, ()), one)
    return files


def fetch(
    name: str,
    *,
    folder: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    address: str | None = None,
) -> Path:
    """Gives the path of a UCI data set's original file, which is downloaded if it is missing.

    The file is kept in ``uci`` under the data folder. Nothing is downloaded if it is there with the
    right checksum. A download replaces it only if its checksum is right. A file with a wrong
    checksum is removed, and the error says so.

    Args:
        name: Name of the data set, one of ``uci_sources()``.
        folder: The data folder. None: ``$GPCLML_DATA``, else the user's cache.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.
        address: Address of a mirror in place of the registry's; the checksum must be that of the
            registry.

    Raises:
        UnknownNameError: The registry has no such name.
        DataError: The file is corrupt or cannot be fetched; the message names the file, the
            expected and the found checksum, and what to do.
    """
    source = uci_source(name)
    return fetch_file(source, data_folder("uci", folder), progress, address)


def fetch_file(
    source: UciSource | ImageFile,
    directory: Path,
    progress: bool | None = None,
    address: str | None = None,
) -> Path:
    """Gives the path of an original file, downloaded if it is missing; see :func:`fetch`."""
    import pooch

    address = source.address if address is None else address
    path = directory / source.file
    _reject_corrupt(path, source, address)
    download: Any = partial(_download, source, progress)
    try:
        pooch.retrieve(address, source.checksum, source.file, directory, downloader=download)
    # requests' errors are OSErrors; a wrong checksum or a malformed address is a ValueError.
    except (OSError, ValueError) as error:
        suggestion = (
            "Nothing was kept. Check the network (and proxy), and that the folder can be written "
            f"to (name another by {VARIABLE} or folder=), and call again, or put the file there."
        )
        raise _error(
            path, f"the download from {address} failed", source, error, suggestion
        ) from error
    return path  # pooch's follows links


def data_folder(kind: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of files of one kind, such as ``"uci"``, in the data folder.

    The data folder is the one given, else the one named by the environment variable
    ``GPCLML_DATA``, else this package's folder in the user's cache.
    """
    if folder is not None:
        return Path(folder).expanduser() / kind
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser() / kind
    import pooch

    return Path(pooch.os_cache("gpclml")) / kind


def _reject_corrupt(path: Path, source: UciSource | ImageFile, address: str) -> None:
    """Removes a file whose checksum is wrong and raises; a good or absent file passes."""
    if not path.exists():
        return
    try:
        found = f"{_checksum(path, source)} ({path.stat().st_size} bytes)"
        if found.startswith(source.checksum):
            return
        path.unlink()
    except OSError as error:
        suggestion = "Make it readable, or remove it and call again."
        raise _error(path, "the file cannot be read", source, error, suggestion) from error
    suggestion = f"call again to download it from {address}, or put a whole copy there."
    what = "the file is corrupt or is another version"
    raise _error(path, what, source, found, f"It has been removed: {suggestion}")


def _download(
    source: UciSource | ImageFile, progress: bool | None, address: str, output: str, _: object
) -> None:
    """A downloader of pooch, which raises where more than the registered bytes come."""
    import requests

    # Uncompressed in transit, as the file is.
    headers = {"Accept-Encoding": "identity"}
    bar: Any = {"total": source.bytes, "unit": "B", "unit_scale": True, "desc": source.file}
    with (
        requests.get(address, headers=headers, stream=True, timeout=30) as reply,
        open(output, "wb") as file,
        progress_bar(progress=progress, **bar) as shown,
    ):
        reply.raise_for_status()
        for part in reply.iter_content(_CHUNK):
            if file.tell() + len(part) > source.bytes:
                raise OSError(f"more than the registered {source.bytes} bytes")
            file.write(part)
            shown.update(len(part))


def _checksum(path: str | Path, source: UciSource | ImageFile) -> str:
    """The checksum of a file, by the algorithm of its entry."""
    import pooch

    algorithm = source.checksum.partition(":")[0]
    return f"{algorithm}:{pooch.file_hash(str(path), alg=algorithm)}"


def _error(
    path: Path, what: str, source: UciSource | ImageFile, found: object, suggestion: str
) -> DataError:
    return DataError(
        f"{path}: {what}. Expected {source.checksum} ({source.bytes} bytes), found: {found}. "
        f"{suggestion}"
    )
