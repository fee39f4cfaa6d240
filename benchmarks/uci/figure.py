"""The figure: errors against the number of training rows."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import pandas
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from benchmarks._figures import bare, legend_above, new_figure, save_figure
from benchmarks.uci.tables import means, ordered_objectives

__all__ = ["draw_figure"]

_MOST_COLUMNS = 5
_ROWS = {"rmse": "RMSE (sd of targets)", "nll": "NLL (nats per point)"}
# Okabe and Ito's palette, told apart by colour-blind readers too.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = (
    ("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"),
    ((0, (5, 1, 1, 1, 1, 1)), "v"), ((0, (1, 3)), "P"),
)  # fmt: skip
_INCHES_A_CHARACTER, _INCHES_A_LINE = 0.085, 0.6  # of the legend


def draw_figure(done: pandas.DataFrame, path: str | os.PathLike) -> None:
    """Draws RMSE above NLL, a column a data set, a line a kernel and objective.

    More than five data sets go on to further rows. Bars are standard errors over seeds. Where
    the highest is far above the others, an axis of RMSE is logarithmic, and one of NLL is so
    beyond 2.

    Args:
        done: Finished cells with their labels, as ``benchmarks.uci.study.labelled`` gives them.
        path: The image file.

    Raises:
        DataError: The file cannot be written.
    """
    sets = sorted(done["dataset"].unique())
    styles = _styles(done)
    columns = math.ceil(len(sets) / math.ceil(len(sets) / _MOST_COLUMNS))
    bands = [sets[i : i + columns] for i in range(0, len(sets), columns)]
    figure = new_figure(1.2 + max(2.7 * columns, 4.2), 0.8 + 5.6 * len(bands), layout="constrained")
    grid: Any = figure.subplots(len(_ROWS) * len(bands), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for band, members in enumerate(bands):
        rows = grid[len(_ROWS) * band : len(_ROWS) * (band + 1)]
        for column, name in enumerate(members):
            _draw_dataset(rows[:, column], done[done["dataset"] == name], name, styles)
        for axes, label in zip(rows[:, 0], _ROWS.values(), strict=True):
            axes.set_ylabel(label)
    width = _INCHES_A_LINE + _INCHES_A_CHARACTER * max(len(", ".join(names)) for names in styles)
    most = int(figure.get_size_inches()[0] / width)
    with_size = {names: {"markersize": 5, **style} for names, style in styles.items()}
    legend_above(figure, with_size, columns=max(1, min(len(styles), most)))
    save_figure(figure, path)


def _draw_dataset(
    panels: Any, cells: pandas.DataFrame, name: str, styles: dict[tuple[str, str], dict[str, Any]]
) -> None:
    for axes, metric in zip(panels, _ROWS, strict=True):
        axes.set_visible(True)
        _draw_panel(axes, cells, metric, styles)
    panels[0].set_title(name)
    panels[-1].set_xlabel("training rows n")


def _styles(done: pandas.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    """How each kernel and objective is drawn: colour by kernel, line and marker by objective."""
    kernels = sorted(done["kernel_label"].unique())
    objectives = ordered_objectives(done["objective_label"])
    present = set(zip(done["kernel_label"], done["objective_label"], strict=True))
    styles = {}
    for i, kernel in enumerate(kernels):
        for j, objective in enumerate(objectives):
            if (kernel, objective) in present:
                color = _COLORS[i % len(_COLORS)]
                style, marker = _STYLES[j % len(_STYLES)]
                # Hollow from the second objective on: told apart without a line too.
                face = color if j == 0 else "white"
                styles[kernel, objective] = {
                    "color": color, "linestyle": style, "marker": marker, "markerfacecolor": face,
                }  # fmt: skip
    return styles


def _draw_panel(
    axes: Axes, cells: pandas.DataFrame, metric: str, styles: dict[tuple[str, str], dict[str, Any]]
) -> None:
    sizes = sorted(int(n) for n in cells["n"].unique())
    place = math.log2 if sizes[-1] > 10 * sizes[0] else float
    ticks = [place(n) for n in sizes]
    gap = min((b - a for a, b in itertools.pairwise(ticks)), default=1.0)
    spread = (0.6 if len(sizes) == 1 else 0.25) * gap  # side by side, so that no bar hides another
    table = means(cells, metric, ("kernel_label", "objective_label", "n")).reset_index()
    for order, (key, style) in enumerate(styles.items()):
        chosen = (table["kernel_label"] == key[0]) & (table["objective_label"] == key[1])
        line = table[chosen]
        shift = spread * ((order + 0.5) / len(styles) - 0.5)
        axes.errorbar(
            [place(n) + shift for n in line["n"]], line["mean"], yerr=line["se"].fillna(0.0),
            markersize=5, linewidth=1.3, elinewidth=1, capsize=2, **style,
        )  # fmt: skip
    axes.set_xlim(ticks[0] - 0.6 * gap, ticks[-1] + 0.6 * gap)
    axes.set_xticks(ticks, [str(n) for n in sizes])
    error = table["se"].fillna(0.0)
    _set_scale(axes, metric, float((table["mean"] - error).min()), table["mean"] + error)
    bare(axes)


def _set_scale(axes: Axes, metric: str, low: float, tops: pandas.Series) -> None:
    """Keeps what is low apart where something else is far higher, with plain numbers."""
    high = float(tops.max())
    if metric == "rmse" and 0 < low < high / 4:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.15, high * 1.15)
        marks = [digit * 10.0**power for power in range(-5, 6) for digit in (1, 2, 5)]
    elif metric == "nll" and high > 5 * max(1.0, abs(float(tops.median()))):
        axes.set_yscale("symlog", linthresh=2, linscale=1.5)
        axes.set_ylim(low - 0.3, high * 1.3)
        marks = [-10, -5, -2, -1, 0, 1, *(digit * 10**p for p in range(7) for digit in (2, 10))]
    else:
        return
    bottom, top = axes.get_ylim()
    marks = [mark for mark in marks if bottom <= mark <= top]
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axes.yaxis.set_minor_locator(NullLocator())
