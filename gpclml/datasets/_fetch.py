"""Data files on disk: found in the cache or downloaded, and in either case checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from gpclml.datasets._folder import VARIABLE, data_folder
from gpclml.datasets.sources import uci_source
from gpclml.errors import DataError


def fetch(
    name: str,
    *,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
    address: str | None = None,
) -> Path:
    """The path of a UCI data set's original file, downloaded where it is not there yet.

    The file is kept in ``uci`` under the data folder. A file that is there and whole is used
    as it is: nothing is downloaded or written. A download goes to a temporary file and takes
    the file's name only when its checksum is right. A file there with a wrong checksum is
    removed, and the error says so.

    Args:
        name: Name of the data set, one of ``uci_sources()``.
        folder: The data folder. None: ``$GPCLML_DATA``, else the user's cache.
        progress: Whether a download shows a progress bar on standard error.
        address: Where to download from in place of the registry's address, for a mirror;
            the checksum must be the registry's all the same.

    Raises:
        UnknownNameError: The registry has no such name.
        DataError: The file is corrupt or cannot be fetched; the message names the file, the
            expected and the found checksum, and the mend.
    """
    source = uci_source(name)
    return fetch_file(source, data_folder("uci", folder), progress, address)


class FileSource(Protocol):
    """An original file: what it is called, where it comes from, its checksum and size.

    A checksum is ``"sha256:..."`` or ``"md5:..."``; an empty address means that there is none.
    """

    @property
    def file(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def checksum(self) -> str: ...
    @property
    def bytes(self) -> int: ...


def fetch_file(
    source: FileSource, directory: Path, progress: bool = True, address: str | None = None
) -> Path:
    """The path of an original file, downloaded where it is not there yet; see :func:`fetch`.

    Args:
        source: Which file.
        directory: Where it is kept.
        progress: Whether a download shows a progress bar on standard error.
        address: Where to download from in place of the source's address.

    Raises:
        DataError: The file is corrupt or cannot be fetched.
    """
    import pooch

    address = source.address if address is None else address
    path = directory / source.file
    _reject_corrupt(path, source, address)
    if not address and not path.exists():
        mend = f"It has no public address: put a copy there, or name its folder by {VARIABLE}."
        raise _error(path, "no such file", source, "no file", mend)
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


def _reject_corrupt(path: Path, source: FileSource, address: str) -> None:
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
        mend = f"It could not be removed ({error}): delete it and call again"
    else:
        mend = "It has been removed: call again"
    mend += (
        f" to download it from {address}, or put a whole copy there"
        if address
        else (" with a whole copy there")
    )
    raise _error(path, "the file is corrupt or is another version", source, found, f"{mend}.")


def _downloader(source: FileSource, path: Path, progress: bool) -> Callable[..., None]:
    """A pooch downloader that refuses, with what came, anything but the registered file."""

    def download(address: str, output_file: str, pooch: object) -> None:
        mend = (
            "Nothing was kept. Check the network (and proxy) and call again, "
            f"or put the file there from {address}."
        )
        try:
            _download(address, output_file, source, progress)
        # requests' errors are OSErrors; a malformed reply or address can be a ValueError.
        except (OSError, ValueError) as error:
            what = f"the download from {address} failed ({error})"
            raise _error(path, what, source, _partial(output_file, source), mend) from error
        if _checksum(output_file, source) != source.checksum:
            what = f"what came from {address} is corrupt or another version"
            raise _error(path, what, source, _partial(output_file, source), mend)

    return download


def _download(address: str, output_file: str, source: FileSource, progress: bool) -> None:
    import pooch
    from tqdm import tqdm

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
            if not progress:
                pooch.HTTPDownloader(**options)(address, limited, None)
                return
            # A bar of our own is closed whatever happens; pooch's is left open by an error.
            with tqdm(desc=source.file, total=source.bytes, unit="B", unit_scale=True) as bar:
                # pooch takes any such object; its parameter has a bool for default and no type.
                shown: Any = bar
                pooch.HTTPDownloader(progressbar=shown, **options)(address, limited, None)
    finally:
        for reply in replies:  # pooch leaves that of a failed download open
            reply.close()


class _Limited:
    """A file that takes no more bytes than the registered file has."""

    def __init__(self, file: BinaryIO, source: FileSource) -> None:
        self._file, self._source, self._room = file, source, source.bytes

    def write(self, data: bytes) -> int:
        self._file.write(data[: self._room])
        self._room -= len(data)
        if self._room < 0:
            raise _too_large(self._source)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _too_large(source: FileSource) -> OSError:
    return OSError(f"more than the registered {source.bytes} bytes, and so it was stopped")


def _partial(path: str, source: FileSource) -> str:
    """What a failed download left: its checksum and size, in words."""
    size = os.path.getsize(path)
    return f"{_checksum(path, source)} ({size} bytes)" if size else "nothing (0 bytes)"


def _checksum(path: str | Path, source: FileSource) -> str:
    """That of a file, by the algorithm of its source."""
    import pooch

    algorithm = source.checksum.partition(":")[0]
    return f"{algorithm}:{pooch.file_hash(str(path), alg=algorithm)}"


def _error(path: Path, what: str, source: FileSource, found: str, mend: str) -> DataError:
    return DataError(
        f"{path}: {what}. Expected {source.checksum} ({source.bytes} bytes), found {found}. {mend}"
    )
