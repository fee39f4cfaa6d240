"""The tables of a results file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results import load_failures, load_results
from benchmarks.uci.provenance import commands_of, describe
from benchmarks.uci.statistics import (
    label_kernels,
    label_objectives,
    means,
    ordered_objectives,
    paired_differences,
)
from gpclml.errors import DataError, UnknownNameError

if TYPE_CHECKING:
    import pandas

__all__ = ["METRICS", "Results", "load", "make_report", "write_csv"]

METRICS = {
    "rmse": "RMSE (standard deviations of all targets of the data set)",
    "nll": "NLL (nats per test point, in the same unit)",
    "coverage_95": "Coverage of the 95% interval",
}
"""The metrics of the tables and their headings."""

CONFIGURATION = (
    "dataset", "n", "seed", "objective", "kernel", "mean", "optimizer", "steps", "lr",
    "held_out", "dtype", "device",
)  # fmt: skip
_CELL = ["dataset", "n", "kernel_label", "objective_label"]
_BASELINE_KERNEL, _BASELINE_MEAN = "rbf", "constant"


@dataclass(frozen=True)
class Results:
    """The cells of a results file.

    Args:
        path: The file.
        done: Finished cells with their provenance and the columns ``kernel_label`` and
            ``objective_label``, which tell apart what differs in further settings.
        failed: Failed cells.
    """

    path: str
    done: pandas.DataFrame
    failed: pandas.DataFrame


def load(path: str | os.PathLike, kernels: Sequence[str] | None = None) -> Results:
    """Reads a results file.

    Args:
        path: The SQLite file.
        kernels: The kernels to show; all if None.

    Raises:
        DataError: The file is missing, no results file, or holds no finished cell.
        UnknownNameError: The file has no cell of such a kernel.
    """
    done, failed = load_results(path, provenance=True), load_failures(path)
    done, failed = _of_kernels(done, failed, kernels)
    if done.empty:
        first = f" The first of {len(failed)} failed: {_failure(failed.iloc[0])}"
        raise DataError(f"{path}: no finished cell.{'' if failed.empty else first}")
    if not set(CONFIGURATION) <= set(done.columns):
        raise DataError(f"{path}: results of another benchmark. Name another results file.")
    done["steps"] = done["steps"].astype("Int64")  # whole numbers beside missing ones
    done = done.assign(kernel_label=label_kernels(done), objective_label=label_objectives(done))
    return Results(os.fspath(path), done, failed)


def make_report(results: Results) -> str:
    """The whole report as text: what made it, tables, failed cells."""
    import pandas

    every = pandas.concat([part for part in (results.done, results.failed) if not part.empty])
    commands = commands_of(every, results.path)
    lines = [*commands, *describe(results.done, len(results.failed))]
    parts = ["\n".join(f"# {line}" for line in lines)]
    for metric, heading in METRICS.items():
        table = objective_table(results.done, metric)
        parts.append(f"{heading}\nmean ± standard error over seeds\n\n{table.to_string()}")
    for metric, heading in METRICS.items():
        table = baseline_table(results.done, metric)
        if not table.empty:
            about = "difference to the ARD GP (rbf, lml) ± standard error, paired by seed [pairs]"
            parts.append(f"{heading}\n{about}\n\n{table.to_string()}")
    early = int(results.done["ended_early"].sum())
    if early:
        parts.append(f"{early} fits ended early; they count with the parameters they kept.")
    if not results.failed.empty:
        failures = [_failure(row) for _, row in results.failed.iterrows()]
        parts.append("\n".join([f"{len(failures)} failed cells:", *failures]))
    return "\n\n".join(parts)


def objective_table(done: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Each objective's mean, and its difference to the LML paired by seed, as text.

    Args:
        done: Finished cells with their labels.
        metric: One of ``METRICS``.

    Returns:
        A row for each dataset, n and kernel; a column an objective and a difference, the
        number of seeds or of pairs in brackets.
    """
    import pandas

    table = _wide(means(done, metric, _CELL))
    baseline = done[done["objective"] == "lml"]
    others = done[done["objective"] != "lml"]
    differences = _wide(
        paired_differences(others, baseline, metric, ("dataset", "n", "kernel_label"))
    ).add_suffix(" - lml")
    return pandas.concat([table, differences], axis=1).fillna("-")


def baseline_table(done: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Each kernel and objective less the plain ARD GP, paired by seed, as text.

    Args:
        done: Finished cells with their labels.
        metric: One of ``METRICS``.

    Returns:
        A row for each dataset, n and kernel, a column an objective; empty without an ARD GP.
    """
    plain = (done["kernel"] == _BASELINE_KERNEL) & (done["mean"] == _BASELINE_MEAN)
    plain &= done["objective"] == "lml"
    baseline = done[plain].drop_duplicates(["dataset", "n", "seed"])
    differences = paired_differences(done[~plain], baseline, metric, ("dataset", "n"))
    return _wide(differences).fillna("-")


def write_csv(results: Results, path: str | os.PathLike) -> None:
    """Writes the finished cells as a long table, a row for each metric of each cell.

    Numbers are written so that they read back exactly.

    Args:
        results: What to write.
        path: The CSV file.

    Raises:
        DataError: The file cannot be written.
    """
    done = results.done
    hidden = [name for name in done if name.startswith("_") or name.endswith("_label")]
    table = done.drop(columns=hidden).melt(
        id_vars=list(CONFIGURATION), var_name="metric", value_name="value"
    )
    try:
        table.to_csv(Path(path), index=False)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error}). Name another file.") from error


def _wide(statistics: pandas.DataFrame) -> pandas.DataFrame:
    """Statistics as text, objectives side by side."""
    text = statistics.apply(_cell_text, axis=1) if len(statistics) else statistics["mean"]
    wide = text.astype(object).unstack("objective_label")
    wide = wide[ordered_objectives(wide.columns)]
    return wide.rename_axis(index={"kernel_label": "kernel"}, columns=None)


def _cell_text(row: pandas.Series) -> str:
    spread = "" if row["seeds"] < 2 else f" ± {row['se']:.3f}"
    return f"{row['mean']:.3f}{spread} [{row['seeds']:.0f}]"


def _of_kernels(
    done: pandas.DataFrame, failed: pandas.DataFrame, kernels: Sequence[str] | None
) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    if kernels is None:
        return done, failed
    parts = [part for part in (done, failed) if not part.empty]
    known = {kernel for part in parts for kernel in part["kernel"]}
    for kernel in kernels:
        if kernel not in known:
            raise UnknownNameError("kernel", kernel, known)
    chosen = [
        part if part.empty else part[part["kernel"].isin(kernels)].reset_index(drop=True)
        for part in (done, failed)
    ]
    return chosen[0], chosen[1]


def _failure(row: pandas.Series) -> str:
    cell = f"{row['dataset']} n={row['n']} {row['kernel']} {row['objective']} seed {row['seed']}"
    return f"{cell}: {row['_error_type']}: {row['_error_message'].splitlines()[0]}"
