"""Files that are written whole or not at all, and checkpoints: tensors and primitives in one file.

A checkpoint is what ``torch.save`` writes, a zip archive with a checksum of each record.
"""

from __future__ import annotations

import copy
import os
import secrets
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from gpclml.errors import DataError, UnsupportedError

_VERSION = 2
_RESTORE = "Restore a copy of it, or write it again."
_PRIMITIVES = (str, int, float, bool, bytes, type(None), torch.Size, torch.device)


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Writes a file whole or not at all, also where the process is killed or the power fails.

    A temporary file is written beside it, synced to the disk, and renamed. If anything fails
    before, the temporary file is removed and the old file stays; a killed process leaves a
    ``.part`` file. The mode is that of the replaced file, or follows the umask. A link is replaced
    and not followed.
    """
    path = Path(path)
    temporary = path.with_name(f"gpclml.{secrets.token_hex(16)}.part")
    try:
        with open(temporary, "xb") as file:  # "x" follows no link, and the mode is by the umask
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if path.is_file() and not path.is_symlink():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_checkpoint(path: str | os.PathLike[str], kind: str, content: Mapping[str, Any]) -> None:
    """Writes dense tensors and primitives, in lists, tuples and mappings, whole or not at all.

    ``kind`` names what it is a checkpoint of, which :func:`read_checkpoint` compares. A DataError
    says that the file cannot be written, an UnsupportedError that an entry could not be read back.
    """
    stored = _storable({"format": kind, "version": _VERSION, **content}, "content")
    try:
        write_atomically(path, lambda file: torch.save(stored, file))
    except (OSError, RuntimeError) as error:
        # Where a write fails torch raises a RuntimeError about positions, the cause behind it.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        advice = "Give a file in a folder that exists, that you may write to and whose disk has"
        raise DataError(f"path: cannot write {path} ({cause}). {advice} space left.") from error


def read_checkpoint(
    path: str | os.PathLike[str],
    kind: str,
    map_location: Any = None,
    required: Mapping[str, type | tuple[type, ...]] | None = None,
) -> dict[str, Any]:
    """Reads what :func:`write_checkpoint` wrote, or raises a DataError; runs no code from the file.

    ``required`` has the entries that must be there, and their types.
    """
    if not Path(path).is_file():
        raise DataError(f"path: there is no file {path}. Check the path given to load.")
    try:
        # One open file for all that follows: another run may replace the name meanwhile.
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            if archive.testzip() is not None:  # torch does not compare the checksums
                raise ValueError("its content is not that of its checksum")
            file.seek(0)
            content = torch.load(file, map_location=map_location, weights_only=True)
    except (RuntimeError, MemoryError) as error:  # of the device: the file is sound
        advice = "Give map_location, 'cpu' for one, or free some memory."
        said = str(error).splitlines()[0]
        raise DataError(f"path: {path} cannot be loaded here ({said}). {advice}") from error
    except Exception as error:  # damaged files and foreign ones raise errors of many kinds
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        got = f"path: {path} is damaged or not a checkpoint ({said})"
        raise DataError(f"{got}. {_RESTORE}") from error
    if not isinstance(content, dict) or content.get("format") != kind:
        advice = "Give a file that was written as one."
        raise DataError(f"path: {path} is not a {kind} checkpoint. {advice}")
    if (version := content.get("version")) != _VERSION:
        got = f"path: {path} has checkpoint version {version}, this release reads {_VERSION}"
        raise DataError(f"{got}. Load it with the release that wrote it.")
    for name, types in (required or {}).items():
        if name not in content or not isinstance(content[name], types):
            got = f"a {type(content[name]).__name__}" if name in content else "nothing"
            needed = f"which a {kind} checkpoint needs"
            raise DataError(f"path: {path} has {got} for {name!r}, {needed}. {_RESTORE}")
    return content


def _storable(value: Any, where: str) -> Any:
    """A copy of containers, in which no tensor is a view that brings a larger storage along."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        value = value.detach()
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        copied = copy.copy(value)  # with its attributes, such as the versions of a state_dict
        for name, entry in value.items():
            copied[name] = _storable(entry, f"{where}[{name!r}]")
        return copied
    if type(value) in (list, tuple):
        return type(value)(_storable(entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if isinstance(value, np.generic):  # as in arguments that a search took from an array
        value = cast(Any, value).item()
    if type(value) in _PRIMITIVES:
        return value
    expected = "a tensor, a primitive, or a list, tuple or dict of them"
    raise UnsupportedError(where, f"a {type(value).__name__}", expected)
