"""Time and memory of a step against n, drawn."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from benchmarks._figures import new_figure, save_figure

__all__ = ["draw_costs"]


def draw_costs(table: pd.DataFrame, path: Path) -> None:
    """Draws seconds and GiB of each method against n, both axes logarithmic.

    Args:
        table: Rows of :func:`benchmarks.speed.scale.cost.cost_of_steps`.
        path: Image file.

    Raises:
        DataError: It cannot be written.
    """
    columns = [name for name in ("seconds", "GiB") if name in table]
    figure = new_figure(5.5 * len(columns), 4.2, layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    for ax, column in zip(axes, columns, strict=True):
        for method, rows in table.groupby("method", sort=False):
            rows = rows.sort_values("n")
            ax.loglog(rows["n"], rows[column], marker="o", label=method)
        ax.set_xlabel("number of points n")
        ax.set_ylabel("seconds a gradient step" if column == "seconds" else "peak memory, GiB")
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    save_figure(figure, path)
