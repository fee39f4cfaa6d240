"""Figures: errors against the number of training rows, and what the CLML changes."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pandas
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from benchmarks._figures import PALETTE, bare, legend_above, new_figure, save_figure
from benchmarks.uci.tables import less_lml, means, ordered_objectives

_MOST_COLUMNS = 3
_ROWS = {"rmse": "RMSE (sd of targets)", "nll": "NLL (nats per point)"}
_STYLES = (
    ("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"),
    ((0, (5, 1, 1, 1, 1, 1)), "v"), ((0, (1, 3)), "P"),
)  # fmt: skip
_DIFFERENCES = {  # with the linear range of the axis
    "rmse": ("test error, standard deviations of the target", 0.1),
    "nll": ("negative log density of a test row, nats", 1.0),
}


def draw_differences(done: pandas.DataFrame, path: str | os.PathLike) -> None:
    """Draws the CLML less the LML of each kernel, paired by seed: a row a data set.

    Bars are standard errors. Axes are linear about zero and logarithmic beyond.

    Args:
        done: Finished cells under both objectives with their labels.
        path: The image file.

    Raises:
        DataError: The file cannot be written.
    """
    sets = sorted(done["dataset"].unique(), reverse=True)
    cases = sorted(set(zip(done["kernel"], done["n"], strict=True)))
    kernels, sizes = (sorted(set(values)) for values in zip(*cases, strict=True))
    styles = {}
    for kernel, n in cases:
        color = PALETTE[kernels.index(kernel) % len(PALETTE)]
        styles[kernel, f"n = {n}"] = {
            "color": color, "marker": _STYLES[sizes.index(n) % len(_STYLES)][1],
            "markerfacecolor": color if n == sizes[0] else "white", "linestyle": "none",
        }  # fmt: skip
    figure = new_figure(9.5, 1.8 + 0.48 * len(sets), layout="constrained")
    grid: Any = figure.subplots(1, len(_DIFFERENCES), sharey=True)
    for axes, (metric, (label, linear)) in zip(grid, _DIFFERENCES.items(), strict=True):
        table = less_lml(done, metric).reset_index()
        table["kernel"] = table["kernel_label"].str.partition(" ")[0]  # settings follow the name
        for order, ((kernel, n), style) in enumerate(zip(cases, styles.values(), strict=True)):
            points = table[(table["kernel"] == kernel) & (table["n"] == n)]
            heights = [sets.index(name) for name in points["dataset"]]
            shift = 0.35 - 0.7 * order / max(len(cases) - 1, 1)
            axes.errorbar(
                points["mean"], [height + shift for height in heights], xerr=points["se"],
                markersize=5, elinewidth=1, **style,
            )  # fmt: skip
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xscale("symlog", linthresh=linear, linscale=1.5)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(f"{label},\nCLML less LML")
        axes.set_yticks(range(len(sets)), sets)
        axes.set_ylim(-0.6, len(sets) - 0.4)
        axes.set_title("\N{LEFTWARDS ARROW} CLML better", loc="left", fontsize=10)
        axes.set_title("LML better \N{RIGHTWARDS ARROW}", loc="right", fontsize=10)
        for border in range(1, len(sets)):
            axes.axhline(border - 0.5, color="0.9", linewidth=0.8, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    legend_above(figure, styles, columns=len(kernels))
    save_figure(figure, path)


def draw_figure(done: pandas.DataFrame, path: str | os.PathLike) -> None:
    """Draws RMSE above NLL, a column a data set, a line a kernel and objective.

    Bars are standard errors over seeds. Where the highest is far above the others, an axis of RMSE
    is logarithmic, and one of NLL is so beyond 2.

    Args:
        done: Finished cells with their labels, as ``benchmarks.uci.study.labelled`` gives them.
        path: The image file.

    Raises:
        DataError: The file cannot be written.
    """
    sets = sorted(done["dataset"].unique())
    styles = _styles(done)
    width, height = min(_MOST_COLUMNS, len(sets)), len(_ROWS) * -(-len(sets) // _MOST_COLUMNS)
    figure = new_figure(1.2 + max(2.7 * width, 5.4), 0.8 + 2.8 * height, layout="constrained")
    grid: Any = figure.subplots(height, width, squeeze=False)
    for index, name in enumerate(sets):
        row, column = divmod(index, width)
        for axes, (metric, label) in zip(
            grid[len(_ROWS) * row :, column], _ROWS.items(), strict=False
        ):
            _draw_panel(axes, done[done["dataset"] == name], metric, styles)
            if column == 0:
                axes.set_ylabel(label)
        grid[len(_ROWS) * row][column].set_title(name)
        grid[len(_ROWS) * (row + 1) - 1][column].set_xlabel("training rows n")
    for axes in grid.flat:
        axes.set_visible(axes.has_data())
    sized = {names: {"markersize": 5, **style} for names, style in styles.items()}
    legend_above(figure, sized, columns=2)
    save_figure(figure, path)


def _styles(done: pandas.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    """How each kernel and objective is drawn: colour by kernel, line and marker by objective."""
    kernels = sorted(done["kernel_label"].unique())
    objectives = ordered_objectives(done["objective_label"])
    present = set(zip(done["kernel_label"], done["objective_label"], strict=True))
    styles = {}
    for kernel, objective in itertools.product(kernels, objectives):
        if (kernel, objective) in present:
            j, color = objectives.index(objective), PALETTE[kernels.index(kernel) % len(PALETTE)]
            style, marker = _STYLES[j % len(_STYLES)]
            # Hollow from the second objective on: told apart without a line too.
            styles[kernel, objective] = {
                "color": color, "linestyle": style, "marker": marker,
                "markerfacecolor": color if j == 0 else "white",
            }  # fmt: skip
    return styles


def _draw_panel(
    axes: Axes, cells: pandas.DataFrame, metric: str, styles: dict[tuple[str, str], dict[str, Any]]
) -> None:
    table = means(cells, metric, ("kernel_label", "objective_label", "n")).reset_index()
    for order, (key, style) in enumerate(styles.items()):
        chosen = (table["kernel_label"] == key[0]) & (table["objective_label"] == key[1])
        line = table[chosen]
        # Side by side, so that no bar hides another.
        shift = 0.008 * table["n"].max() * (order - (len(styles) - 1) / 2)
        axes.errorbar(
            line["n"] + shift, line["mean"], yerr=line["se"].fillna(0.0),
            markersize=5, linewidth=1.3, elinewidth=1, capsize=2, **style,
        )  # fmt: skip
    sizes = sorted(int(n) for n in cells["n"].unique())
    if sizes[-1] > 10 * sizes[0]:
        axes.set_xscale("log")
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    # What is low is kept apart where something else is far higher.
    tops = table["mean"] + table["se"].fillna(0.0)
    if metric == "rmse" and tops.max() > 4 * table["mean"].min() > 0:
        axes.set_yscale("log")
    elif metric == "nll" and tops.max() > 5 * max(1.0, abs(tops.median())):
        axes.set_yscale("symlog", linthresh=2, linscale=1.5)
    bare(axes)
