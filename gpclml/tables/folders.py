"""Folders of results: what the command wrote in them, and how it replaces that.

The record of a folder, a JSON file, says what the folder is and which of its files the command
wrote, with their SHA-256: only these are ever replaced or removed, and only while they are as they
were written. A result is written in a work folder beside its place, with ``.part`` after its name,
its record last. Then its files are moved to their places one after another, the record last again.

A run that is killed while it moves them, which takes milliseconds, leaves files of two results. The
record in place is then still the old one, whose checksums are not those of what was replaced, so
that nobody takes them for one result. The next command for the folder moves the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from gpclml import __version__
from gpclml._utils.files import write_atomically
from gpclml.errors import DataError

__all__ = [
    "MODEL",
    "REPORT",
    "FolderKind",
    "files_of",
    "open_work_folder",
    "read_record",
    "sha256_of",
    "work_folder_of",
    "write_record",
]

_VERSION = 2
_MARKER = ".gpclml-work"  # the empty file by which a work folder is known
_NAMES = r"(models/\w+/)?(model\.json|model\.pt|table\.json)|index\.html|model\.py|report\.json"
_LEFT = re.compile(rf"({_NAMES})(\.[0-9a-f]{{32}}\.part)?")  # by a run, also one that was killed


class FolderKind(NamedTuple):
    """A kind of folder: the name of its record, and the value of ``format`` in it."""

    record: str
    format: str

    def is_record(self, record: Mapping[str, Any] | None) -> bool:
        """Whether what was read is a record of this kind."""
        return record is not None and record.get("format") == self.format


MODEL = FolderKind("model.json", "gpclml.TableModel")
REPORT = FolderKind("report.json", "gpclml.Report")


def write_record(
    folder: Path, kind: FolderKind, content: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Writes the record of a folder, with checksums of the files of these names and of itself."""
    record = {
        "format": kind.format,
        "version": _VERSION,
        "written_by": f"gpclml {__version__}",
        **content,
        "files": {name: sha256_of(folder / name) for name in sorted(names)},
    }
    record["checksum"] = _checksum(record)
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    write_atomically(folder / kind.record, lambda file: file.write(text.encode()))


def read_record(path: Path) -> dict[str, Any] | None:
    """The content of a file that may be a record; None if it is unreadable or no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def files_of(path: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files that a record names, by name; refuses a record that was changed."""
    files = record.get("files")
    wrong = ""
    if record.get("version") != _VERSION:
        wrong = "was written by another release"
    elif record.get("checksum") != _checksum(record) or not isinstance(files, dict):
        wrong = "is damaged, or has been changed since gpclml wrote it"
    elif strange := [name for name in files if not re.fullmatch(_NAMES, name)]:
        wrong = f"names the file {strange[0]!r}, which gpclml does not write"
    if wrong:
        raise DataError(f"{path} {wrong}. Move the folder elsewhere, or name another one.")
    assert isinstance(files, dict)
    return files


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def work_folder_of(out: Path) -> Path:
    """The folder in which the result for a folder is written."""
    out = _place_of(out)
    return out.with_name(f"{out.name}.part")


@contextlib.contextmanager
def open_work_folder(out: Path, kind: FolderKind, names: Collection[str]) -> Iterator[Path]:
    """Gives the work folder of ``out``: a new one, or the one that an interrupted run left.

    Within the block no other run writes ``out``. At its end the files that the record in the work
    folder names are put in their places. After an error the work folder is removed, unless it has
    models of a report, from which the next run goes on.

    Raises:
        DataError: ``out`` or the work folder is a link, or is there and is no folder of this kind;
            a file in them has one of the names and was not written by the command, or has been
            changed; another run writes them; or they cannot be written.
    """
    out, part = _place_of(out), work_folder_of(out)
    try:
        # It is tried, since permissions do not bind every user.
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise _cannot_write(out, error) from error
    with _only_run(out):
        _check_work_folder(part)
        _put_in_place(part, out, kind)  # what a killed run has finished
        own = _own_files(out, kind)
        _check_places(out, {*names, *own}, own)
        try:
            part.mkdir(exist_ok=True)
            (part / _MARKER).touch()
        except OSError as error:
            raise _cannot_write(out, error) from error
        try:
            yield part
            own = _own_files(out, kind)
            _check_places(out, {*own, *_finished(part, kind)}, own)
        except BaseException:
            (part / kind.record).unlink(missing_ok=True)
            if not any(part.glob(f"models/*/{MODEL.record}")):
                _remove(part)
            raise
        try:
            _put_in_place(part, out, kind)
        except KeyboardInterrupt:  # all is written, and takes only a moment to be in place
            _put_in_place(part, out, kind)
        _remove(part)


@contextlib.contextmanager
def _only_run(out: Path) -> Iterator[None]:
    """Makes sure that no other run of the command writes a folder within the block.

    A hidden empty file beside the folder is locked. The system releases the lock when the process
    ends, however it ends.
    """
    path = out.with_name(f".{out.name}.gpclml-lock")
    if path.is_symlink() or (path.exists() and (not path.is_file() or path.stat().st_size)):
        said = f"--out: {path} is there and was not written by this command"
        raise DataError(f"{said}. Move it elsewhere, or name another folder.")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        suggestion = "Wait until it has ended, or name another folder."
        raise DataError(f"--out: another run of gpclml is writing {out}. {suggestion}") from error
    except OSError:
        pass  # a file system without locks, as some network drives
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # on Windows an open file cannot be removed
            path.unlink(missing_ok=True)
        lock.release()


def _check_work_folder(part: Path) -> None:
    if part.is_symlink():
        raise DataError(f"--out: {part} is a link. Name the folder itself, or another one.")
    if part.exists() and not (part / _MARKER).is_file() and not _is_empty(part):
        raise _not_ours(part, f"it has no {_MARKER}")


def _own_files(folder: Path, kind: FolderKind) -> dict[str, str]:
    """SHA-256 by name of the files in a folder that the command wrote; refuses other folders."""
    if folder.is_symlink():
        raise DataError(f"--out: {folder} is a link. Name the folder itself, or another one.")
    path = folder / kind.record
    record = read_record(path) if _is_file(path) else None
    if record is not None and kind.is_record(record):
        return files_of(path, record)
    if not folder.exists() or _is_empty(folder):
        return {}
    why = f"it has no {kind.record}" if folder.is_dir() else "it is no folder"
    if path.is_symlink():
        why = f"its {kind.record} is a link"
    elif path.exists():
        why = f"its {kind.record} is of another program"
    raise _not_ours(folder, why)


def _check_places(folder: Path, names: Iterable[str], *accepted: Mapping[str, str]) -> None:
    """Checks that files may be written: nothing that others wrote or changed has their names."""
    for name in sorted(names):
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            place = folder / parent
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise _in_the_way(place, "is there and is no folder")
        path = folder / name
        if not os.path.lexists(path):
            continue
        checksums = [files[name] for files in accepted if name in files]
        if not checksums or not _is_file(path):
            raise _in_the_way(path, "is there and was not written by this command")
        if sha256_of(path) not in checksums:
            raise _in_the_way(path, "has been changed since gpclml wrote it")


def _finished(part: Path, kind: FolderKind) -> dict[str, str]:
    """SHA-256 by name of the files of a finished result; empty if it is not finished."""
    record = read_record(part / kind.record)
    return {} if record is None else files_of(part / kind.record, record)


def _put_in_place(part: Path, out: Path, kind: FolderKind) -> None:
    """Moves the files of a finished work folder to their places.

    It can be called again after it was stopped at any point.
    """
    new = _finished(part, kind)
    if not new:
        return
    # A folder without a record was not there before, or was empty.
    there = out.is_symlink() or os.path.lexists(out / kind.record)
    old = _own_files(out, kind) if there else {}
    _check_places(out, {*old, *new}, old, new)
    for name in new:
        if (part / name).exists():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(part / name, out / name)
    for name in old.keys() - new.keys():
        (out / name).unlink(missing_ok=True)
        _remove_empty_folders((out / name).parent, out)
    os.replace(part / kind.record, out / kind.record)


def _remove(part: Path) -> None:
    """Removes a work folder, except what the command did not write."""
    for folder, _, files in os.walk(part, topdown=False):
        for name in files:
            path = Path(folder, name)
            if _LEFT.fullmatch(path.relative_to(part).as_posix()):
                path.unlink()
        if folder != str(part):
            _remove_empty_folders(Path(folder), part)
    (part / _MARKER).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something is in it
        part.rmdir()


def _remove_empty_folders(folder: Path, root: Path) -> None:
    """Removes a folder and those that it is in, below a root, if nothing is left in them."""
    with contextlib.suppress(OSError):  # something is in it
        while folder != root:
            folder.rmdir()
            folder = folder.parent


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


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


def _not_ours(folder: Path, why: str) -> DataError:
    what = f"{folder} is there and was not written by this command ({why})"
    return DataError(f"--out: {what}. Name another folder.")


def _in_the_way(path: Path, what: str) -> DataError:
    return DataError(f"--out: {path} {what}. Move it elsewhere, or name another folder.")


def _cannot_write(out: Path, error: OSError) -> DataError:
    said = f"--out: cannot write in {out.parent} ({error.strerror})"
    return DataError(f"{said}. Name a folder elsewhere.")


def _checksum(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record without its own checksum."""
    content = {name: value for name, value in record.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
