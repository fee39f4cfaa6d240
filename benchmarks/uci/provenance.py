"""Where a table comes from: the commands that compute its cells."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from benchmarks.uci.grid import product_cells
from benchmarks.uci.studies import STUDIES, Product
from benchmarks.uci.training import has_fixed_steps
from gpclml import datasets

if TYPE_CHECKING:
    import pandas

__all__ = ["CONFIGURATION", "commands_of"]

CONFIGURATION = (
    "dataset", "n", "seed", "objective", "kernel", "mean", "optimizer", "steps", "lr",
    "held_out", "trace", "dtype", "device",
)  # fmt: skip
"""The settings of a cell."""

PROGRAM = "python -m benchmarks.uci run"
_LISTS = {"datasets": "dataset", "n": "n", "objectives": "objective", "kernel": "kernel"}
_SETTINGS = ("mean", "steps", "lr", "held_out", "trace", "dtype", "device")
_USUAL_DTYPE = Product(()).dtype

Row = tuple[Any, ...]


def commands_of(cells: pandas.DataFrame, results_path: str) -> list[str]:
    """The commands that compute these cells: of named grids where all of one is there.

    Other cells are put down to products of settings, which may name more cells than there
    are after an interrupted or selective sweep.

    Args:
        cells: Configurations of done and failed cells, a row each.
        results_path: The results file to name.
    """
    rows = cells[list(CONFIGURATION)].itertuples(index=False, name=None)
    places = {tuple(map(_plain, row)): place for place, row in enumerate(rows)}
    commands, covered = [], set()
    for options, wanted in _named_grids(set(places)):
        commands.append(options)
        covered |= wanted
    rest = cells.iloc[[place for row, place in places.items() if row not in covered]]
    commands += _products(rest) if len(rest) else []
    return [f"{PROGRAM} {options} --results {shlex.quote(results_path)}" for options in commands]


def _named_grids(rows: set[Row]) -> Iterator[tuple[str, set[Row]]]:
    """The options of each named grid that is there, on all its data sets or whole on some."""
    most = max(row[2] for row in rows) + 1
    for name, products in STUDIES.items():
        usual = max(product.seeds for product in products)
        for dtype, device in sorted({row[-2:] for row in rows}):
            for seeds in range(most, 0, -1):
                grid = _by_dataset(products, seeds, dtype, device)
                whole = {dataset: wanted for dataset, wanted in grid.items() if wanted <= rows}
                if whole:
                    some = "" if len(whole) == len(grid) else f" --datasets {_joined(whole)}"
                    count = "" if seeds == usual else f" --seeds {seeds}"
                    kind = "" if dtype == products[0].dtype else f" --dtype {dtype}"
                    options = f"--grid {name}{some}{count}{kind} --device {device}"
                    yield options, set().union(*whole.values())
                    break


def _by_dataset(
    products: Iterable[Product], seeds: int, dtype: str, device: str
) -> dict[str, set[Row]]:
    grid: dict[str, set[Row]] = {}
    for product in products:
        num_train = {name: _num_train(name) for name in product.datasets}
        for cell in product_cells(replace(product, seeds=seeds, dtype=dtype), num_train, device):
            row = tuple(cell[name] for name in CONFIGURATION)
            grid.setdefault(cell["dataset"], set()).add(row)
    return grid


@cache
def _num_train(name: str) -> int:
    return len(datasets.split(datasets.uci_source(name).num_data, 0).train)


def _products(cells: pandas.DataFrame) -> list[str]:
    """Options for each group of cells with the same settings and, by data set, the same n."""
    settings = list(map(_settings, cells.to_dict("records")))
    # Where a setting is not used (None), the cell belongs to any sweep that uses it.
    sweeps = [
        one
        for one in dict.fromkeys(settings)
        if not any(one != other and _covers(other, one) for other in settings)
    ]
    home = [next(sweep for sweep in sweeps if _covers(sweep, one)) for one in settings]
    commands = []
    for sweep in sweeps:
        group = cells[[place == sweep for place in home]]
        sizes = group.groupby("dataset")["n"].agg(_joined)
        for text in dict.fromkeys(sizes):
            commands.append(_options(group[group["dataset"].map(sizes) == text], sweep))
    return commands


def _settings(cell: dict[Any, Any]) -> Row:
    values = {name: _plain(cell[name]) for name in _SETTINGS}
    if not has_fixed_steps(cell["kernel"], cell["mean"]):
        values["trace"] = None
    return tuple(values.values())


def _options(cells: pandas.DataFrame, settings: Row) -> str:
    parts = [f"--{option} {_joined(cells[column])}" for option, column in _LISTS.items()]
    parts += [f"--seeds {int(cells['seed'].max()) + 1}"]
    for name, value in zip(_SETTINGS, settings, strict=True):
        if isinstance(value, bool):
            parts += [f"--{name}"] if value else []
        elif value not in (None, _USUAL_DTYPE):
            parts += [f"--{name.replace('_', '-')} {value}"]
    return " ".join(parts)


def _covers(sweep: Row, settings: Row) -> bool:
    return all(value in (None, own) for own, value in zip(sweep, settings, strict=True))


def _plain(value: Any) -> Any:
    """None for pandas' missing values, and an int for a whole number it made a float of."""
    import pandas

    if pandas.isna(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _joined(values: Iterable[Any]) -> str:
    return ",".join(map(str, sorted(set(values))))
