"""Cells of a grid: their keys, which are computed together, and what a worker makes of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks._process import keep_freed_memory, variables
from gpclml.errors import ArgumentError

__all__ = [
    "Batches", "Cell", "CellFunction", "Row", "Work", "canonical_json", "cell_key", "done_row",
    "failed_row", "group_cells", "plan_cells",
]  # fmt: skip

CellFunction = Callable[[dict[str, Any]], Mapping[str, Any]]
BatchFunction = Callable[[list[dict[str, Any]]], list[Mapping[str, Any] | Exception]]


class Cell(NamedTuple):
    """A cell of a grid: its key in the results file, and its configuration as JSON text."""

    key: str
    configuration: str


@dataclass(frozen=True)
class Batches:
    """How cells are computed several at a time.

    The results must be those of the cell function, to numerical tolerance: cells are saved
    under the same keys.

    Args:
        function: Importable ``function(configurations) -> answers``: one entry a cell, in
            order, its metrics or the exception that ended it. When the function itself
            raises, each cell of the batch is computed alone by the cell function.
        label: Hashable label of a configuration; cells of one label may be computed together.
        size: Most cells in a batch with this one; 1: alone, by the cell function.
    """

    function: BatchFunction
    label: Callable[[dict[str, Any]], Hashable]
    size: Callable[[dict[str, Any]], int]


Row = dict[str, Any]
"""What came of a cell, of JSON values: its key, configuration and seconds, and either its metrics
or the error that ended it."""


def done_row(cell: Cell, metrics: object, seconds: float) -> Row:
    """The row of a cell that returned in this process; it fails if its metrics cannot be saved."""
    row = _row(cell, seconds)
    try:
        return row | {"metrics": _plain_metrics(metrics, row["configuration"])}
    except Exception as error:
        return failed_row(cell, error, seconds)


def failed_row(cell: Cell, error: BaseException, seconds: float) -> Row:
    """The row of a cell that an error ended."""
    texts = {
        "_error_type": type(error).__name__, "_error_message": str(error),
        "_traceback": "".join(traceback.format_exception(error)),
    }  # fmt: skip
    return _row(cell, seconds) | {"error": texts}


def _row(cell: Cell, seconds: float) -> Row:
    configuration = json.loads(cell.configuration)
    return {"key": cell.key, "configuration": configuration, "seconds": seconds}


@dataclass(frozen=True)
class Work:
    """Computes cells, in any process.

    Args:
        function: The cell function.
        batch_function: Computes several cells; None if every task is one cell.
        environment: Environment variables set meanwhile, and restored.
        check: Called first; raises where this worker has other code than the driver.
    """

    function: CellFunction
    batch_function: BatchFunction | None
    environment: Mapping[str, str]
    check: Callable[[], None] | None = None

    def __call__(self, cells: list[Cell]) -> list[Row] | Exception:
        """What came of the cells, in order, or what says why a whole batch failed.

        Raises:
            OtherCodeError: If this worker has other code than the driver.
        """
        if self.check is not None:
            self.check()
        keep_freed_memory()
        configurations = [json.loads(cell.configuration) for cell in cells]
        with _one_thread(), variables(self.environment):
            start = time.perf_counter()
            try:
                if len(cells) == 1 or self.batch_function is None:
                    answers = [self.function(configuration) for configuration in configurations]
                else:
                    answers = self.batch_function(configurations)
                pairs = list(zip(cells, answers, strict=True))
            except (Exception, SystemExit) as error:
                if len(cells) == 1:
                    return [failed_row(cells[0], error, time.perf_counter() - start)]
                return RuntimeError(f"{type(error).__name__}: {error}")  # any process can read it
            share = (time.perf_counter() - start) / len(cells)
        return [
            (failed_row if isinstance(answer, Exception) else done_row)(cell, answer, share)
            for cell, answer in pairs
        ]


def canonical_json(value: object) -> str:
    """JSON text that is equal for equal values, whatever the order of their keys.

    Floats are written by ``repr``, so they return exactly; NaN and infinities are written
    as ``NaN`` and ``Infinity``, which Python's own ``json`` reads back.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def cell_key(configuration: Mapping[str, Any], code_version: str) -> str:
    """SHA-256 of a configuration together with the version of the code, hexadecimal."""
    text = canonical_json({"code": code_version, "cell": dict(configuration)})
    return hashlib.sha256(text.encode()).hexdigest()


def plan_cells(cells: Iterable[Mapping[str, Any]], code_version: str) -> list[Cell]:
    """The cells of a grid in order; equal configurations are one.

    Raises:
        ArgumentError: If there is no cell.
    """
    plan = {cell_key(cell, code_version): canonical_json(dict(cell)) for cell in cells}
    if not plan:
        raise ArgumentError("cells", "no cell", "at least one", "Check what selects them.")
    return [Cell(*item) for item in plan.items()]


def group_cells(cells: Iterable[Cell], batches: Batches | None) -> list[list[Cell]]:
    """Cells in groups of one label, none above its size, in the order of their first cells."""
    groups, unfilled = [], {}
    for cell in cells:
        kind = cell, 1
        if batches is not None:
            configuration = json.loads(cell.configuration)
            kind = batches.label(configuration), batches.size(configuration)
        if len(unfilled.get(kind, ())) in (0, kind[1]):
            groups.append([])
            unfilled[kind] = groups[-1]
        unfilled[kind].append(cell)
    return groups


def _plain_metrics(metrics: object, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as JSON gives them back."""
    if not isinstance(metrics, Mapping):
        fix = "Let the cell function return {name: value}."
        raise ArgumentError("metrics", type(metrics).__name__, "a dictionary", fix)
    shared = sorted(set(metrics) & set(configuration))
    if shared:
        raise ArgumentError("metrics", shared, "names not used by the cell", "Rename them.")
    return json.loads(json.dumps(dict(metrics), default=_plain))


def _plain(value: Any) -> object:
    """Tensors and arrays as numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a metric of type {type(value).__name__} is not JSON serialisable")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Within the block torch and the BLAS libraries have one thread, whatever number of jobs."""
    import threadpoolctl
    import torch

    before = torch.get_num_threads()
    with threadpoolctl.threadpool_limits(1):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
