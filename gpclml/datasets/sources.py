"""Registries of original data files, with their checksums, and the download of these files."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from gpclml._utils.progress import progress_bar, shows_progress
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
    """Registry entry of an original file of images.

    Attributes:
        name: Name of the data set.
        folder: Folder under the data folder.
        file: File name there.
        address: Download address.
        source: Origin of the images.
        checksum: Checksum of the file, ``"sha256:..."`` or, where only that is published,
            ``"md5:..."``.
        bytes: Size of the file.
        licence: Licence that the source states.
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
def uci_sources() -> Mapping[str, UciSource]:
    """All entries of the registry by data set name, read-only."""
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


@cache
def image_files() -> dict[str, tuple[ImageFile, ...]]:
    """The files of each data set of images by name, in the order in which they are read."""
    table = resources.files("gpclml.datasets").joinpath("image_sources.csv")
    files: dict[str, tuple[ImageFile, ...]] = {}
    for row in csv.DictReader(table.read_text(encoding="utf-8").splitlines()):
        one = ImageFile(**{**row, "bytes": int(row["bytes"])})  # type: ignore[arg-type]
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
    """Gives the path of an original file, downloaded if it is missing; see :func:`fetch`.

    Args:
        source: The entry of the file.
        directory: Folder in which it is kept.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.
        address: Address of a mirror in place of the entry's.

    Raises:
        DataError: The file is corrupt or cannot be fetched.
    """
    import pooch

    address = source.address if address is None else address
    path = directory / source.file
    _reject_corrupt(path, source, address)
    cache = pooch.create(
        path=directory,
        base_url="",
        registry={source.file: source.checksum},
        urls={source.file: address},
    )
    try:
        return Path(cache.fetch(source.file, downloader=_downloader(source, path, progress)))
    except DataError:
        raise
    except OSError as error:
        raise _error(
            path,
            f"no such file, and its folder cannot be written to ({error})",
            source,
            "no file",
            f"Name a folder that can be written to by {VARIABLE} or folder=, "
            f"or put the file there from {address}.",
        ) from error


def data_folder(kind: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of files of one kind in the data folder.

    Args:
        kind: Name of the folder, e.g. ``"uci"``.
        folder: The data folder. None: the one named by the environment variable
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
        found = _checksum(path, source)
    except OSError as error:
        raise _error(
            path,
            f"the file cannot be read ({error})",
            source,
            "an unreadable file",
            "Make it readable, or remove it and call again.",
        ) from error
    if found == source.checksum:
        return
    found = f"{found} ({path.stat().st_size} bytes)"
    try:
        path.unlink()
    except OSError as error:
        suggestion = f"It could not be removed ({error}): delete it and call again"
    else:
        suggestion = "It has been removed: call again"
    suggestion += f" to download it from {address}, or put a whole copy there."
    raise _error(path, "the file is corrupt or is another version", source, found, suggestion)


def _downloader(
    source: UciSource | ImageFile, path: Path, progress: bool | None
) -> Callable[..., None]:
    """A pooch downloader that raises for anything but the registered file, and says what came."""

    def download(address: str, output_file: str, pooch: object) -> None:
        suggestion = (
            "Nothing was kept. Check the network (and proxy) and call again, "
            f"or put the file there from {address}."
        )
        try:
            _download(address, output_file, source, progress)
        # requests' errors are OSErrors; a malformed reply or address can be a ValueError.
        except (OSError, ValueError) as error:
            what = f"the download from {address} failed ({error})"
            raise _error(path, what, source, _partial(output_file, source), suggestion) from error
        if _checksum(output_file, source) != source.checksum:
            what = f"what came from {address} is corrupt or another version"
            raise _error(path, what, source, _partial(output_file, source), suggestion)

    return download


def _download(
    address: str, output_file: str, source: UciSource | ImageFile, progress: bool | None
) -> None:
    import pooch

    replies: list[Any] = []

    def check_claimed(reply: Any, *args: object, **kwargs: object) -> None:
        replies.append(reply)
        claimed = reply.headers.get("Content-Length", "0")
        if reply.ok and claimed.isdecimal() and int(claimed) > source.bytes:
            raise _too_large(source)

    # Uncompressed in transit, so that Content-Length counts the file's own bytes.
    options: Any = {
        "headers": {"Accept-Encoding": "identity"},
        "hooks": {"response": check_claimed},
    }
    try:
        with open(output_file, "wb") as file:
            limited: Any = _Limited(file, source)  # pooch writes to it and flushes it
            if not shows_progress(progress):
                pooch.HTTPDownloader(**options)(address, limited, None)
                return
            # A bar of our own is closed whatever happens; pooch's is left open by an error.
            options_of_bar: Any = {"total": source.bytes, "unit": "B", "unit_scale": True}
            with progress_bar(progress=True, desc=source.file, **options_of_bar) as bar:
                # pooch takes any such object; its parameter has a bool for default and no type.
                shown: Any = bar
                pooch.HTTPDownloader(progressbar=shown, **options)(address, limited, None)
    finally:
        for reply in replies:  # pooch leaves that of a failed download open
            reply.close()


class _Limited:
    """A file that raises when more bytes are written than the registered file has."""

    def __init__(self, file: BinaryIO, source: UciSource | ImageFile) -> None:
        self._file, self._source, self._room = file, source, source.bytes

    def write(self, data: bytes) -> int:
        self._file.write(data[: self._room])
        self._room -= len(data)
        if self._room < 0:
            raise _too_large(self._source)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _too_large(source: UciSource | ImageFile) -> OSError:
    return OSError(f"more than the registered {source.bytes} bytes, and so it was stopped")


def _partial(path: str, source: UciSource | ImageFile) -> str:
    """Checksum and size of the rest of a failed download, in words."""
    size = os.path.getsize(path)
    return f"{_checksum(path, source)} ({size} bytes)" if size else "nothing (0 bytes)"


def _checksum(path: str | Path, source: UciSource | ImageFile) -> str:
    """The checksum of a file, by the algorithm of its entry."""
    import pooch

    algorithm = source.checksum.partition(":")[0]
    return f"{algorithm}:{pooch.file_hash(str(path), alg=algorithm)}"


def _error(
    path: Path, what: str, source: UciSource | ImageFile, found: str, suggestion: str
) -> DataError:
    return DataError(
        f"{path}: {what}. Expected {source.checksum} ({source.bytes} bytes), found {found}. "
        f"{suggestion}"
    )


def _source(row: dict[str, str]) -> UciSource:
    # Annotations are strings here, so that they tell which columns are numbers.
    numbers = {field.name for field in fields(UciSource) if field.type == "int"}
    values: dict[str, Any] = {
        key: int(value) if key in numbers else value for key, value in row.items()
    }
    return UciSource(**values)
