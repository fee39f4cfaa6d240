"""Measurements that are kept as soon as they are finished, so that a part that is cut loses one."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpclml.errors import DataError

__all__ = ["FAILED", "LostDeviceError", "Records", "Row", "message_of"]

Row = dict[str, Any]
FAILED = "error"
"""Column of the reason why a method has no figures."""

_MOST_CHARACTERS = 300


class LostDeviceError(RuntimeError):
    """A GPU fails at everything that this process asks of it."""


class Records:
    """The finished measurements of one part, a line of JSON each.

    Args:
        folder: Where the file of the part is, which is made if it is not there.
        part: Name of the part.
        minutes: After so many minutes from now nothing new is started; None for no limit.
        retry: Whether what failed before is measured again.
        without_cpu: Whether nothing is measured on the CPU beside a GPU.

    Raises:
        DataError: The file cannot be read or written.
    """

    def __init__(
        self, folder: Path, part: str, minutes: float | None = None, retry: bool = False,
        *, without_cpu: bool = False,
    ) -> None:  # fmt: skip
        self.part, self._without_cpu = part, without_cpu
        self.file = folder / f"{part}.jsonl"
        self.left_out = 0
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._retry = retry
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._entries = {_name(one["key"]): one for one in _lines_of(self.file)}
        except OSError as error:
            text = f"{self.file}: cannot be used ({error}). Name another folder by --results."
            raise DataError(text) from error

    def measure(self, key: Mapping[str, Any], function: Callable[[], Sequence[Row]]) -> None:
        """Keeps the rows of a measurement under its key, unless they are there or time is over.

        Args:
            key: What is measured; is part of each row.
            function: Makes the rows. An error is a row with its first line.

        Raises:
            LostDeviceError: The GPU fails for good, as after an illegal access of its memory.
        """
        name = _name(key)
        if self._is_left_out(key):
            return
        if name in self._entries and not self._again(self._entries[name]):
            return
        if self._end is not None and time.monotonic() >= self._end:
            self.left_out += 1
            return
        start = time.perf_counter()
        try:
            rows = list(function())
        except Exception as error:  # whatever it is, the other measurements go on
            rows = [{FAILED: message_of(error)}]
        self._keep(key, rows, time.perf_counter() - start)
        release_memory()

    def _is_left_out(self, key: Mapping[str, Any]) -> bool:
        return self._without_cpu and key.get("device") == "cpu"

    def skip(self, key: Mapping[str, Any], reason: str) -> None:
        """Says that a measurement is not made, and why."""
        if _name(key) not in self._entries and not self._is_left_out(key):
            self._keep(key, [{"skipped": reason}], 0.0)

    def rows(self) -> list[Row]:
        """All rows with the part and their keys."""
        return [
            {"part": self.part, **entry["key"], **row}
            for entry in self._entries.values()
            for row in entry["rows"]
        ]

    def _again(self, entry: Row) -> bool:
        failed = self._retry and any(FAILED in row for row in entry["rows"])
        return failed or any("skipped" in row for row in entry["rows"])

    def _keep(self, key: Mapping[str, Any], rows: Sequence[Row], seconds: float) -> None:
        entry = {"key": dict(key), "rows": list(rows), "seconds": round(seconds, 2)}
        _append_line(self.file, entry)
        self._entries[_name(key)] = entry
        told = ", ".join(f"{name} {value}" for name, value in key.items())
        print(f"\n{told} ({seconds:.1f} s)", flush=True)
        for row in rows:
            print("  " + "  ".join(map(_told, row.items())), flush=True)


def _append_line(file: Path, entry: Mapping[str, Any]) -> None:
    """Adds a line of JSON, also behind one that was cut while it was written."""
    with file.open("a+b") as lines:
        if lines.tell():
            lines.seek(-1, os.SEEK_END)
            lines.write(b"" if lines.read(1) == b"\n" else b"\n")
        lines.write(json.dumps(entry).encode() + b"\n")


def _lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, if there is one; a line that was cut is passed over."""
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True)


def _told(item: tuple[str, Any]) -> str:
    name, value = item
    return f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"


def message_of(error: Exception) -> str:
    """The kind of an error and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MOST_CHARACTERS]


def release_memory() -> None:
    """Gives a GPU's memory back between measurements.

    Raises:
        LostDeviceError: It fails at whatever it is asked.
    """
    if not torch.cuda.is_initialized():
        return
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        text = f"the GPU fails at everything now ({message_of(error)}). Run the part again."
        raise LostDeviceError(text) from error
