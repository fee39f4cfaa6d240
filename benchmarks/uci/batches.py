"""Cells whose models are trained together, several seeds in one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from benchmarks.uci.cells import Metrics, Prepared, Training, evaluate, prepare, run_cell
from benchmarks.uci.training import has_fixed_steps, noting_failed_fits
from gpclml.fit import FitResult, fit_batch, suggest_batch_size
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = ["batch_label", "most_in_batch", "run_cells"]

_SHARED = ("dataset", "n", "kernel", "mean", "steps", "lr", "dtype", "device")
_OF_OBJECTIVE = ("objective", "held_out")


def batch_label(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """What cells that are trained together have in common.

    On a CPU that includes the objective: its gain is in few large operations on small
    matrices. A GPU takes all objectives at once.

    Args:
        cell: Configuration of a cell.
    """
    names = (*_SHARED, *_OF_OBJECTIVE) if cell["device"] == "cpu" else _SHARED
    return tuple(cell[name] for name in names)


def most_in_batch(cell: Mapping[str, Any]) -> int:
    """How many cells like this one are best trained together; 1 for those that cannot be.

    Args:
        cell: Configuration of a cell.
    """
    fixed = has_fixed_steps(cell["kernel"], cell["mean"]) and not cell["trace"]
    if not fixed or cell["objective"] == "lml-subset":
        return 1
    return suggest_batch_size(cell["n"], cell["device"], keeps_memory=True)  # the runner sees to it


def run_cells(cells: list[dict[str, Any]]) -> list[Mapping[str, Any] | Exception]:
    """Trains and tests the models of cells with one label, as ``run_cell`` would each.

    A cell that cannot be prepared, started or tested gives its error in place of metrics and
    leaves the others as they are. ``train_seconds`` is an equal share of the batch's.

    Args:
        cells: Their configurations.

    Returns:
        Metrics or an error a cell, in order.
    """
    # Members with one objective side by side are evaluated in one pass.
    order = sorted(range(len(cells)), key=lambda i: str([cells[i][k] for k in _OF_OBJECTIVE]))
    prepared = {i: _prepared(cells[i]) for i in order}
    ready = {i: one for i, one in prepared.items() if isinstance(one, Prepared)}
    fits = _fit(list(ready.values()), cells[0]) if ready else []
    answers: dict[int, Metrics | Exception] = {
        i: one for i, one in prepared.items() if isinstance(one, Exception)
    }
    for (i, one), fit in zip(ready.items(), fits, strict=True):
        answers[i] = _answer(one, fit, cells[i])
    return [answers[i] for i in range(len(cells))]


def _prepared(cell: Mapping[str, Any]) -> Prepared | Exception:
    try:
        return prepare(cell)
    except Exception as error:  # it is the answer of this cell
        return error


def _fit(prepared: list[Prepared], cell: Mapping[str, Any]) -> list[FitResult]:
    mlls = [cast(ConditionalMarginalLogLikelihood, one.mll) for one in prepared]
    with noting_failed_fits():  # the messages tell of them
        return fit_batch(mlls, "adam", steps=cell["steps"], lr=cell["lr"], progress=False)


def _answer(prepared: Prepared, fit: FitResult, cell: Mapping[str, Any]) -> Metrics | Exception:
    try:
        if not fit.history:  # alone it raises the error that tells why
            return run_cell(cell)
        return evaluate(prepared, Training(len(fit.history), fit.message, fit.seconds))
    except Exception as error:  # it is the answer of this cell
        return error
