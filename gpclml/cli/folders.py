"""Folders of results, in which the files of others stay as they are.

A result is written in a work folder beside its place, with ``.part`` after its name. The record of
the work folder, ``work.json``, names the files that the command wrote, with their checksums: only
these are ever replaced or removed, and only while they are as they were written. When all files are
there, the record says so, and the files are moved to their places one after another, the record
last.

A run that is killed while it moves them, which takes milliseconds, leaves files of two results. The
record in place is then still the old one, whose checksums are not those of what was replaced, so
that nobody takes them for one result. The next command for the folder moves the rest.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gpclml._utils.files import sync_folder, temporary_name, write_atomically
from gpclml.cli.locks import only_run
from gpclml.cli.records import (
    FolderKind,
    check_complete,
    check_places,
    is_file,
    is_temporary,
    own_files,
    read_record,
    record_text,
    sha256_of,
)
from gpclml.errors import DataError

__all__ = ["WorkFolder", "open_work_folder"]

_RECORD = "work.json"  # of a work folder
_UNFINISHED = {"unfinished": True}


@contextlib.contextmanager
def open_work_folder(out: Path, kind: FolderKind, names: Collection[str]) -> Iterator[WorkFolder]:
    """Opens the work folder of ``out``: a new one, or the one that an interrupted run left.

    Within the block no other run writes ``out``. The work folder is not removed at its end: see
    :meth:`WorkFolder.publish` and :meth:`WorkFolder.discard`.

    Raises:
        DataError: ``out`` or the work folder is a link, or is there and is no folder of this kind;
            a file in them has one of the names and was not written by the command, or has been
            changed; another run writes them; or they cannot be written.
    """
    out = _place_of(out)
    try:
        # It is tried, since permissions do not bind every user.
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise _cannot_write(out, error) from error
    with only_run(out):
        work = WorkFolder(out, kind)
        work.complete()
        own = {out: own_files(out, kind, kind.record), work.path: work.files}
        for folder, files in own.items():
            check_places(folder, {*names, *files}, {name: {files[name]} for name in files})
        try:
            work.begin(names)
        except OSError as error:
            raise _cannot_write(out, error) from error
        yield work


class WorkFolder:
    """The folder in which a result is written before it is put in its place.

    Attributes:
        path: Path of the work folder.
        files: SHA-256 of the files of the command in it, by name.
    """

    def __init__(self, out: Path, kind: FolderKind) -> None:
        self.path: Path = out.with_name(f"{out.name}.part")
        self._out, self._kind = out, kind
        self.files: dict[str, str] = {}

    def complete(self) -> None:
        """Finds what a killed run has left, and puts it in its place if it is finished."""
        self.files = own_files(self.path, self._kind, _RECORD)
        if self._is_finished():
            self._put_in_place()

    def begin(self, names: Iterable[str]) -> None:
        """Makes the folder, and removes files that a killed run left half written in it."""
        self.path.mkdir(exist_ok=True)
        known = [_RECORD, *names, *self.files]
        for parent in {(self.path / name).parent for name in known}:
            for entry in list(parent.iterdir()) if parent.is_dir() else ():
                if is_temporary(entry, known):
                    entry.unlink()
        self._write_record(_UNFINISHED)

    def add(self, writers: Mapping[str, Callable[[Path], object]]) -> None:
        """Writes files, each of them whole or not at all."""
        self.remove(name for name in writers if name in self.files)
        check_places(self.path, writers, {})
        written: dict[str, Path] = {}
        try:
            for name, write in writers.items():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                written[name] = temporary_name(self.path / name)
                write(written[name])
                with written[name].open("rb+") as file:
                    os.fsync(file.fileno())
            # The record comes first: it names every file that the command has written here.
            self.files |= {name: sha256_of(path) for name, path in written.items()}
            self._write_record(_UNFINISHED)
            for name, path in written.items():
                os.replace(path, self.path / name)
        except BaseException:
            for path in written.values():
                path.unlink(missing_ok=True)
            raise
        for folder in {(self.path / name).parent for name in writers}:
            sync_folder(folder)

    def add_text(self, name: str, text: str) -> None:
        """Writes a text file, as :meth:`add` does."""
        self.add({name: lambda path: path.write_bytes(text.encode())})

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, except those that have been changed since they were written."""
        names = list(names)
        for name in names:
            if is_file(self.path / name, {self.files.pop(name)}):
                (self.path / name).unlink()
        _remove_empty_folders(self.path, names)

    def discard(self) -> None:
        """Removes the work folder, except what the command did not write."""
        if self._is_finished():
            return  # the next command puts it in its place
        self.remove(list(self.files))
        (self.path / _RECORD).unlink()
        _remove_folder(self.path)

    def publish(self, content: Mapping[str, Any]) -> None:
        """Puts the files in their places; files of others that are there stay."""
        own = own_files(self._out, self._kind, self._kind.record)
        accepted = {name: {checksum} for name, checksum in own.items()}
        check_places(self._out, {*own, *self.files}, accepted)
        self._write_record(content)
        try:
            self._put_in_place()
        except KeyboardInterrupt:  # all is written, and takes only a moment to be in place
            self._put_in_place()

    def _is_finished(self) -> bool:
        record = read_record(self.path / _RECORD)
        return record is not None and not _UNFINISHED.items() <= record.items()

    def _write_record(self, content: Mapping[str, Any]) -> None:
        text = record_text(self._kind, content, self.files)
        write_atomically(self.path / _RECORD, lambda file: file.write(text.encode()))

    def _put_in_place(self) -> None:
        """Moves the files of a finished work folder to their places.

        It can be called again after it was stopped at any point.
        """
        part, out, kind, new = self.path, self._out, self._kind, self.files
        if not self._is_finished():
            return
        # A folder without a record was not there before, or was empty.
        there = out.is_symlink() or os.path.lexists(out / kind.record)
        old = own_files(out, kind, kind.record) if there else {}
        accepted = {name: {old.get(name), new.get(name)} for name in {*old, *new}}
        check_places(out, accepted, accepted)
        check_complete(part, out, new)
        for name in new:
            if os.path.lexists(part / name):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(part / name, out / name)
        for name in set(old) - set(new):
            (out / name).unlink(missing_ok=True)
        _remove_empty_folders(out, old)
        _remove_empty_folders(part, new)
        for folder in {out.parent, *((out / name).parent for name in new)}:
            sync_folder(folder)
        os.replace(part / _RECORD, out / kind.record)
        sync_folder(out)
        _remove_folder(part)
        self.files = {}


def _place_of(out: Path) -> Path:
    """The path of a folder without links, except that the folder itself may be one."""
    out = out.absolute()
    if out.name == "..":
        out = out.resolve()
    if not out.name:
        raise DataError(f"--out: {out} cannot be a new folder. Name a folder within it.")
    if not out.parent.is_dir():
        raise DataError(f"--out: there is no folder {out.parent}. Make it first.")
    return out.parent.resolve() / out.name


def _remove_empty_folders(folder: Path, names: Iterable[str]) -> None:
    """Removes the folders that files were in, if nothing is left in them."""
    parents = {parent for name in names for parent in PurePosixPath(name).parents[:-1]}
    for parent in sorted(parents, key=lambda parent: len(parent.parts), reverse=True):
        _remove_folder(folder / parent)


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # something is in it
        os.rmdir(folder)


def _cannot_write(out: Path, error: OSError) -> DataError:
    said = f"--out: cannot write in {out.parent} ({error.strerror})"
    return DataError(f"{said}. Name a folder elsewhere.")
