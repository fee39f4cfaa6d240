"""The report: a table for each study of a results file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks._markdown import code, section, table
from benchmarks._provenance import describe_cells
from benchmarks._rows import write_rows
from benchmarks.evidence.grid import STUDIES
from benchmarks.evidence.tables import (
    architecture_rows,
    bound_rows,
    correlations,
    invariance_rows,
    regression_rows,
    search_rows,
    size_rows,
    speed_ranks,
)
from benchmarks.runner import load_failures, load_results
from gpclml.errors import DataError

if TYPE_CHECKING:
    import pandas

__all__ = ["make_report", "study_cells"]

_Table = Callable[["pandas.DataFrame"], "pandas.DataFrame"]

_SECTIONS: Mapping[str, tuple[tuple[str, str, _Table], ...]] = {
    "architectures": (
        (
            "Which score says how a network generalizes",
            "Spearman correlation over networks of each score with what they reach on test points; "
            "`lml_global` and `lml_layer` have precisions fitted to the evidence after training. "
            "`bma` is the average over the Laplace posterior, `tempered` after temperature "
            "scaling.",
            correlations,
        ),
        ("The networks", "Nats a point, mean over seeds; accuracy in %.", architecture_rows),
    ),
    "bounds": (
        (
            "Tightness and cost of estimates",
            "Nats a point, of one trained network each. `spread`: standard deviation over at most "
            "ten batches of a partition. `seconds`: one estimate with its gradient in the "
            "precisions of layers, the fastest. Gap: full GGN less the estimate; a lower bound "
            "has a positive one.",
            bound_rows,
        ),
    ),
    "invariance": (
        (
            "A rotation that is learned",
            "Mean over seeds ± standard error; `rotation` is half the range, in degrees, "
            "from a start of 11.5.",
            invariance_rows,
        ),
    ),
    "online-regression": (
        (
            "UCI networks [D, 50, 1], precisions and noise learned online",
            "Test NLL, nats in original units, mean over splits ± standard error, beside Immer et "
            "al. (2021, Table 1; ten splits of their own).",
            regression_rows,
        ),
    ),
    "online-search": (
        (
            "Precisions from a grid, and learned online",
            "Mean over seeds ± standard error. `grid`: one precision throughout; `network` and "
            "`layer`: learned in training, from 1.",
            search_rows,
        ),
    ),
    "training-speed": (
        ("Against the number of points", "Accuracy, %, mean over seeds.", size_rows),
        (
            "Speed and end",
            "Training speed is the sum of log densities of the next n points, n = 25, 50, ..., in "
            "nats; the LML is that of the last n with precisions fitted to it.",
            speed_ranks,
        ),
    ),
}


def study_cells(path: str | os.PathLike[str]) -> pandas.DataFrame:
    """The finished cells of studies.

    Args:
        path: The SQLite file.

    Raises:
        DataError: There is no such file.
    """
    done = load_results(path, provenance=True)
    return done[done["study"].notna()] if "study" in done else done[:0]


def make_report(path: str | os.PathLike[str], csv: str | os.PathLike[str] | None = None) -> str:
    """The report of a results file, in Markdown.

    Args:
        path: The SQLite file.
        csv: Also write all cells to this file; compressed where its name ends in ``.gz``.

    Raises:
        DataError: There is no such file, no finished cell in it, or the CSV cannot be written.
    """
    done = study_cells(path)
    failed = load_failures(path)
    failed = failed[failed["study"].notna()] if "study" in failed else failed[:0]
    if done.empty:
        raise DataError(f"{path}: no finished cells. Run some first.")
    about = [*_commands(done), *describe_cells(done, len(failed))]
    if csv is not None:
        write_rows(done, csv, about)
    parts = ["# Evidence of networks", code(about)]
    for study, sections in _SECTIONS.items():
        cells = done[done["study"] == study].dropna(axis="columns", how="all")
        parts += [
            section(title, text, table(make(cells))) for title, text, make in sections if len(cells)
        ]
    if len(failed):
        shown = failed[["study", "seed", "error_type"]].set_index("study")
        parts.append(section("Failed cells", table(shown)))
    return "\n\n".join(parts)


def _commands(done: pandas.DataFrame) -> list[str]:
    studies = done["study"].str.replace(r"online-.*", "online", regex=True)
    return [_command(name, done) for name in sorted(set(studies))]


def _command(study: str, done: pandas.DataFrame) -> str:
    """The command that computes these cells: what differs from the study's own settings."""
    cells = done[done["study"] == ("online-search" if study == "online" else study)]
    if cells.empty:
        return f"python -m benchmarks.evidence run {study}"
    speed = study == "training-speed"
    found = {
        "data": tuple(cells["data"].unique()),
        "architectures": tuple(cells["architecture"].unique()),
        "precisions": tuple(cells["precision"].unique()),
        "num_train": int(cells["num_pool" if speed else "num_train"].max()),
        "epochs": int(cells["steps" if speed else "epochs"].max()),
        "seeds": int(cells["seed"].max()) + 1,
    }
    usual = asdict(STUDIES[study]) | {"data": (STUDIES[study].data,)}
    options = [
        f" --{name.replace('_', '-')} {_listed(value)}"
        for name, value in found.items()
        if set(_many(value)) != set(_many(usual[name]))
    ]
    return f"python -m benchmarks.evidence run {study}{''.join(options)}"


def _many(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _listed(value: Any) -> str:
    return ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in _many(value))
