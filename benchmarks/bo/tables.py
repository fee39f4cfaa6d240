"""The tables of the report, test functions side by side, and the figure of regrets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy
import pandas
from matplotlib.axes import Axes

from benchmarks._figures import PALETTE, bare, legend_above, new_figure, save_figure
from benchmarks._tables import section, table
from benchmarks.uci.tables import (
    CELL,
    difference_table,
    less_lml,
    less_plain,
    mean_table,
    ordered_objectives,
    wide,
)

REGRETS = {"simple_regret": "Simple regret", "inference_regret": "Inference regret"}
"""The regrets of a cell and their headings."""

BASELINE = {"surrogate": "single-task", "objective": "lml"}
"""What the others are compared with."""

_ABOUT = {
    "simple_regret": "The largest value of the function less the best one seen.",
    "inference_regret": "The largest value of the function less its value where the posterior "
    "mean is highest, among the points seen and one found by optimization over the cube.",
}
_DIFFERENCES = (
    "Mean paired difference in log10 of the regret ± standard error over seeds; -1 is a tenth of "
    "the regret. In bold: beyond two standard errors."
)

LEAST_REGRET = 1e-6
"""Regrets below count as this: the largest values are known to about so many digits."""


def labelled(done: pandas.DataFrame) -> pandas.DataFrame:
    """Cells with the columns by which :mod:`benchmarks.uci.tables` groups and pairs them.

    Returns:
        The cells with ``log_simple_regret`` and ``log_inference_regret``, logarithms to base 10,
        ``dataset`` (function), ``n`` (iterations), ``kernel_label`` (surrogate) and
        ``objective_label``.
    """
    # Regrets differ by orders of magnitude: means and pairs are of their logarithms.
    logs = {
        f"log_{name}": numpy.log10(done[name].clip(lower=LEAST_REGRET).astype(float))
        for name in REGRETS
    }
    return done.assign(
        dataset=done["function"], n=done["iterations"], kernel_label=done["surrogate"],
        objective_label=done["objective"], **logs,
    )  # fmt: skip


def sections(cells: pandas.DataFrame) -> Iterator[str]:
    """The sections of the report, in Markdown.

    Args:
        cells: Cells as :func:`labelled` gives them.
    """
    for regret, heading in REGRETS.items():
        about = f"{_ABOUT[regret]} Median over {cells['seed'].nunique()} seeds [quartiles]."
        quantiles = cells.groupby(list(CELL))[regret].quantile([0.25, 0.5, 0.75]).unstack()
        texts = [f"{row[1]:.3g} [{row[0]:.2g}, {row[2]:.2g}]" for row in quantiles.to_numpy()]
        yield section(heading, about, _table(wide(pandas.Series(texts, quantiles.index))))
        means = mean_table(cells, f"log_{regret}")
        yield section(f"{heading}, log10", "Mean ± standard error.", _table(means))
    # Differences after all means, so that a reader meets the plain numbers first.
    for regret, heading in REGRETS.items():
        log = f"log_{regret}"
        for name, differences in (
            ("less that of SingleTaskGP under the LML", less_plain(cells, log, BASELINE)),
            ("less that of the LML, same surrogate", less_lml(cells, log)),
        ):
            if len(differences):
                texts = difference_table(differences, log)
                yield section(f"{heading} {name}", _DIFFERENCES, _table(texts))
    about = "All fits + choosing all points, median over seeds, as other processes ran beside."
    medians = cells.groupby(list(CELL))[["fit_seconds", "acquisition_seconds"]].median()
    texts = [f"{fit:.1f} + {chosen:.1f}" for fit, chosen in medians.to_numpy()]
    rows = wide(pandas.Series(texts, medians.index))
    yield section("Seconds of an optimization", about, _table(rows))
    stopped = int(cells["failed_fits"].sum())
    if stopped:
        yield f"{stopped} fits stopped early; they count with the parameters they kept."


def _table(rows: pandas.DataFrame) -> str:
    return table(rows.rename_axis(index=["iterations", "surrogate", "objective"]))


_STYLES = ("-", "--", ":")  # of surrogates

Styles = dict[tuple[str, str], dict[str, Any]]


def draw_figure(cells: pandas.DataFrame, path: str | os.PathLike[str]) -> None:
    """Draws the simple above the inference regret, a column a function, a line a method.

    Lines are geometric means over seeds, bands a standard error of the logarithm to each side.

    Args:
        cells: Cells as :func:`benchmarks.bo.tables.labelled` gives them.
        path: The image file.

    Raises:
        DataError: The file cannot be written.
    """
    names = sorted(cells["function"].unique())
    styles = _styles(cells)
    size = max(3.2 * len(names), 6.4), 6.4
    figure = new_figure(*size, layout="constrained")
    grid: Any = figure.subplots(len(REGRETS), len(names), squeeze=False, sharex="col")
    for row, (regret, heading) in zip(grid, REGRETS.items(), strict=True):
        for axes, name in zip(row, names, strict=True):
            _draw_panel(axes, cells[cells["function"] == name], regret, styles)
        row[0].set_ylabel(heading.lower())
    for axes, name in zip(grid[0], names, strict=True):
        axes.set_title(name)
    for axes in grid[-1]:
        axes.set_xlabel("evaluations after the initial ones")
    legend_above(figure, styles, columns=3)
    save_figure(figure, path)


def _styles(cells: pandas.DataFrame) -> Styles:
    """How each surrogate and objective is drawn: line by surrogate, colour by objective."""
    present = set(zip(cells["kernel_label"], cells["objective"], strict=True))
    surrogates = sorted(cells["kernel_label"].unique(), reverse=True)
    return {
        (surrogate, objective): {"linestyle": style, "color": color}
        for surrogate, style in zip(surrogates, _STYLES, strict=False)
        for objective, color in zip(ordered_objectives(cells["objective"]), PALETTE, strict=False)
        if (surrogate, objective) in present
    }


def _draw_panel(axes: Axes, cells: pandas.DataFrame, regret: str, styles: Styles) -> None:
    for (surrogate, objective), style in styles.items():
        chosen = (cells["kernel_label"] == surrogate) & (cells["objective"] == objective)
        places, logs = _curves(cells[chosen], regret)
        if not len(logs):
            continue
        mean = logs.mean(0)
        error = logs.std(0, ddof=1) / len(logs) ** 0.5 if len(logs) > 1 else 0 * mean
        axes.plot(places, 10**mean, **style)
        axes.fill_between(
            places, 10 ** (mean - error), 10 ** (mean + error), color=style["color"],
            alpha=0.12, linewidth=0,
        )  # fmt: skip
    axes.set_yscale("log")
    bare(axes)


def _curves(cells: pandas.DataFrame, regret: str) -> tuple[Any, Any]:
    """Numbers of evaluations and logarithms of the regret, a row a seed, of the longest runs."""
    # Curves of runs of several lengths would not be means over the same seeds.
    cells = cells[cells["iterations"] == cells["iterations"].max()]
    values = numpy.array(cells[f"{regret}_at"].tolist(), dtype=float)
    logs = numpy.log10(values.clip(min=LEAST_REGRET)) if len(values) else values
    if regret == "inference_regret" and len(values):
        return cells["inference_at"].iloc[0], logs
    return range(values.shape[-1]), logs
