"""The report of a results file, in Markdown."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks._markdown import code, section, table
from benchmarks._provenance import describe_cells
from benchmarks._rows import write_rows
from benchmarks.bo.figure import draw_figure
from benchmarks.bo.grid import Settings
from benchmarks.bo.tables import (
    REGRETS,
    labelled,
    less_baseline,
    less_lml,
    mean_rows,
    median_rows,
    second_rows,
)
from benchmarks.runner import load_failures, load_results
from gpclml.errors import DataError

if TYPE_CHECKING:
    import pandas

__all__ = ["make_report"]

_ABOUT = {
    "simple_regret": "The largest value of the function less the best one seen.",
    "inference_regret": "The largest value of the function less its value where the posterior "
    "mean is highest, among the points seen and one found by optimization over the cube.",
}
_DIFFERENCES = (
    "Mean paired difference in log10 of the regret ± standard error over seeds; -1 is a tenth of "
    "the regret. In bold: beyond two standard errors."
)
_SETTINGS = {
    "functions": "function", "surrogates": "surrogate", "objectives": "objective",
    "iterations": "iterations", "steps": "steps", "device": "device",
}  # fmt: skip


def make_report(
    path: str | os.PathLike[str],
    csv: str | os.PathLike[str] | None = None,
    figure: str | os.PathLike[str] | None = None,
) -> str:
    """The report of a results file, in Markdown.

    Args:
        path: The SQLite file.
        csv: Also write all cells to this file; compressed where its name ends in ``.gz``.
        figure: Also draw regrets against evaluations in this image file.

    Raises:
        DataError: There is no such file, no finished cell of this benchmark in it, or an output
            cannot be written.
    """
    done, failed = load_results(path, provenance=True), load_failures(path)
    if done.empty:
        first = f" The first of {len(failed)} failed: {_failure(failed.iloc[0])}"
        raise DataError(f"{path}: no finished cell.{'' if failed.empty else first}")
    if not {"function", "surrogate", *REGRETS} <= set(done.columns):
        raise DataError(f"{path}: results of another benchmark. Name another results file.")
    about = [*_commands(done, path), *describe_cells(done, len(failed))]
    cells = labelled(done)
    if csv is not None:
        write_rows(done, csv, about)
    parts = ["# Bayesian optimization", code(about)]
    if figure is not None:
        draw_figure(cells, figure)
        parts.append(f"![Regret against evaluations]({os.path.basename(figure)})")
    parts += _sections(cells)
    stopped = int(done["failed_fits"].sum())
    if stopped:
        parts.append(f"{stopped} fits stopped early; they count with the parameters they kept.")
    if not failed.empty:
        failures = [f"- {_failure(row)}" for _, row in failed.iterrows()]
        parts.append(section("Failed cells", f"{len(failures)} failed cells:", "\n".join(failures)))
    return "\n\n".join(parts)


def _sections(cells: pandas.DataFrame) -> Iterator[str]:
    for regret, heading in REGRETS.items():
        about = f"{_ABOUT[regret]} Median over {cells['seed'].nunique()} seeds [quartiles]."
        yield section(heading, about, table(median_rows(cells, regret)))
        yield section(
            f"{heading}, log10", "Mean ± standard error.", table(mean_rows(cells, regret))
        )
    for regret, heading in REGRETS.items():
        for name, differences in (
            ("less that of SingleTaskGP under the LML", less_baseline(cells, regret)),
            ("less that of the LML, same surrogate", less_lml(cells, regret)),
        ):
            if len(differences):
                yield section(f"{heading} {name}", _DIFFERENCES, table(differences))
    about = "All fits + choosing all points, median over seeds, as other processes ran beside."
    yield section("Seconds of an optimization", about, table(second_rows(cells)))


def _commands(done: pandas.DataFrame, path: str | os.PathLike[str]) -> list[str]:
    """The commands that compute these cells: what differs from the usual settings."""
    usual = asdict(Settings())
    groups = done.groupby(["iterations", "device"], sort=True)
    return [_command(group, usual, path) for _, group in groups]


def _command(cells: pandas.DataFrame, usual: dict[str, Any], path: str | os.PathLike[str]) -> str:
    options = []
    for name, column in _SETTINGS.items():
        found = cells[column].dropna()
        values = {int(value) if name == "steps" else value for value in found}
        wanted = usual[name] if isinstance(usual[name], tuple) else (usual[name],)
        if values and values != set(wanted):
            options.append(f" --{name} {','.join(map(str, sorted(values)))}")
    seeds = int(cells["seed"].max()) + 1
    options += [f" --seeds {seeds}"] if seeds != usual["seeds"] else []
    return f"python -m benchmarks.bo run{''.join(options)} --results {shlex.quote(os.fspath(path))}"


def _failure(row: pandas.Series) -> str:
    cell = f"{row['function']} {row['surrogate']} {row['objective']} seed {row['seed']}"
    return f"{cell}: {row['_error_type']}: {row['_error_message'].splitlines()[0]}"
