"""Locks a folder, so that one run of the command at a time writes it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gpclml.errors import DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

__all__ = ["only_run"]

_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


@contextlib.contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Makes sure that no other run of the command writes a folder within the block.

    An empty hidden file beside the folder is locked. The system releases the lock when the process
    ends, however it ends. The file is removed at the end of the block; a file that a killed run
    left is used again. On file systems without locks (some network drives) nothing is locked.

    Raises:
        DataError: Another run writes the folder, or the file is there and was not written by the
            command.
        OSError: The file cannot be made.
    """
    path = out.with_name(f".{out.name}.gpclml-lock")
    handle = _opened(path, out)
    try:
        yield
    finally:
        if os.name == "posix":  # while it is still locked, so that no other run has it
            path.unlink(missing_ok=True)
        os.close(handle)
        if os.name != "posix":  # an open file cannot be removed there
            with contextlib.suppress(OSError):
                path.unlink()


def _opened(path: Path, out: Path) -> int:
    """The lock file, open and locked."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            handle = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _not_ours(path) from error
            raise
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size:
                raise _not_ours(path)
            _lock(handle, out)
            # The run that had it may have removed it between the opening and the locking.
            if os.path.samestat(status, os.lstat(path)):
                return handle
            os.close(handle)
        except FileNotFoundError:
            os.close(handle)
        except BaseException:
            os.close(handle)
            raise


def _lock(handle: int, out: Path) -> None:
    try:
        if fcntl is None:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # pyright: ignore
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            suggestion = "Wait until it has ended, or name another folder."
            raise DataError(
                f"--out: another run of gpclml is writing {out}. {suggestion}"
            ) from error
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise


def _not_ours(path: Path) -> DataError:
    said = f"--out: {path} is there and was not written by this command"
    return DataError(f"{said}. Move it elsewhere, or name another folder.")
