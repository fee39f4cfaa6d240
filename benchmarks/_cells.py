"""A cell of a grid: its key, and what came of it."""

from __future__ import annotations

import hashlib
import json
import socket
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpclml.errors import ArgumentError

__all__ = ["CellFunction", "Outcome", "canonical_json", "cell_key", "plan_cells"]

CellFunction = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What came of one cell: metrics as JSON text, or the error that ended it.

    Args:
        key: Key of the cell.
        seconds: Wall time of the cell function; of a batch, the cell's equal share.
        host: Name of the machine that computed it.
        metrics: JSON text of the metrics; None if the cell failed.
        error_type: Class name of the error.
        error_message: Text of the error.
        traceback: Where the error arose.
    """

    key: str
    seconds: float
    host: str
    metrics: str | None = None
    error_type: str | None = None
    error_message: str | None = None
    traceback: str | None = None

    @classmethod
    def done(cls, key: str, metrics: object, configuration: str, seconds: float) -> Outcome:
        """What came of a cell that returned, in this process; metrics that cannot be kept fail.

        Args:
            key: Key of the cell.
            metrics: What the cell function returned.
            configuration: Configuration of the cell as JSON text.
            seconds: Wall time.
        """
        try:
            text = _metrics_json(metrics, json.loads(configuration))
        except Exception as error:
            return cls.failed(key, error, seconds)
        return cls(key, seconds, socket.gethostname(), metrics=text)

    @classmethod
    def failed(cls, key: str, error: BaseException, seconds: float) -> Outcome:
        """What came of a cell that an error ended, in this process."""
        return cls(
            key,
            seconds,
            socket.gethostname(),
            error_type=type(error).__name__,
            error_message=_storable(str(error)),
            traceback=_storable("".join(traceback.format_exception(error))),
        )


def canonical_json(value: object) -> str:
    """JSON text that is equal for equal values, whatever the order of their keys.

    Floats are written by ``repr``, so they return exactly; NaN and infinities are written
    as ``NaN`` and ``Infinity``, which Python's own ``json`` reads back.

    Raises:
        TypeError: If a value is no JSON value, or a key is no string.
    """
    _check_keys(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def cell_key(configuration: Mapping[str, Any], code_version: str) -> str:
    """SHA-256 of a configuration together with the version of the code, hexadecimal."""
    text = canonical_json({"code": code_version, "cell": dict(configuration)})
    return hashlib.sha256(text.encode()).hexdigest()


def plan_cells(cells: Iterable[Mapping[str, Any]], code_version: str) -> dict[str, str]:
    """The configurations of a grid as JSON text by key, in order; equal cells are one.

    Raises:
        ArgumentError: If there is no cell, or one is not a JSON-serialisable dictionary, or
            has a name that starts with an underscore (those are the columns of the table).
    """
    plan = {}
    for place, cell in enumerate(cells):
        if not isinstance(cell, Mapping):
            raise ArgumentError(f"cells[{place}]", repr(cell), "a dictionary", "Name its settings.")
        try:
            plan[cell_key(cell, code_version)] = canonical_json(dict(cell))
        except (TypeError, ValueError) as error:
            mend = "Use strings, numbers, booleans, None, lists and dictionaries with string keys."
            raise ArgumentError(f"cells[{place}]", error, "JSON values", mend) from None
        _check_names(f"cells[{place}]", cell)
    if not plan:
        raise ArgumentError("cells", "no cell", "at least one", "Check what selects them.")
    return plan


def _metrics_json(metrics: object, configuration: Mapping[str, Any]) -> str:
    if not isinstance(metrics, Mapping):
        mend = "Let the cell function return {name: value}."
        raise ArgumentError("metrics", type(metrics).__name__, "a dictionary", mend)
    _check_keys(metrics)
    _check_names("metrics", metrics)
    shared = sorted(set(metrics) & set(configuration))
    if shared:
        raise ArgumentError("metrics", shared, "names not used by the cell", "Rename them.")
    return json.dumps(dict(metrics), separators=(",", ":"), default=_plain)


def _plain(value: Any) -> object:
    """Tensors and arrays as numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a metric of type {type(value).__name__} is not JSON serialisable")


def _check_keys(value: object) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):  # json would write 1 and "1" alike
                raise TypeError(f"the key {key!r}, which is not a string")
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)


def _check_names(argument: str, names: Iterable[str]) -> None:
    reserved = sorted(name for name in names if name.startswith("_"))
    if reserved:
        raise ArgumentError(argument, reserved, "names without leading underscore", "Rename them.")


def _storable(text: str) -> str:
    """Text without the lone surrogates that SQLite cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()
