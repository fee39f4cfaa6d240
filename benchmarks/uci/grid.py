"""The grids of the benchmark: products of settings, some of them with a name, and their cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from benchmarks import data
from benchmarks._options import check_device, check_known, check_positive
from benchmarks.uci.training import objective_names, optimizer_for, uses_held_out
from gpclml.errors import ArgumentError


@dataclass(frozen=True)
class Product:
    """Every combination of these settings, which are those of the command."""

    datasets: tuple[str, ...]
    sizes: tuple[int, ...] = (100,)
    seeds: int = 10
    objectives: tuple[str, ...] = ("lml", "clml")
    kernels: tuple[str, ...] = ("rbf", "deep", "deep-bottleneck")
    means: tuple[str, ...] = ("constant",)
    steps: tuple[int, ...] = (300,)
    lr: float = 0.01
    held_out: tuple[float, ...] = (0.1,)
    dtype: str = "float64"


_PAPER = ("boston", "concrete", "energy", "power", "wine-red", "wine-white")
_ALL = (*_PAPER, "kin8nm", "naval", "protein", "yacht")
_LARGE = ("kin8nm", "naval", "protein", "power")
_ABLATION = ("boston", "concrete", "energy", "yacht", "power", "wine-red")
_UP_TO_700 = tuple(range(100, 701, 100))
_DEEP_SIZES = (100, 200, 300, 500, 700)
_SHARES = (0.9, 0.75, 0.5, 0.25, 0.1)


def _ablated(
    objectives: tuple[str, ...], steps: int = 300, held_out: tuple[float, ...] = (0.1,)
) -> Product:
    return Product(
        _ABLATION, objectives=objectives, kernels=("deep-bottleneck",), means=("constant", "mlp"),
        steps=(steps,), held_out=held_out,
    )  # fmt: skip


STUDIES: Mapping[str, tuple[Product, ...]] = MappingProxyType(
    {
        "paper": (
            Product(
                _PAPER, _UP_TO_700, kernels=("deep-bottleneck",), steps=(100,), held_out=_SHARES,
                dtype="float32",
            ),
        ),
        "baselines": (
            Product(_ALL, _UP_TO_700, 10, ("lml",), ("rbf", "rq", "spectral_mixture")),
            Product(_ALL, _UP_TO_700, objectives=("clml",), kernels=("rbf",)),
        ),
        "deep": (
            Product(_ALL, _DEEP_SIZES, objectives=("clml",), kernels=("deep",)),
            Product(_ALL, _DEEP_SIZES, objectives=("lml",), kernels=("rbf",)),
        ),
        "large": (
            Product(_LARGE, (1000, 2000, 5000), 5, ("clml",), ("deep",)),
            Product(_LARGE, (1000, 2000, 5000), 5, ("lml",), ("rbf", "rq")),
        ),
        "ablation": (
            _ablated(("lml", "clml", "clml-fixed", "clml-folds", "clml-orderings", "loo",
                      "lml-subset")),
            _ablated(("clml",), held_out=(0.25, 0.5, 0.75, 0.9)),
            _ablated(("lml", "clml"), steps=100),
            Product(_ABLATION, kernels=("deep-bottleneck",), steps=(1000,)),
            Product(_ABLATION, kernels=("rbf",)),
        ),
    }
)  # fmt: skip
"""Named grids, each a union of products: ``paper`` is that of Lotfi et al. (2022), Figures 9(a)
and 24, in single precision as their code; ``baselines`` kernels without a network; ``deep`` the
residual deep kernel beside the plain ARD GP; ``large`` the same from n = 1000; ``ablation`` what
makes the difference between the objectives at n = 100."""


_DTYPES = ("float64", "float32")


def named_products(name: str, **changes: Any) -> tuple[Product, ...]:
    """The products of a named grid.

    Args:
        name: A name of ``benchmarks.uci.grid.STUDIES``.
        **changes: Settings of :class:`Product` that replace the grid's own, in every product.

    Raises:
        UnknownNameError: No such grid.
    """
    check_known("grid", [name], STUDIES)
    return tuple(replace(product, **changes) for product in STUDIES[name])


def make_grid(
    products: Iterable[Product], *, device: str = "cpu", leave_out: bool = False
) -> list[dict[str, Any]]:
    """The cells of one product of settings or several, each cell once.

    Loads every data set, which fetches what is missing.

    Args:
        products: Products of settings.
        device: Where models are trained.
        leave_out: Whether an n above a data set's training rows is passed over in silence
            (see :func:`left_out_sizes`) or an error.

    Raises:
        UnknownNameError: A name is not known; the message lists the nearest known ones.
        ArgumentError: A number is out of range, a data set has too few rows for an n, or a
            share holds out no point or all of them.
        DataError: A data file is corrupt or cannot be fetched.
    """
    products = tuple(products)
    check_device(device)
    for product in products:
        registered = [name for name in product.datasets if ":" not in name]
        check_known("datasets", registered, data.names())
        check_known("objectives", product.objectives, objective_names())
        check_known("dtype", [product.dtype], _DTYPES)
        for kernel, mean in itertools.product(product.kernels, product.means):
            optimizer_for(kernel, mean)
        check_positive(seeds=product.seeds, lr=product.lr)
        for steps in product.steps:
            check_positive(steps=steps)
        for share in product.held_out:
            if not 0 < share < 1:
                fix = "Conditioning on no point, a share of 1, is the objective lml."
                raise ArgumentError("held_out", share, "shares between 0 and 1, 1 - m/n each", fix)
    # Every data set is loaded once here, so that a missing file is told before a cell runs.
    names = {name for product in products for name in product.datasets}
    tables = {name: data.load(name) for name in sorted(names)}
    num_train = {name: len(data.split(table.num_data, 0).train) for name, table in tables.items()}
    for product in products:
        _check_sizes(product, num_train, leave_out)
    cells = (
        {**cell, **tables[cell["dataset"]].origin}
        for product in products
        for cell in product_cells(product, num_train, device)
    )
    # Products overlap: a cell of two of them is one.
    return list({tuple(cell.items()): cell for cell in cells}.values())


def product_cells(
    product: Product, num_train: Mapping[str, int], device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """The cells of a product, without those whose n is above the rows to train on.

    A setting that does not decide a cell's result is None (``steps`` and ``lr`` under L-BFGS,
    ``held_out`` where no share is held out), so that a sweep with another value shares the cell.
    """
    for name, n, seed, kernel, mean, objective, steps, held_out in itertools.product(
        product.datasets, product.sizes, range(product.seeds), product.kernels, product.means,
        product.objectives, product.steps, product.held_out,
    ):  # fmt: skip
        if n > num_train[name]:
            continue
        optimizer = optimizer_for(kernel, mean)
        adam = optimizer == "adam"
        rows = {"dataset": name, "n": n, "seed": seed}
        model = {"objective": objective, "kernel": kernel, "mean": mean, "optimizer": optimizer}
        training = {"steps": steps if adam else None, "lr": product.lr if adam else None}
        share = held_out if uses_held_out(objective) else None
        numbers = {"held_out": share, "dtype": product.dtype, "device": device}
        yield {**rows, **model, **training, **numbers}


def left_out_sizes(
    products: Iterable[Product], cells: Iterable[Mapping[str, Any]]
) -> dict[str, list[int]]:
    """The n of each data set that a grid asks for and has no cell of, where there are any."""
    pairs = [itertools.product(product.datasets, product.sizes) for product in products]
    missing = {*itertools.chain(*pairs)} - {(cell["dataset"], cell["n"]) for cell in cells}
    groups = itertools.groupby(sorted(missing), key=lambda pair: pair[0])
    return {name: [n for _, n in group] for name, group in groups}


def _check_sizes(product: Product, num_train: Mapping[str, int], leave_out: bool) -> None:
    for name, n in itertools.product(product.datasets, product.sizes):
        if not 2 <= n <= num_train[name] and not (leave_out and n > 2):
            expected = f"2 to {num_train[name]}, the {name} rows to train on (90% of all)"
            fix = "Take another n, or leave out the data set."
            raise ArgumentError("n", f"{n} for {name}", expected, fix)
    if any(uses_held_out(objective) for objective in product.objectives):
        for n, share in itertools.product(product.sizes, product.held_out):
            if not 0 < (count := round(share * n)) < n:
                got = f"{share}, which holds out {count} of n = {n} points"
                expected = "at least one point held out and one conditioned on"
                raise ArgumentError("held_out", got, expected, "Take another share or a larger n.")
