"""The tables of the report, and the cells that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import pandas
from typer import Option

from benchmarks._options import names
from benchmarks._tables import section, table
from benchmarks.uci.cells import CONFIGURATION
from benchmarks.uci.tables import (
    METRICS,
    difference_table,
    label_kernels,
    label_objectives,
    less_lml,
    less_plain,
    mean_table,
    published_table,
    seconds_table,
    steps_table,
    turning_table,
    win_table,
)
from gpclml.errors import UnknownNameError

__all__ = ["labelled", "of_kernels", "sections"]

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


def of_kernels(
    cells: pandas.DataFrame,
    kernel: Annotated[
        tuple[str, ...] | None,
        Option(help="Only these kernels in all of it, comma-separated."),
        names,
    ] = None,
) -> pandas.DataFrame:
    """The cells of some kernels, all if None.

    Raises:
        UnknownNameError: There is no cell of such a kernel.
    """
    if kernel is None or cells.empty:
        return cells
    for name in kernel:
        if name not in set(cells["kernel"]):
            raise UnknownNameError("kernel", name, set(cells["kernel"]))
    return cells[cells["kernel"].isin(kernel)].reset_index(drop=True)


def labelled(done: pandas.DataFrame) -> pandas.DataFrame:
    """Each fit once, with the columns ``kernel_label`` and ``objective_label``.

    Args:
        done: Finished cells. A fit is the same with and without a trace.
    """
    done = done.assign(steps=done["steps"].astype("Int64"))  # whole numbers beside missing ones
    same = [name for name in CONFIGURATION if name != "trace"]
    done = done.sort_values("trace", kind="stable").drop_duplicates(same, keep="last").sort_index()
    return done.assign(kernel_label=label_kernels(done), objective_label=label_objectives(done))


def sections(done: pandas.DataFrame) -> Iterator[str]:
    """The sections of the report.

    Args:
        done: Finished cells as :func:`labelled` gives them.
    """
    yield from _verdicts(done)
    yield from _tables(done)
    yield from _costs(done)
    early = int(done["ended_early"].sum())
    if early:
        yield f"{early} fits ended early; they count with the parameters they kept."


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
