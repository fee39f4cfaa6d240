"""The figure: regrets against the number of evaluations."""

from __future__ import annotations

import os
from typing import Any

import numpy
import pandas
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks._figures import new_figure, save_figure
from benchmarks.bo.tables import LEAST_REGRET, REGRETS
from benchmarks.uci.tables import ordered_objectives

__all__ = ["draw_figure"]

_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red")  # of objectives
_STYLES = ("-", "--", ":", "-.")  # of surrogates

Looks = dict[tuple[str, str], dict[str, Any]]


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
    looks = _looks(cells)
    size = max(3.2 * len(names), 6.4), 6.4
    figure = new_figure(*size, layout="constrained")
    grid: Any = figure.subplots(len(REGRETS), len(names), squeeze=False, sharex="col")
    for row, (regret, heading) in zip(grid, REGRETS.items(), strict=True):
        for axes, name in zip(row, names, strict=True):
            _draw_panel(axes, cells[cells["function"] == name], regret, looks)
        row[0].set_ylabel(heading.lower())
    for axes, name in zip(grid[0], names, strict=True):
        axes.set_title(name)
    for axes in grid[-1]:
        axes.set_xlabel("evaluations after the initial ones")
    _draw_legend(figure, looks)
    save_figure(figure, path)


def _looks(cells: pandas.DataFrame) -> Looks:
    """How each surrogate and objective is drawn: line by surrogate, colour by objective."""
    present = set(zip(cells["kernel_label"], cells["objective"], strict=True))
    surrogates = sorted(cells["kernel_label"].unique(), reverse=True)
    return {
        (surrogate, objective): {"linestyle": style, "color": color}
        for surrogate, style in zip(surrogates, _STYLES, strict=False)
        for objective, color in zip(ordered_objectives(cells["objective"]), _COLORS, strict=False)
        if (surrogate, objective) in present
    }


def _draw_panel(axes: Axes, cells: pandas.DataFrame, regret: str, looks: Looks) -> None:
    for (surrogate, objective), look in looks.items():
        chosen = (cells["kernel_label"] == surrogate) & (cells["objective"] == objective)
        places, logs = _curves(cells[chosen], regret)
        if not len(logs):
            continue
        mean = logs.mean(0)
        error = logs.std(0, ddof=1) / len(logs) ** 0.5 if len(logs) > 1 else 0 * mean
        axes.plot(places, 10**mean, **look)
        axes.fill_between(
            places, 10 ** (mean - error), 10 ** (mean + error), color=look["color"],
            alpha=0.12, linewidth=0,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _curves(cells: pandas.DataFrame, regret: str) -> tuple[Any, Any]:
    """Numbers of evaluations and logarithms of the regret, a row a seed, of the longest runs."""
    cells = cells[cells["iterations"] == cells["iterations"].max()]
    values = numpy.array(cells[f"{regret}_at"].tolist(), dtype=float)
    logs = numpy.log10(values.clip(min=LEAST_REGRET)) if len(values) else values
    if regret == "inference_regret" and len(values):
        return cells["inference_at"].iloc[0], logs
    return range(values.shape[-1]), logs


def _draw_legend(figure: Any, looks: Looks) -> None:
    lines = [Line2D([], [], **look) for look in looks.values()]
    labels = [f"{surrogate}, {objective}" for surrogate, objective in looks]
    figure.legend(lines, labels, loc="outside upper center", ncols=3, frameon=False)
