"""Where a table comes from: the commands, versions and devices behind its cells."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

__all__ = ["commands_of", "describe"]

PROGRAM = "python -m benchmarks.uci run"
PACKAGES = ("gpclml", "torch", "gpytorch", "botorch", "python")
_LISTS = {"datasets": "dataset", "n": "n", "objectives": "objective", "kernel": "kernel"}
_SETTINGS = ("mean", "steps", "lr", "held_out", "device")


def commands_of(cells: pandas.DataFrame, results_path: str) -> list[str]:
    """The commands that compute these cells; several if the cells differ in their settings.

    Each is a whole grid, so after an interrupted or selective sweep it may name more cells
    than there are.

    Args:
        cells: Configurations of done and failed cells, a row each.
        results_path: The results file to name.
    """
    settings = [
        tuple(_plain(value) for value in row)
        for row in cells[list(_SETTINGS)].itertuples(index=False, name=None)
    ]
    # Where a setting is not used (None), the cell belongs to any sweep that uses it.
    sweeps = [
        one
        for one in dict.fromkeys(settings)
        if not any(one != other and _covers(other, one) for other in settings)
    ]
    home = [next(sweep for sweep in sweeps if _covers(sweep, one)) for one in settings]
    return [
        _command(cells[[place == sweep for place in home]], sweep, results_path) for sweep in sweeps
    ]


def describe(done: pandas.DataFrame, num_failed: int) -> list[str]:
    """Lines that say how many cells there are and what computed them.

    Args:
        done: Finished cells, loaded with their provenance.
        num_failed: Number of failed cells.
    """
    versions = [f"{name} {_listed(done[f'_{name}'])}" for name in PACKAGES]
    hours = done["_seconds"].sum() / 3600
    return [
        f"{len(done)} cells done in {hours:.2f} h of computing, {num_failed} failed",
        ", ".join(versions),
        f"device {_listed(done['device'])}, {_listed(done['dtype'])}",
    ]


def _command(cells: pandas.DataFrame, settings: tuple, results_path: str) -> str:
    parts = [PROGRAM]
    parts += [f"--{option} {_joined(cells[column])}" for option, column in _LISTS.items()]
    parts += [f"--seeds {int(cells['seed'].max()) + 1}"]
    for name, value in zip(_SETTINGS, settings, strict=True):
        if value is not None:
            parts += [f"--{name.replace('_', '-')} {value}"]
    return " ".join([*parts, f"--results {shlex.quote(results_path)}"])


def _covers(sweep: tuple, settings: tuple) -> bool:
    return all(value in (None, own) for own, value in zip(sweep, settings, strict=True))


def _plain(value: Any) -> Any:
    """None for pandas' missing values, and an int for a whole number it made a float of."""
    import pandas

    if pandas.isna(value):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _joined(values: Iterable[Any]) -> str:
    return ",".join(map(str, sorted(set(values))))


def _listed(values: Iterable[Any]) -> str:
    return " and ".join(map(str, sorted(set(values))))
