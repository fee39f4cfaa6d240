"""Further tables: beside published results, where the order turns, and what training costs."""

from __future__ import annotations

import pandas

from benchmarks.uci.published import PUBLISHED_MEDIANS, PUBLISHED_SHARE
from benchmarks.uci.statistics import CELL
from benchmarks.uci.tables import less_lml, ordered_rows, wide

__all__ = ["published_table", "seconds_table", "steps_table", "turning_table"]


def published_table(done: pandas.DataFrame) -> pandas.DataFrame:
    """Medians of the RMSE over seeds beside those of Lotfi et al. (2022).

    Args:
        done: Finished cells with their labels.

    Returns:
        A row for each n, kernel and data set that both have (bottleneck kernel, constant mean,
        CLML with m = 0.9 n): published and own medians under the LML and the CLML. Empty
        where there is none.
    """
    deep = done[(done["kernel"] == "deep-bottleneck") & (done["mean"] == "constant")]
    share = deep["held_out"] == PUBLISHED_SHARE
    deep = deep[(deep["objective"] == "lml") | ((deep["objective"] == "clml") & share)]
    own = deep.groupby(["dataset", "n", "kernel_label", "objective"])["rmse"].median()
    rows = {}
    for name, n, kernel in own.index.droplevel("objective").unique():
        pair = PUBLISHED_MEDIANS.get(name, {}).get(n)
        ours = [own.get((name, n, kernel, objective)) for objective in ("lml", "clml")]
        if pair is not None and None not in ours:
            values = [f"{value:.3f}" for value in (*pair, *ours)]
            rows[name, n, kernel] = values
    columns = ["paper, LML", "paper, CLML", "ours, LML", "ours, CLML"]
    index = pandas.MultiIndex.from_tuples(list(rows), names=["dataset", "n", "kernel"])
    return pandas.DataFrame(list(rows.values()), index=index, columns=columns)


def turning_table(done: pandas.DataFrame) -> pandas.DataFrame:
    """The first n at which an objective no longer has a lower mean RMSE than the LML.

    Args:
        done: Finished cells with their labels.

    Returns:
        A row for each kernel and objective, a column a data set: the lowest n whose mean
        paired difference is zero or above, ``"> n"`` where there is none up to n. Empty with
        a single n.
    """
    differences = less_lml(done, "rmse")["mean"].reset_index()
    if differences["n"].nunique() < 2:
        return pandas.DataFrame()
    groups = differences.groupby(["dataset", "kernel_label", "objective_label"])
    first = groups.apply(_first_turn, include_groups=False)
    table = first.unstack("dataset").rename_axis(columns=None)
    table.index = table.index.set_names(["kernel", "objective"])
    table = table.where(table.notna(), "-")
    return table.loc[ordered_rows(table.index, place=1)]


def steps_table(done: pandas.DataFrame) -> pandas.DataFrame:
    """Adam steps to the test error that the LML ends with.

    Args:
        done: Finished cells with their labels; those that were traced count.

    Returns:
        As from :func:`benchmarks.uci.tables.wide`: the first of the steps looked at whose
        mean RMSE over seeds is no higher than the LML's at the end of the same number of
        steps, ``"-"`` where there is none. Empty without traced cells.
    """
    if "rmse_at" not in done:
        return pandas.DataFrame()
    traced = done[done["rmse_at"].notna()]
    long = traced[[*CELL, "objective", "steps_at", "rmse_at"]].explode(["steps_at", "rmse_at"])
    long["rmse_at"] = long["rmse_at"].astype(float)
    curves = long.groupby([*CELL, "objective", "steps_at"])["rmse_at"].mean().reset_index()
    ends = curves[curves["objective"] == "lml"].drop_duplicates(list(CELL), keep="last")
    goals = ends.set_index(list(CELL[:3]))["rmse_at"].rename("goal")
    reached = curves.join(goals, on=list(CELL[:3]))
    reached = reached[reached["rmse_at"] <= reached["goal"]]
    first = reached.groupby(list(CELL))["steps_at"].min().astype(int)
    return wide(first) if len(first) else pandas.DataFrame()


def seconds_table(done: pandas.DataFrame) -> pandas.DataFrame:
    """Median wall time of building and training one model, seconds, as text.

    Args:
        done: Finished cells with their labels.
    """
    seconds = done.groupby(list(CELL))["train_seconds"].median()
    return wide(seconds.map(lambda value: f"{value:.2f}"))


def _first_turn(differences: pandas.DataFrame) -> str:
    turned = differences.loc[differences["mean"] >= 0, "n"]
    return f"> {differences['n'].max()}" if turned.empty else str(turned.min())
