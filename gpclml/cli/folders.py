"""Folders that are written whole or not at all, in which the files of others stay as they are.

A folder is made beside its place, with ``.part`` after its name. Its record (``records.py``) names
the files that the command wrote, with their checksums: only these are ever replaced or removed, and
only while they are as they were written. When all files are there, the record is written again and
says that the folder is finished. Then the folder is put in its place:

- where nothing is in its place yet, it is renamed;
- where a folder is there, the two are exchanged in one step (``exchange.py``), so that a run that
  is killed at any moment leaves all files of the old result or all files of the new one;
- where that is impossible, the files whose bytes differ are replaced one after another, the record
  last. A run that is killed meanwhile leaves files of both results until the next command for this
  folder. The record in place is then still the old one, so that the checksums of what was replaced
  are not those that it names: whatever reads the folder completes it first, or refuses it. This is
  so on Windows, on file systems that cannot exchange folders or have no hard links (networks,
  mostly), where another file system is mounted in the folder, where it has write-protected folders
  or files of other users that cannot be linked, where others have files in the ``.part`` folder,
  and where the folder is the current one or the current one is in it: the current folder of a shell
  stays with the old folder, and would be removed with it.

Last, the record in its place is written without the note that the folder is finished. While it has
that note, the next command for this folder does what is left to do (:func:`finish_interrupted`).
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gpclml._utils.files import sync_folder, temporary_name, write_atomically
from gpclml.cli.exchange import (
    exchange_folders,
    inodes_of_others,
    link_others,
    move_others,
    remove_links,
)
from gpclml.cli.locks import only_run
from gpclml.cli.records import (
    MODEL,
    REPORT,
    FolderKind,
    check_complete,
    check_places,
    files_of,
    is_file,
    is_temporary,
    is_whole,
    own_files,
    read_record,
    record_text,
    sha256_of,
    status_of,
)
from gpclml.errors import DataError

__all__ = ["WorkFolder", "finish_interrupted", "open_work_folder"]

# What the record of a folder says as long as the folder is not settled in its place.
_BEGUN, _FINISHED = {"work": "begun"}, {"work": "finished"}


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
        _finish(out, kind)
        own = {out: own_files(out, kind), _work_path(out): own_files(_work_path(out), kind, True)}
        for folder, files in own.items():
            check_places(folder, {*names, *files}, {name: {files[name]} for name in files})
        try:
            work = WorkFolder(out, kind, own[_work_path(out)])
            _sweep(work.path, [kind.record, *names, *work.files])
            _sweep(out, [kind.record])
        except OSError as error:
            raise _cannot_write(out, error) from error
        yield work


class WorkFolder:
    """The folder in which a result is written before it is put in its place.

    Attributes:
        path: Path of the work folder.
        files: SHA-256 of the files of the command in it, by name.
    """

    def __init__(self, out: Path, kind: FolderKind, files: Mapping[str, str]) -> None:
        self.path: Path = _work_path(out)
        self.files: dict[str, str] = dict(files)
        self._out, self._kind = out, kind
        self.path.mkdir(exist_ok=True)
        self._write_record(_BEGUN)

    def add(self, writers: Mapping[str, Callable[[Path], object]]) -> None:
        """Writes files, each of them whole or not at all."""
        self.remove(name for name in writers if name in self.files)
        check_places(self.path, writers, {})
        written: dict[str, Path] = {}
        try:
            for name, write in writers.items():
                _make_folders(self.path, name)
                written[name] = temporary_name(self.path / name)
                write(written[name])
                _sync_file(written[name])
            # The record comes first: it names every file that the command has written here.
            self.files |= {name: sha256_of(path) for name, path in written.items()}
            self._write_record(_BEGUN)
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
        _remove_files(self.path, {name: self.files[name] for name in names})
        for name in names:
            del self.files[name]

    def discard(self) -> None:
        """Removes the work folder, except what the command did not write."""
        record = read_record(self.path / self._kind.record)
        if record is None or record.get("work") != "begun":
            return  # it is finished, and will be put in its place
        self.remove(list(self.files))
        (self.path / self._kind.record).unlink()
        _remove_folder(self.path)

    def publish(self, content: Mapping[str, Any]) -> None:
        """Puts the folder in its place; files of others that are there stay."""
        own = own_files(self._out, self._kind)
        accepted = {name: {checksum} for name, checksum in own.items()}
        check_places(self._out, {*own, *self.files}, accepted)
        self._write_record({**_FINISHED, **content})
        try:
            _finish(self._out, self._kind)
        except KeyboardInterrupt:  # all is written, and takes only a moment to be in place
            _finish(self._out, self._kind)

    def _write_record(self, content: Mapping[str, Any]) -> None:
        _write(self.path / self._kind.record, record_text(self._kind, content, self.files))


def finish_interrupted(folder: Path) -> None:
    """Completes what a killed run had left to do while it put a finished folder in its place.

    Where nothing can be written, a model whose files are all of one run is left as it is.

    Raises:
        DataError: A file in its place was not written by the command; or the model has files of two
            runs, and nothing can be written.
    """
    folder = folder.absolute()
    for out, kind in ((folder, MODEL), (folder.parent.parent, REPORT)):
        if not any(_finished_record(one, kind) for one in (out, _work_path(out))):
            continue
        out = _place_of(out)
        try:
            with only_run(out):
                _finish(out, kind)
        except DataError:
            raise
        except OSError as error:
            if not is_whole(folder, MODEL):
                said = f"{folder} has files of two runs, since one was killed while it replaced"
                raise DataError(
                    f"{said} them, and {out.parent} cannot be written ({error.strerror}). "
                    f"Use the model once as a user who may write there."
                ) from error


def _finish(out: Path, kind: FolderKind) -> None:
    """Puts a finished work folder in its place, if there is one.

    A run that is killed at any point of this function can be completed by calling it again: the
    record keeps the note that the folder is finished until all is done.
    """
    part = _work_path(out)
    new = _finished_record(part, kind)
    if new is None:
        _settle(out, kind)
        return
    files = files_of(part / kind.record, kind, new)
    # What a run has left that was killed before the exchange.
    _sweep(part, [kind.record])
    status, former = status_of(out), _former(new)
    if status is not None and status.st_ino == former["inode"]:  # else they have been copied
        remove_links(part, out, former["inodes"], _paths(part, {*files, kind.record}))
    old = own_files(out, kind)
    accepted = {name: {old.get(name), files.get(name)} for name in {*old, *files}}
    check_places(out, accepted, accepted)
    check_complete(part, out, files)
    # Files that others have put in the work folder stay where they are.
    alone = _has_only(part, {*files, kind.record})
    if alone and not os.path.lexists(out):
        os.rename(part, out)
    elif not alone or not _exchange(part, out, kind, new, old.keys()):
        _replace_files(part, out, kind, files, old.keys())
    sync_folder(out.parent)
    _settle(out, kind)


def _exchange(
    part: Path, out: Path, kind: FolderKind, record: Mapping[str, Any], old: Collection[str]
) -> bool:
    """Exchanges a finished work folder with the one in its place; False if that is impossible."""
    files, own = record["files"], {kind.record, *old}
    if not all(os.path.lexists(part / name) for name in files):
        return False  # a run was killed while it replaced files one after another
    inodes = []
    try:
        inodes = inodes_of_others(out, own)
        former = {"inode": os.lstat(out).st_ino, "inodes": inodes}
        _write(part / kind.record, record_text(kind, {**record, "former": former}, files))
        link_others(out, part, own, {kind.record, *files})
        exchange_folders(part, out)
    except OSError:
        remove_links(part, out, inodes, _paths(part, {*files, kind.record}))
        return False
    return True


def _replace_files(
    part: Path, out: Path, kind: FolderKind, files: Mapping[str, str], old: Collection[str]
) -> None:
    """Moves the files of a finished work folder to their places, one after another."""
    out.mkdir(exist_ok=True)
    if not os.path.lexists(out / kind.record):  # an empty folder becomes one of this kind
        _put_record(part, out, kind, _BEGUN, {})
    for name in files:
        if is_file(out / name, {files[name]}):  # each file that is replaced is one more moment
            (part / name).unlink(missing_ok=True)  # between the old result and the new one
        elif os.path.lexists(part / name):
            _make_folders(out, name)
            os.replace(part / name, out / name)
    gone = set(old) - set(files)
    for name in gone:
        (out / name).unlink(missing_ok=True)
    _remove_empty(out, gone)
    _remove_empty(part, files)
    for folder in {(out / name).parent for name in files}:
        sync_folder(folder)
    os.replace(part / kind.record, out / kind.record)


def _settle(out: Path, kind: FolderKind) -> None:
    """Does what is left to do when a finished folder is in its place, if that is so.

    What is left of the old folder is removed: the files of the command and the second names of
    files of others. The inode number tells whether the ``.part`` folder is what is
    left of the old one.
    """
    record = _finished_record(out, kind)
    if record is None:
        return
    files = files_of(out / kind.record, kind, record)
    part, former = _work_path(out), _former(record)
    status = status_of(part)
    if status is not None and status.st_ino == former["inode"]:
        old = read_record(part / kind.record)
        if old is not None and kind.is_record(old):
            _remove_files(part, files_of(part / kind.record, kind, old))
            (part / kind.record).unlink()
        _sweep(part, [kind.record])
        remove_links(part, out, former["inodes"])
        move_others(part, out, former["inodes"])
    content = {name: value for name, value in record.items() if name not in ("work", "former")}
    _put_record(part, out, kind, content, files)


def _put_record(
    part: Path, out: Path, kind: FolderKind, content: Mapping[str, Any], files: Mapping[str, str]
) -> None:
    """Writes the record of a folder.

    The new file is made in the work folder and then moved, so that a run that is killed leaves no
    temporary file in the folder itself.
    """
    status = status_of(part)
    work = part if status is None or stat.S_ISDIR(status.st_mode) else out
    work.mkdir(exist_ok=True)
    temporary = temporary_name(work / kind.record)
    _write(temporary, record_text(kind, content, files))
    os.replace(temporary, out / kind.record)
    sync_folder(out)
    _remove_folder(part)


def _former(record: Mapping[str, Any]) -> dict[str, Any]:
    """Inode numbers of the folder that it was exchanged with, and of the files linked there."""
    noted = record.get("former", {})
    return {"inode": noted.get("inode"), "inodes": set(noted.get("inodes", ()))}


def _finished_record(folder: Path, kind: FolderKind) -> dict[str, Any] | None:
    """The record of a folder if it has the note that the folder is finished, else None."""
    if folder.is_symlink() or (folder / kind.record).is_symlink():
        return None
    record = read_record(folder / kind.record)
    if record is None or not kind.is_record(record) or record.get("work") != "finished":
        return None
    return record


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


def _work_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.part") if out.name else out / ".part"


def _paths(folder: Path, names: Iterable[str]) -> set[Path]:
    return {folder / name for name in names}


def _sweep(folder: Path, names: Collection[str]) -> None:
    """Removes temporary files of these names, which a killed run has left."""
    for parent in {(folder / name).parent for name in names}:
        for entry in list(parent.iterdir()) if parent.is_dir() else ():
            if is_temporary(entry, names):
                entry.unlink()


def _has_only(folder: Path, names: Collection[str]) -> bool:
    """Whether a folder holds nothing but these files and their folders."""
    known = _paths(folder, names)
    known |= {folder / parent for name in names for parent in PurePosixPath(name).parents}
    return all(path in known for path in folder.rglob("*"))


def _make_folders(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)


def _remove_files(folder: Path, files: Mapping[str, str]) -> None:
    """Removes files that have the checksums that are given, and folders that become empty by it."""
    for name, checksum in files.items():
        if is_file(folder / name, {checksum}):
            (folder / name).unlink()
    _remove_empty(folder, files)


def _remove_empty(folder: Path, names: Iterable[str]) -> None:
    """Removes the folders that files were in, if nothing is left in them."""
    parents = {parent for name in names for parent in PurePosixPath(name).parents[:-1]}
    for parent in sorted(parents, key=lambda parent: len(parent.parts), reverse=True):
        _remove_folder(folder / parent)


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _cannot_write(out: Path, error: OSError) -> DataError:
    said = f"--out: cannot write in {out.parent} ({error.strerror})"
    return DataError(f"{said}. Name a folder elsewhere.")
