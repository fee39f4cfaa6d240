"""The original files of the data sets: where they come from, their checksums, their download."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas

from gpclml.errors import DataError

VARIABLE = "GPCLML_DATA"
"""Environment variable that names the data folder."""

_COUNTS = ("num_data", "num_features", "header_lines")


@dataclass(frozen=True)
class DataFile:
    """An original file, a row of ``registry.csv``.

    Attributes:
        name: Name of the data set, which may have several files.
        folder: Its folder under the data folder.
        file: Its name there.
        address: Download address; empty if it has no public one.
        checksum: ``"sha256:..."`` or, where only that is published, ``"md5:..."``; empty where
            the file is the user's own archive.
        num_data: Number of rows of a table.
        num_features: Number of its input columns, which come first; the target is the next one.
        header_lines: Lines to skip at its top.
        note: Origin of the file; of a table the meaning of the target, and peculiarities.
        licence: Licence that the source states.
    """

    name: str
    folder: str
    file: str
    address: str
    checksum: str
    num_data: int
    num_features: int
    header_lines: int
    note: str
    licence: str

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return data_folder() / self.folder / self.file


@cache
def data_files() -> dict[str, tuple[DataFile, ...]]:
    """The files of each data set by name, in the order in which they are read."""
    counts = dict.fromkeys(_COUNTS, lambda text: int(text or 0))
    path = Path(__file__).with_name("registry.csv")
    table = pandas.read_csv(path, keep_default_na=False, converters=counts)
    entries: list[Any] = [DataFile(*row) for row in table.itertuples(index=False)]
    return {name: tuple(file for file in entries if file.name == name) for name in table["name"]}


def data_folder() -> Path:
    """The folder that ``$GPCLML_DATA`` names, else ``gpclml`` in the user's cache."""
    # Read at each call: a runner sets the variable around its cells.
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    import pooch

    return Path(pooch.os_cache("gpclml"))


def has_files(name: str) -> bool:
    """Whether the files of a data set are in the data folder."""
    return all(file.path.is_file() for file in data_files()[name])


def fetch(name: str) -> list[Path]:
    """Gives the paths of a data set's files, which are downloaded if they are missing.

    Raises:
        DataError: A file is another than the registry's, or is missing and cannot be downloaded.
    """
    return [_fetched(file) for file in data_files()[name]]


def _fetched(file: DataFile) -> Path:
    path = file.path
    if path.is_file():
        # A file that the user made, without a public original, has no checksum.
        if file.checksum:
            algorithm = file.checksum.partition(":")[0]
            # Hashed at each load: a data set that changed under a name would change results.
            with path.open("rb") as content:
                checksum = f"{algorithm}:{hashlib.file_digest(content, algorithm).hexdigest()}"
            if checksum != file.checksum:
                raise DataError(
                    f"{path}: corrupt or another version. Expected {file.checksum}, found "
                    f"{checksum}. Put a whole copy there, or remove it."
                )
        return path
    if not file.address:
        raise DataError(
            f"{path}: no such file. It is not downloaded, and comes from {file.note}: put a copy "
            f"there, or name its data folder by {VARIABLE}."
        )
    import pooch

    # Uncompressed in transit, as the file is.
    downloader: Any = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(), chunk_size=1 << 16, headers={"Accept-Encoding": "identity"}
    )
    try:
        pooch.retrieve(file.address, file.checksum, file.file, path.parent, downloader=downloader)
    # requests' errors are OSErrors; a wrong checksum or a malformed address is a ValueError.
    except (OSError, ValueError) as error:
        reason: BaseException = error  # of several, each raised in place of the next, the first
        while (earlier := reason.__cause__ or reason.__context__) is not None:
            reason = earlier
        raise DataError(
            f"{path}: the download from {file.address} failed, and nothing was kept ({reason}). "
            f"Check the network, put the file there, or name its data folder by {VARIABLE}."
        ) from error
    return path
