"""Files that are written whole or not at all, and their names as text for a terminal."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_LONGEST = 150  # bytes of a file's own name in that of its temporary: file systems allow 255

# Controls (also those above ASCII), marks that turn the direction of what follows, separators of
# lines, and surrogates, which stand for the bytes of a name that is not UTF-8.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Writes a file whole or not at all, also where the process is killed or the power fails.

    A temporary file is written beside it, synced to the disk, and renamed. If anything fails
    before, the temporary file is removed and the old file stays; a killed process leaves a
    ``.part`` file. The mode is that of the replaced file, or follows the umask. A link is replaced
    and not followed.
    """
    path = Path(path)
    name = os.fsencode(path.name)[:_LONGEST].decode(errors="ignore")
    temporary = path.with_name(f"{name}.{secrets.token_hex(16)}.part")
    try:
        with open(temporary, "xb") as file:  # "x" follows no link, and the mode is by the umask
            write(file)
            _keep_mode(path, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Brings the names in a folder to the disk, where the system can do so."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # of a folder that may be written and not listed
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without it
            raise
    finally:
        os.close(handle)


def _keep_mode(path: Path, file: BinaryIO) -> None:
    """Gives a new file the permissions of the plain file that it is to replace, if there is one."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode) and hasattr(os, "fchmod"):
        os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode) & 0o777)


def printable(text: str) -> str:
    r"""The text in one line, in which controls are written as escapes such as ``\x1b``.

    What names of files and columns hold can so neither colour, move nor forge anything.
    """
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"  # the byte itself
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
