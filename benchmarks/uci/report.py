"""The report of a results file, in Markdown."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks._markdown import code, section, table
from benchmarks._provenance import describe_cells
from benchmarks._rows import write_rows
from benchmarks.runner import load_failures, load_results
from benchmarks.uci.comparisons import (
    published_table,
    seconds_table,
    steps_table,
    turning_table,
)
from benchmarks.uci.provenance import CONFIGURATION, commands_of
from benchmarks.uci.statistics import label_kernels, label_objectives
from benchmarks.uci.tables import (
    METRICS,
    difference_table,
    less_lml,
    less_plain,
    mean_table,
    win_table,
)
from gpclml.errors import DataError, UnknownNameError

if TYPE_CHECKING:
    import pandas

__all__ = ["Results", "load", "make_report", "write_csv"]

_ABOUT_DIFFERENCES = (
    "Mean paired difference ± standard error. In bold: beyond two standard errors. `below 0 (p)`: "
    "data sets whose mean difference is below zero, of those where it is not zero, and the "
    "two-sided p-value of the sign test. `wins / losses / ties`: data sets with a difference "
    "beyond two standard errors below and above zero, and the others."
)
_ABOUT_WINS = (
    "Data sets and n at which the mean paired difference to the ARD GP (rbf, lml, constant mean) "
    "is beyond two standard errors below zero (wins) and above (losses), and the others (ties); "
    "and the difference that is most standard errors above zero."
)
_ABOUT_MEDIANS = (
    "RMSE, medians over trials, CLML with m = 0.9 n. The paper's: Lotfi et al. (2022), Figures "
    "9(a) and 24, read off to about 0.01, in its normalised units; its code differs from its text "
    "([d, 50, 2] network, KISS-GP, the same first n rows in all trials)."
)
_ABOUT_TURNS = (
    "The first n at which the mean paired difference in RMSE to the LML is zero or above; `> n` "
    "where there is none up to n."
)
_ABOUT_STEPS = (
    "The first of the steps looked at after which the mean RMSE is no higher than what the LML of "
    "the same kernel ends with; `-` where there is none."
)


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
    if not {*CONFIGURATION, *METRICS} <= set(done.columns):
        raise DataError(
            f"{path}: results of another benchmark or of an earlier form of this one. "
            "Name another results file."
        )
    done["steps"] = done["steps"].astype("Int64")  # whole numbers beside missing ones
    # A fit is the same with and without a trace: it counts once.
    same = [name for name in CONFIGURATION if name != "trace"]
    done = done.sort_values("trace", kind="stable").drop_duplicates(same, keep="last").sort_index()
    done = done.assign(kernel_label=label_kernels(done), objective_label=label_objectives(done))
    return Results(os.fspath(path), done, failed)


def make_report(results: Results, figure: str | os.PathLike | None = None) -> str:
    """The whole report as Markdown: what made it, tables, failed cells.

    Args:
        results: The cells.
        figure: A figure of these cells to show, by its file name.
    """
    parts = ["# UCI regression", code(_about(results))]
    if figure is not None:
        parts.append(f"![RMSE and NLL against n]({os.path.basename(figure)})")
    parts += [*_verdicts(results.done), *_tables(results.done), *_costs(results.done)]
    early = int(results.done["ended_early"].sum())
    if early:
        parts.append(f"{early} fits ended early; they count with the parameters they kept.")
    if not results.failed.empty:
        failures = [f"- {_failure(row)}" for _, row in results.failed.iterrows()]
        parts.append(section("Failed cells", f"{len(failures)} failed cells:", "\n".join(failures)))
    return "\n\n".join(parts)


def write_csv(results: Results, path: str | os.PathLike) -> None:
    """Writes the finished cells, see :func:`benchmarks._rows.write_rows`.

    Args:
        results: What to write.
        path: The CSV file; compressed where its name ends in ``.gz``.

    Raises:
        DataError: The file cannot be written.
    """
    write_rows(results.done, path, _about(results), skip=("kernel_label", "objective_label"))


def _about(results: Results) -> list[str]:
    import pandas

    every = pandas.concat([part for part in (results.done, results.failed) if not part.empty])
    return [*commands_of(every, results.path), *describe_cells(results.done, len(results.failed))]


def _verdicts(done: pandas.DataFrame) -> Iterator[str]:
    wins = win_table(done)
    if len(wins):
        yield section("Wins and losses against the plain ARD GP", _ABOUT_WINS, table(wins))
    turns = turning_table(done)
    if len(turns):
        yield section("Where the order turns", _ABOUT_TURNS, table(turns))
    medians = published_table(done)
    if len(medians):
        yield section("Beside the published medians", _ABOUT_MEDIANS, table(medians))


def _tables(done: pandas.DataFrame) -> Iterator[str]:
    seeds = done["seed"].nunique()
    about = f"Mean ± standard error over {seeds} seeds (in brackets: fewer)."
    for metric, heading in METRICS.items():
        yield section(heading, about, table(mean_table(done, metric)))
    yield section("Paired differences", _ABOUT_DIFFERENCES)
    for metric, heading in METRICS.items():
        for name, differences in (
            ("less that of the LML, same kernel", less_lml(done, metric)),
            ("less that of the ARD GP (rbf, lml)", less_plain(done, metric)),
        ):
            if len(differences):
                shown = table(difference_table(differences, metric))
                yield section(f"{heading.partition(' (')[0]} {name}", shown)


def _costs(done: pandas.DataFrame) -> Iterator[str]:
    steps = steps_table(done)
    if len(steps):
        yield section("Steps to the test error of the LML", _ABOUT_STEPS, table(steps))
    about = "Median over seeds; a first impression, as other processes ran beside."
    yield section("Seconds to train a model", about, table(seconds_table(done)))


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
