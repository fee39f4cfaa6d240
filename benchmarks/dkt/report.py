"""The report: what each kernel and objective reaches, beside the baseline, and by how much."""

from __future__ import annotations

import math
import os
import shlex
from typing import TYPE_CHECKING

from benchmarks._markdown import code, section, table
from benchmarks._provenance import describe_cells
from benchmarks._rows import write_rows
from benchmarks.dkt.cells import BASELINE
from benchmarks.dkt.studies import STUDIES
from benchmarks.runner import load_failures, load_results
from gpclml.errors import DataError

if TYPE_CHECKING:
    import pandas

__all__ = ["make_report"]

_METRICS = {
    "accuracy": "accuracy, %",
    "mse": "squared error",
    "nll": "NLL, nats a query point",
    "calibration_error": "expected calibration error",
    "train_seconds": "seconds of training",
}
_MAIN = ("accuracy", "mse")
_KEYS = ["study", "shots", "kernel", "objective"]
_ABOUT = (
    "Mean over seeds ± its standard error, and half the 95% interval over the test tasks of all "
    "seeds. `pixels` is the nearest neighbour in classification and a GP fitted to each task alone "
    "in regression."
)
_ABOUT_DIFFERENCES = (
    "CLML less LML, paired by seed: mean ± standard error. The CLML conditions on the support "
    "points and scores the query points."
)


def make_report(path: str | os.PathLike[str], csv: str | os.PathLike[str] | None = None) -> str:
    """The report of a results file, in Markdown.

    Args:
        path: The SQLite file.
        csv: Also write all cells to this file; compressed where its name ends in ``.gz``.

    Raises:
        DataError: There is no such file, no finished cell in it, or the CSV cannot be written.
    """
    done = load_results(path, provenance=True)
    failed = load_failures(path)
    if done.empty:
        raise DataError(f"{path}: no finished cells. Run some first.")
    about = [_command(done, path), *describe_cells(done, len(failed))]
    if csv is not None:
        write_rows(done, csv, about)
    done["objective"] = done["objective"].fillna("-")
    parts = ["# Deep Kernel Transfer", code(about)]
    parts += [f"- `{name}`: {STUDIES[name].about}." for name in sorted(set(done["study"]))]
    parts.append(section("Results", _ABOUT, table(_results(done))))
    differences = _differences(done)
    if len(differences):
        parts.append(section("CLML less LML", _ABOUT_DIFFERENCES, table(differences)))
    if len(failed):
        shown = failed[[*_KEYS, "seed", "error_type"]].set_index("study")
        parts.append(section("Failed cells", table(shown)))
    return "\n\n".join(parts)


def _command(done: pandas.DataFrame, path: str | os.PathLike[str]) -> str:
    """A command that computes these cells, and more where they are no product of settings."""
    trained = done[done["kernel"] != BASELINE]
    options = {
        "study": done["study"], "shots": done["shots"], "kernels": done["kernel"],
        "objectives": trained["objective"], "seeds": [done["seed"].max() + 1],
        "steps": trained["steps"], "tasks-per-step": trained["tasks_per_step"],
        "lr": trained["lr"], "test-tasks": done["test_tasks"], "device": done["device"],
    }  # fmt: skip
    parts = [
        f"--{name} {','.join(f'{v:g}' if isinstance(v, float) else str(v) for v in found)}"
        for name, values in options.items()
        if (found := sorted(set(values)))
    ]
    return f"python -m benchmarks.dkt run {' '.join(parts)} --results {shlex.quote(str(path))}"


def _results(done: pandas.DataFrame) -> pandas.DataFrame:
    import pandas

    rows = {}
    for key, group in done.groupby(_KEYS, sort=True):
        cells = {}
        for name, title in _METRICS.items():
            if name not in group:
                continue
            cells[title] = _mean(group, name)
            if name in _MAIN:
                cells[f"95% over tasks ({name})"] = _interval(group, name)
        rows[key] = cells
    frame = pandas.DataFrame.from_dict(rows, orient="index")
    frame.index = pandas.MultiIndex.from_tuples(list(rows), names=_KEYS)
    return frame.dropna(axis="columns", how="all").fillna("-")


def _mean(group: pandas.DataFrame, name: str) -> str:
    """Over seeds, with its standard error where there are several."""
    values = _in_units(group[name].dropna(), name)
    if values.empty:
        return "-"
    if name == "train_seconds":
        return f"{values.mean():.0f}"
    digits = _digits(name)
    error = values.std() / math.sqrt(len(values))
    shown = "" if error != error else f" ± {error:.{digits}f}"
    return f"{values.mean():.{digits}f}{shown}"


def _interval(group: pandas.DataFrame, name: str) -> str:
    """Half the 95% interval of the mean over the test tasks of all seeds together."""
    halves = _in_units(group.loc[group[name].notna(), "interval"], name)
    if halves.empty:
        return "-"
    return f"± {math.sqrt((halves**2).sum()) / len(halves):.{_digits(name)}f}"


def _digits(name: str) -> int:
    return 1 if name in ("accuracy", "train_seconds") else 3


def _in_units(values: pandas.Series, name: str) -> pandas.Series:
    return 100 * values if name == "accuracy" else values


def _differences(done: pandas.DataFrame) -> pandas.DataFrame:
    import pandas

    keys = ["study", "shots", "kernel"]
    both = [
        done[done["objective"] == objective].set_index([*keys, "seed"])
        for objective in ("clml", "lml")
    ]
    rows: dict[tuple, dict[str, str]] = {}
    for name in ("accuracy", "mse", "nll"):
        if name not in done:
            continue
        pairs = (both[0][name] - both[1][name]).dropna()
        for key, values in _in_units(pairs, name).groupby(level=keys):
            error = values.std() / math.sqrt(len(values))
            digits = _digits(name)
            text = f"{values.mean():+.{digits}f}"
            text += "" if error != error else f" ± {error:.{digits}f}"
            rows.setdefault(key, {})[_METRICS[name]] = text
    if not rows:
        return pandas.DataFrame()
    frame = pandas.DataFrame.from_dict(rows, orient="index").fillna("-")
    frame.index = pandas.MultiIndex.from_tuples(list(rows), names=keys)
    return frame
