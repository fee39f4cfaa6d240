"""The tables of the report: what each kernel and objective reaches, beside the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas

from benchmarks._tables import section, table
from benchmarks.dkt.studies import STUDIES

__all__ = ["sections"]

_METRICS = {
    "accuracy": "accuracy, %", "mse": "squared error", "nll": "NLL, nats a query point",
    "calibration_error": "expected calibration error", "train_seconds": "seconds of training",
}  # fmt: skip
_MAIN = ("accuracy", "mse")
_KEYS = ["study", "shots", "kernel", "objective"]
_ABOUT = (
    "Mean over seeds ± its standard error, and half the 95% interval over the test tasks of all "
    "seeds. `pixels` is the nearest neighbour in classification and a GP fitted to each task alone "
    "in regression."
)
_ABOUT_DIFFERENCES = (
    "CLML less LML, paired by seed: mean ± standard error. The CLML conditions on the support "
    "points and scores the query points."
)


def sections(done: pandas.DataFrame) -> Iterator[str]:
    """The sections of the report."""
    done = done.assign(objective=done["objective"].fillna("-"))
    for name in sorted(set(done["study"])):
        yield f"- `{name}`: {STUDIES[name].about}."
    yield section("Results", _ABOUT, table(_results(done)))
    differences = _differences(done)
    if len(differences):
        yield section("CLML less LML", _ABOUT_DIFFERENCES, table(differences))


def _results(done: pandas.DataFrame) -> pandas.DataFrame:
    rows = {}
    for key, group in done.groupby(_KEYS, sort=True):
        cells = {}
        for name, title in _METRICS.items():
            if name not in group:
                continue
            cells[title] = _mean(group, name)
            if name in _MAIN:
                cells[f"95% over tasks ({name})"] = _interval(group, name)
        rows[key] = cells
    frame = pandas.DataFrame.from_dict(rows, orient="index")
    frame.index = pandas.MultiIndex.from_tuples(list(rows), names=_KEYS)
    return frame.dropna(axis="columns", how="all").fillna("-")


def _mean(group: pandas.DataFrame, name: str) -> str:
    """Over seeds, with its standard error where there are several."""
    values = _in_units(group[name].dropna(), name)
    if values.empty:
        return "-"
    if name == "train_seconds":
        return f"{values.mean():.0f}"
    digits = _digits(name)
    error = values.std() / math.sqrt(len(values))
    shown = "" if error != error else f" ± {error:.{digits}f}"
    return f"{values.mean():.{digits}f}{shown}"


def _interval(group: pandas.DataFrame, name: str) -> str:
    """Half the 95% interval of the mean over the test tasks of all seeds together."""
    halves = _in_units(group.loc[group[name].notna(), "interval"], name)
    if halves.empty:
        return "-"
    return f"± {math.sqrt((halves**2).sum()) / len(halves):.{_digits(name)}f}"


def _digits(name: str) -> int:
    return 1 if name in ("accuracy", "train_seconds") else 3


def _in_units(values: pandas.Series, name: str) -> pandas.Series:
    return 100 * values if name == "accuracy" else values


def _differences(done: pandas.DataFrame) -> pandas.DataFrame:
    keys = ["study", "shots", "kernel"]
    both = [
        done[done["objective"] == objective].set_index([*keys, "seed"])
        for objective in ("clml", "lml")
    ]
    rows: dict[tuple, dict[str, str]] = {}
    for name in ("accuracy", "mse", "nll"):
        if name not in done:
            continue
        pairs = (both[0][name] - both[1][name]).dropna()
        for key, values in _in_units(pairs, name).groupby(level=keys):
            error = values.std() / math.sqrt(len(values))
            digits = _digits(name)
            text = f"{values.mean():+.{digits}f}"
            text += "" if error != error else f" ± {error:.{digits}f}"
            rows.setdefault(key, {})[_METRICS[name]] = text
    if not rows:
        return pandas.DataFrame()
    frame = pandas.DataFrame.from_dict(rows, orient="index").fillna("-")
    frame.index = pandas.MultiIndex.from_tuples(list(rows), names=keys)
    return frame
