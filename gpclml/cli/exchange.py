"""Exchanges a new folder with an old one in one step, with the files that others have in there.

The new folder is made beside the old one. First it gets what others have in the old one: a hard
link to each of their files, and folders with the same owners, modes and times
(:func:`link_others`). Then one system call exchanges the names of the two folders
(:func:`exchange_folders`), so that at every moment the whole old folder or the whole new one is in
place. What is left of the old folder is removed afterwards (:func:`remove_links`,
:func:`move_others`); the files of others stay, since each has its second name in the new folder.

If a step is impossible, it raises :exc:`OSError` before the exchange, and the old folder is as it
was.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from gpclml._utils.files import sync_folder

__all__ = ["exchange_folders", "inodes_of_others", "link_others", "move_others", "remove_links"]

_AT_FDCWD = -100  # of Linux: paths count from the current folder
_EXCHANGE = 2  # RENAME_EXCHANGE on Linux, RENAME_SWAP on macOS


def exchange_folders(first: Path, second: Path) -> None:
    """Exchanges the names of two folders of one file system in one step.

    It calls ``renameat2`` of Linux or ``renamex_np`` of macOS through ctypes, since Python has no
    function for it.

    Args:
        first: A folder.
        second: Another one.

    Raises:
        OSError: The system or the file system cannot do it, or a folder is not there.
    """
    names = os.fsencode(first), os.fsencode(second)
    call = _system_call()
    if sys.platform == "linux":
        names = _AT_FDCWD, names[0], _AT_FDCWD, names[1]
    if call(*names, ctypes.c_uint(_EXCHANGE)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(first), None, str(second))


def inodes_of_others(folder: Path, own: Collection[str]) -> list[int]:
    """Inode numbers of the files that others have in a folder; their links have the same numbers.

    Args:
        folder: The folder.
        own: Names of the files in it that are not of others.

    Raises:
        OSError: The folder cannot be exchanged: this process is in it, another file system is
            mounted in it, or it may not be read and changed.
    """
    _system_call()  # raises where there is none
    root, here = os.lstat(folder), Path.cwd()
    if any(os.path.samestat(root, os.stat(one)) for one in (here, *here.parents)):
        # The current folder of this process, and of its shell, would be removed.
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(folder))
    inodes = []
    for name, status in [(".", root), *_entries(folder)]:
        if status.st_dev != root.st_dev:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(folder / name))
        if not stat.S_ISDIR(status.st_mode):
            if name not in own:
                inodes.append(status.st_ino)
        elif not os.access(folder / name, os.R_OK | os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(folder / name))
    return inodes


def link_others(old: Path, new: Path, own: Collection[str], files: Collection[str]) -> None:
    """Gives a folder hard links to the files that others have in another one, and their folders.

    Args:
        old: The folder with the files of others.
        new: The folder that gets the links; it is given the owner, mode and attributes of the other
            one.
        own: Names of the files in the old folder that are not of others.
        files: Names of the files that are in the new folder already.

    Raises:
        OSError: Hard links cannot be made, or owner or mode cannot be set.
    """
    ours = {parent for name in (*own, *files) for parent in Path(name).parents}
    folders = [Path()]
    for name, status in _entries(old):
        path = Path(name)
        if stat.S_ISDIR(status.st_mode):
            folders.append(path)
            if path not in ours:
                (new / path).mkdir(parents=True)
        elif name not in own:
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(old / path, new / path, follow_symlinks=False)
    for path in reversed(folders):  # inner folders first: changes in a folder change its time
        if not (new / path).is_dir():
            continue  # it held only files of the command that the new folder does not have
        status = os.lstat(old / path)
        os.chown(new / path, status.st_uid, status.st_gid)
        shutil.copystat(old / path, new / path)
        if path in ours:
            os.utime(new / path)  # its files are new
        sync_folder(new / path)


def remove_links(
    folder: Path, other: Path, inodes: Collection[int], own: Collection[Path] = ()
) -> bool:
    """Removes links to files of others, and folders that hold nothing else.

    When a file is removed, the system may give its inode number to a new one.

    Args:
        folder: The folder with the links. Before the exchange this is the new one, afterwards what
            is left of the old one.
        other: The folder that it was or is to be exchanged with.
        inodes: Inode numbers of the files.
        own: Paths of files that are no links, whatever their inode numbers.

    Returns:
        Whether there were any.
    """
    found = False
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            inner = remove_links(Path(entry), other / entry.name, inodes, own)
            if inner or _is_folder(other / entry.name):
                _remove_folder(entry.path)
            found |= inner
        elif entry.stat(follow_symlinks=False).st_ino in inodes and Path(entry) not in own:
            os.unlink(entry)
            found = True
    return found


def move_others(old: Path, new: Path, inodes: Collection[int]) -> None:
    """Moves what others wrote in the old folder just before the exchange to the new folder.

    It replaces nothing that others wrote in the new folder since: if the name is taken there, the
    file stays in the old folder.

    Args:
        old: What is left of the old folder when its links are removed.
        new: The folder in its place.
        inodes: Inode numbers of the files that were linked.
    """
    for entry in list(os.scandir(old)):
        place = new / entry.name
        if not os.path.lexists(place):
            os.rename(entry, place)
        elif not entry.is_dir(follow_symlinks=False):
            if os.lstat(place).st_ino in inodes:  # a file that was replaced after it was linked
                os.replace(entry, place)
        elif _is_folder(place):
            move_others(Path(entry), place, inodes)
            _remove_folder(entry.path)


def _system_call() -> Callable[..., int]:
    name = {"linux": "renameat2", "darwin": "renamex_np"}.get(sys.platform)
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None) if name else None
    if call is None:  # another system, or an old C library
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return call


def _entries(folder: Path, within: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Names and status of all entries of a folder and its folders; folders before their entries."""
    for entry in list(os.scandir(folder / within)):
        name = f"{within}/{entry.name}" if within else entry.name
        status = entry.stat(follow_symlinks=False)
        yield name, status
        if stat.S_ISDIR(status.st_mode) and status.st_dev == os.lstat(folder).st_dev:
            yield from _entries(folder, name)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove_folder(path: str) -> None:
    with contextlib.suppress(OSError):  # something is in it
        os.rmdir(path)
