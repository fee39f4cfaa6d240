"""Folders that are written whole or not at all, in which the files of others stay as they are.

A folder is made beside its place, with ``.part`` after its name. Its record (``records.py``) names
the files that the command wrote, with their checksums: these alone are ever replaced or removed,
and only while they are as they were written. When all is there the record is written once more, as
finished; from then on the new folder counts, and the files get their places one after another, the
record last. A run that is killed before that leaves the old folder, one that is killed after it
leaves a finished folder that is put in place by whoever comes next (:func:`finish_interrupted`).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gpclml._utils.files import sync_folder, temporary_name, write_atomically
from gpclml.cli.locks import only_run
from gpclml.cli.records import (
    MODEL,
    REPORT,
    FolderKind,
    files_of,
    read_record,
    record_text,
    sha256_of,
)
from gpclml.errors import DataError

__all__ = ["WorkFolder", "finish_interrupted", "open_work_folder"]

_BEGUN, _FINISHED = {"work": "begun"}, {"work": "finished"}  # of folders that are not in place yet
_MEND = "Move it elsewhere, or name another folder."


@contextlib.contextmanager
def open_work_folder(out: Path, kind: FolderKind, names: Collection[str]) -> Iterator[WorkFolder]:
    """Makes the folder in which ``out`` is made, or takes the one that an interrupted run left.

    Within the block no other run writes ``out``. What is left of the work folder stays there.

    Args:
        out: The folder that is to be there in the end.
        kind: What it is to be.
        names: Of the files that may be written in it, its record aside.

    Raises:
        DataError: ``out`` or the work folder is there and no folder of this kind, or a link; a file
            in them has one of the names and is not the command's, or has been changed; another run
            writes them; or they cannot be written.
    """
    out = _place_of(out)
    try:
        tempfile.TemporaryFile(dir=out.parent).close()  # permissions do not tell all
    except OSError as error:
        raise _cannot_write(out, error) from error
    with only_run(out):
        _finish(out, kind)
        own = {out: _own_files(out, kind), _work_path(out): _own_files(_work_path(out), kind, True)}
        for folder, files in own.items():
            _check_places(folder, {*names, *files}, {name: {files[name]} for name in files})
        try:
            work = WorkFolder(out, kind, own[_work_path(out)])
            _sweep(work.path, [kind.record, *names, *work.files])
            _sweep(out, [kind.record])
        except OSError as error:
            raise _cannot_write(out, error) from error
        yield work


class WorkFolder:
    """The folder in which another is made.

    Args:
        out: The folder that is to be there in the end.
        kind: What it is to be.
        files: SHA-256 of the command's files that are in the work folder, by name.

    Attributes:
        path: Where it is.
        files: SHA-256 of the files in it, by name.
    """

    def __init__(self, out: Path, kind: FolderKind, files: Mapping[str, str]) -> None:
        self.path = _work_path(out)
        self.files = dict(files)
        self._out, self._kind = out, kind
        self.path.mkdir(exist_ok=True)
        self._write_record(_BEGUN)

    def add(self, writers: Mapping[str, Callable[[Path], object]]) -> None:
        """Writes files, each whole or not at all.

        Args:
            writers: By name, what writes the file to the path that it is given.

        Raises:
            DataError: Another file is there.
        """
        self.remove(name for name in writers if name in self.files)
        _check_places(self.path, writers, {})
        written: dict[str, Path] = {}
        try:
            for name, write in writers.items():
                _make_folders(self.path, name)
                written[name] = temporary_name(self.path / name)
                write(written[name])
                _sync_file(written[name])
            # Noted before they have their names: no file is there that is not known to be ours.
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
        """Writes a text file, as :meth:`add` does.

        Args:
            name: Of the file.
            text: What it is to hold.
        """
        self.add({name: lambda path: path.write_bytes(text.encode())})

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, but none that has been changed.

        Args:
            names: Of files in :attr:`files`.
        """
        names = list(names)
        for name in names:
            if _is_file(self.path / name, {self.files[name]}):
                (self.path / name).unlink()
        _remove_empty(self.path, names)
        for name in names:
            del self.files[name]

    def discard(self) -> None:
        """Removes the work folder, but nothing in it that the command did not write."""
        record = read_record(self.path / self._kind.record)
        if record is None or record.get("work") != "begun":
            return  # finished: it is what counts
        self.remove(list(self.files))
        (self.path / self._kind.record).unlink()
        _remove_folder(self.path)

    def publish(self, content: Mapping[str, Any]) -> None:
        """Gives the finished folder its name; files of others that are in its place stay.

        Args:
            content: What its record says.

        Raises:
            DataError: A file in its place is no longer as it was when the work folder was opened.
        """
        own = _own_files(self._out, self._kind)
        accepted = {name: {checksum} for name, checksum in own.items()}
        _check_places(self._out, {*own, *self.files}, accepted)
        self._write_record({**_FINISHED, **content})
        try:
            _finish(self._out, self._kind)
        except KeyboardInterrupt:  # too late: all is written, and takes a moment to be in place
            _finish(self._out, self._kind)

    def _write_record(self, content: Mapping[str, Any]) -> None:
        _write(self.path / self._kind.record, record_text(self._kind, content, self.files))


def finish_interrupted(folder: Path) -> None:
    """Puts in place what a run had finished that was killed while it did so.

    Args:
        folder: Of a model, which may be one of a report.

    Raises:
        DataError: A file in its place is not the command's, or cannot be written.
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
            raise _cannot_write(out, error) from error


def _finish(out: Path, kind: FolderKind) -> None:
    """Puts a finished work folder in its place, if there is one; may be done again at any point.

    A finished work folder says so in its record, and a folder in its place does not, so that none
    is taken for the other, whatever they are called.
    """
    part = _work_path(out)
    new = _finished_record(part, kind)
    if new is None:
        _settle(out, out, kind)
        return
    files = files_of(part / kind.record, kind, new)
    if not os.path.lexists(out) and _has_only(part, {*files, kind.record}):
        _check_complete(part, part, files)
        os.rename(part, out)
        sync_folder(out.parent)
        _settle(out, out, kind)
        return
    old = _own_files(out, kind)
    accepted = {name: {old.get(name), files.get(name)} for name in {*old, *files}}
    _check_places(out, accepted, accepted)
    _check_complete(part, out, files)
    out.mkdir(exist_ok=True)
    if not os.path.lexists(out / kind.record):  # an empty folder becomes one of this kind
        _write(out / kind.record, record_text(kind, _BEGUN, {}))
    for name in files:
        if os.path.lexists(part / name):
            _make_folders(out, name)
            os.replace(part / name, out / name)
    for name in old.keys() - files.keys():
        (out / name).unlink(missing_ok=True)
    _remove_empty(out, old.keys() - files.keys())
    _remove_empty(part, files)
    for folder in {(out / name).parent for name in files}:
        sync_folder(folder)
    _settle(part, out, kind)
    (part / kind.record).unlink()
    _remove_folder(part)


def _settle(folder: Path, out: Path, kind: FolderKind) -> None:
    """Writes what a finished record in a folder says, if it is one, as the record of ``out``."""
    record = _finished_record(folder, kind)
    if record is None:
        return
    files = files_of(folder / kind.record, kind, record)
    del record["work"]
    _write(out / kind.record, record_text(kind, record, files))
    _sweep(out, [kind.record])


def _finished_record(folder: Path, kind: FolderKind) -> dict[str, Any] | None:
    """The record of a folder that is finished, and not in its place as far as the record says."""
    if folder.is_symlink() or (folder / kind.record).is_symlink():
        return None
    record = read_record(folder / kind.record)
    if record is None or not kind.is_record(record) or record.get("work") != "finished":
        return None
    return record


def _place_of(out: Path) -> Path:
    """Where a folder is, by a path that has no links but perhaps itself."""
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


def _own_files(folder: Path, kind: FolderKind, work: bool = False) -> dict[str, str]:
    """SHA-256 of the files in a folder, or in a work folder, that the command wrote, by name.

    Raises:
        DataError: The folder is not one that the command wrote, nor empty.
    """
    status = _status(folder)
    if status is None:
        return {}
    if stat.S_ISLNK(status.st_mode):
        raise DataError(f"--out: {folder} is a link. Name the folder itself, or another one.")
    path = folder / kind.record
    record = read_record(path) if _is_file(path) else None
    if record is not None and kind.is_record(record):
        if not work or "work" in record:
            return files_of(path, kind, record)
        why = f"its {kind.record} is of a folder in its place"  # whose name happens to end so
    elif stat.S_ISDIR(status.st_mode):
        if all(_is_temporary(entry, [kind.record]) for entry in folder.iterdir()):
            return {}
        link = f"its {kind.record} is a link" if path.is_symlink() else ""
        lacks = f"its {kind.record} is of another program" if os.path.lexists(path) else ""
        why = link or lacks or f"it has no {kind.record}"
    else:
        why = "it is no folder"
    what = f"{folder} is there and was not written by this command ({why})"
    raise DataError(f"--out: {what}. Name another folder.")


def _check_places(
    folder: Path, names: Iterable[str], accepted: Mapping[str, Collection[str | None]]
) -> None:
    """Raises where a file would take the place of one that the command did not write as it is."""
    for name in sorted(names):
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            status = _status(folder / parent)
            if status is not None and not stat.S_ISDIR(status.st_mode):
                raise DataError(f"--out: {folder / parent} is there and is no folder. {_MEND}")
        path = folder / name
        if not os.path.lexists(path):
            continue
        if name not in accepted or not _is_file(path):
            raise DataError(f"--out: {path} is there and was not written by this command. {_MEND}")
        if not _is_file(path, accepted[name]):
            raise DataError(f"--out: {path} has been changed since gpclml wrote it. {_MEND}")


def _check_complete(part: Path, out: Path, files: Mapping[str, str]) -> None:
    for name, checksum in files.items():
        place = part / name if os.path.lexists(part / name) else out / name
        if not _is_file(place, {checksum}):
            said = f"{place} is missing or has been changed since gpclml wrote it"
            raise DataError(f"--out: {said}. Remove {part}, and run the command again.")


def _status(path: Path) -> os.stat_result | None:
    """What a name is, without following it if it is a link; None where there is nothing."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_file(path: Path, checksums: Collection[str | None] | None = None) -> bool:
    """Whether there is a plain file, with one of the checksums if some are given."""
    status = _status(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return False
    return checksums is None or sha256_of(path) in checksums


def _is_temporary(path: Path, names: Iterable[str]) -> bool:
    """Whether a file is one of those that a killed run leaves behind, of these names."""
    stems = "|".join(re.escape(PurePosixPath(name).name) for name in names)
    return bool(re.fullmatch(rf"({stems})(\.[0-9a-f]{{32}}\.part)+", path.name)) and _is_file(path)


def _sweep(folder: Path, names: Collection[str]) -> None:
    """Removes the temporary files that a killed run left."""
    for parent in {(folder / name).parent for name in names}:
        for entry in list(parent.iterdir()) if parent.is_dir() else ():
            if _is_temporary(entry, names):
                entry.unlink()


def _has_only(folder: Path, names: Collection[str]) -> bool:
    """Whether nothing is in a folder but these files and the folders that they are in."""
    known = {folder / name for name in names}
    known |= {folder / parent for name in names for parent in PurePosixPath(name).parents}
    return all(path in known for path in folder.rglob("*"))


def _make_folders(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)


def _remove_empty(folder: Path, names: Iterable[str]) -> None:
    """Removes the folders of removed files, but none in which something is left."""
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
