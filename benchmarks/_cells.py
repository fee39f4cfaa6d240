"""A cell of a grid: its key, how it is computed, and what comes of it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks._process import Process
from gpclml.errors import ArgumentError

__all__ = ["Outcome", "canonical_json", "cell_key", "compute_cell", "plan_cells"]

CellFunction = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What came of one cell: metrics as JSON text, or the error that ended it.

    Args:
        key: Key of the cell.
        seconds: Wall time of the cell function.
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


def compute_cell(
    function: CellFunction, key: str, configuration: str, threads: int, driver: Process
) -> Outcome:
    """Computes one cell, in any process, and returns metrics or error; never raises either.

    Args:
        function: The cell function.
        key: Key of the cell.
        configuration: Its configuration as JSON text.
        threads: Number of threads for torch and BLAS; what was set before is restored.
        driver: The process that hands out cells; a worker on its machine ends with it.
    """
    _end_with(driver)
    start = time.perf_counter()
    host = socket.gethostname()
    try:
        with _threads(threads):
            start = time.perf_counter()
            cell = json.loads(configuration)
            metrics = _metrics_json(function(cell), json.loads(configuration))
    except (Exception, SystemExit) as error:
        return Outcome(
            key,
            time.perf_counter() - start,
            host,
            error_type=type(error).__name__,
            error_message=_storable(str(error)),
            traceback=_storable("".join(traceback.format_exception(error))),
        )
    return Outcome(key, time.perf_counter() - start, host, metrics=metrics)


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


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Sets the threads of torch and of the BLAS libraries, and restores them."""
    import threadpoolctl
    import torch

    before = torch.get_num_threads()
    with threadpoolctl.threadpool_limits(count):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _end_with(driver: Process) -> None:
    """Ends this worker when its driver is gone: a killed driver leaves no work behind."""
    if driver.pid == os.getpid():
        return
    if driver.lives() is False:  # this cell was still in the queue
        os._exit(1)
    if os.getppid() == driver.pid:
        _watch(driver.pid)


@functools.cache
def _watch(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-driver").start()
