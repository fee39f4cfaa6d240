"""Files that are written whole or not at all, and checkpoints: tensors and primitives in one file.

A checkpoint is what ``torch.save`` writes, with the SHA-256 of all bytes before it as the comment
of the zip archive. So any flipped bit is seen, and ``torch.load`` reads the file as it is.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import pickletools
import re
import secrets
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from gpclml.errors import DataError, UnsupportedError

_LONGEST = 150  # bytes of a file's own name in that of its temporary: file systems allow 255


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


_VERSION = 2

_MARK = b"gpclml sha256 "

_TRAILER = len(_MARK) + 64

_CHUNK = 1 << 20

_SPARE = 1 << 24  # bytes that repeated entries of small tensors may take beyond their storage

_PRIMITIVES = (str, int, float, bool, bytes, type(None))

# What pickles of these contents name. Others that torch takes for safe ask for any memory.
_GLOBALS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch\._utils _rebuild_parameter|"
    r"torch (Bool|Byte|Char|Short|Int|Long|Half|BFloat16|Float|Double|ComplexFloat|ComplexDouble)"
    r"Storage|torch Size|torch device|_codecs encode"
)

_STORED_TYPES = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
     torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
)  # fmt: skip


def write_checkpoint(path: str | os.PathLike[str], kind: str, content: Mapping[str, Any]) -> None:
    """Writes dense tensors and primitives, in lists, tuples and mappings, whole or not at all.

    Tensors are stored as what they show of their storage. ``kind`` names what it is a checkpoint
    of, which :func:`read_checkpoint` compares. A DataError says that the file cannot be written, an
    UnsupportedError that an entry could not be read back.
    """
    stored = _storable({"format": kind, "version": _VERSION, **content}, "content")

    def write(file: BinaryIO) -> None:
        hashed = _Hashed(file)
        torch.save(stored, cast(Any, hashed))  # torch only writes to it and flushes it
        hashed.finish()

    try:
        write_atomically(path, write)
    except (OSError, RuntimeError) as error:
        # Where a write fails torch raises a RuntimeError about positions, the cause behind it.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise DataError(
            f"path: cannot write {path} ({cause}). Give a file in a folder that exists, that you "
            "may write to and whose disk has space left."
        ) from error


def read_checkpoint(
    path: str | os.PathLike[str],
    kind: str,
    map_location: Any = None,
    required: Mapping[str, type | tuple[type, ...]] | None = None,
) -> dict[str, Any]:
    """Reads what :func:`write_checkpoint` wrote, or raises a DataError; runs no code from the file.

    The digest, the size of every record and of every tensor are checked first, so that a file takes
    no more memory than its own size. ``required`` has the entries that must be there, and types.
    """
    if not Path(path).is_file():
        raise DataError(f"path: there is no file {path}. Check the path given to load.")
    try:
        # One open file for all that follows: another run may replace the name meanwhile.
        with open(path, "rb") as file:
            has_digest = _check_digest(file)
            _check_kind(path, _outline(file), kind, required or {})
            if not has_digest:
                raise ValueError("it has no checksum")
            file.seek(0)
            try:
                return torch.load(file, map_location=map_location, weights_only=True)
            except (RuntimeError, MemoryError) as error:  # of the device: the file is sound
                raise DataError(
                    f"path: {path} cannot be loaded here ({str(error).splitlines()[0]}). Give "
                    "map_location, 'cpu' for one, or free some memory."
                ) from error
    except DataError:
        raise
    except Exception as error:  # damaged files and foreign ones raise errors of many kinds
        raise DataError(
            f"path: {path} is damaged or not a checkpoint ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}). Restore a copy of it, or write it again."
        ) from error


class _Hashed:
    """A file in which a zip archive is written, and then its digest as its comment.

    The last two bytes of an archive are the length of its comment. They are held back until then.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._held = file, hashlib.sha256(), b""

    def write(self, data: bytes) -> int:
        rest = memoryview(data).cast("B")
        if len(rest) < 2:
            rest, self._held = memoryview(self._held + bytes(rest)), b""
        self._pass_on(self._held)
        self._pass_on(rest[:-2])
        self._held = bytes(rest[-2:])
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        self._pass_on(struct.pack("<H", _TRAILER))
        self._file.write(_MARK + self._digest.hexdigest().encode())

    def _pass_on(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._file.write(data)


def _storable(value: Any, where: str) -> Any:
    """A copy of containers, in which each tensor has a storage of its size; tensors are shared."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.dtype not in _STORED_TYPES:
            raise UnsupportedError(where, f"a tensor of {value.dtype}", "a dense tensor of numbers")
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        value = value.detach()
        return value if whole else value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        copied = copy.copy(value)  # with its attributes, such as the versions of a state_dict
        for name, entry in value.items():
            copied[name] = _storable(entry, f"{where}[{name!r}]")
        return copied
    if type(value) in (list, tuple):
        return type(value)(_storable(entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if isinstance(value, np.generic):  # as in arguments that a search took from an array
        value = value.item()
    if type(value) in (*_PRIMITIVES, torch.Size, torch.device):
        return value
    expected = "a tensor, a primitive, or a list, tuple or dict of them"
    raise UnsupportedError(where, f"a {type(value).__name__}", expected)


def _check_digest(file: BinaryIO) -> bool:
    """Whether the file has a digest; raises if it is not that of the content."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _TRAILER, 0))
    trailer = file.read()
    file.seek(0)
    if not trailer.startswith(_MARK):
        return False
    digest, left = hashlib.sha256(), size - _TRAILER
    while left > 0 and (chunk := file.read(min(_CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
    file.seek(0)
    if trailer != _MARK + digest.hexdigest().encode():
        raise ValueError("its content is not that of its checksum")
    return True


def _outline(file: BinaryIO) -> Any:
    """The content with tensors that hold nothing; raises where they would outgrow the file.

    ``torch.load`` would inflate compressed records, call what allocates memory, and enlarge a
    storage to the shape that a tensor claims, in files of a few kilobytes.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":  # the older format of torch, never written here
        raise ValueError("it does not start as a checkpoint does")
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("it has compressed records")
        if sum(record.file_size for record in records) > size:
            raise ValueError("its records claim more bytes than it has")
        names = [record.filename for record in records]
        pickles = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or len(set(names)) != len(names):
            raise ValueError("its records have names that do not fit together")
        for code, argument, _ in pickletools.genops(archive.read(pickles[0])):
            if code.name in ("STACK_GLOBAL", "INST") or (
                code.name == "GLOBAL" and not _GLOBALS.fullmatch(str(argument))
            ):
                raise ValueError(f"it names {argument}, which no checkpoint does")
    file.seek(0)
    outline = torch.load(file, map_location="meta", weights_only=True)
    # A tensor that claims more than its storage has enlarges it, which takes no memory here.
    largest = max(record.file_size for record in records)
    for tensor in _tensors(outline):
        stored = tensor.untyped_storage().nbytes()
        if stored > largest or tensor.numel() * tensor.element_size() > stored + _SPARE:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is larger than its record")
    return outline


def _tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors of a content; each object once, so that repeated ones cost nothing."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry, seen)


def _check_kind(
    path: str | os.PathLike[str],
    content: Any,
    kind: str,
    required: Mapping[str, type | tuple[type, ...]],
) -> None:
    if not isinstance(content, dict) or content.get("format") != kind:
        raise DataError(
            f"path: {path} is not a {kind} checkpoint. Give a file that was written as one."
        )
    if content.get("version") != _VERSION:
        raise DataError(
            f"path: {path} has checkpoint version {content.get('version')}, this release reads "
            f"{_VERSION}. Load it with the release that wrote it."
        )
    for name, types in required.items():
        if name not in content or not isinstance(content[name], types):
            found = f"a {type(content[name]).__name__}" if name in content else "nothing"
            raise DataError(
                f"path: {path} has {found} for {name!r}, which a {kind} checkpoint needs. "
                "Restore a copy of it, or write it again."
            )
