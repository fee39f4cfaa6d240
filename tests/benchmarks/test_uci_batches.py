"""Cells trained together are the cells trained alone."""

from __future__ import annotations

import pytest

from benchmarks.uci.cells import batch_label, most_in_batch, run_cell, run_cells
from benchmarks.uci.grid import Product, make_grid
from gpclml.errors import ArgumentError

TIMES = ("train_seconds",)


def grid(objectives=("lml", "clml"), kernels=("deep-bottleneck",), n=20, **options):
    options = {"seeds": 2, "steps": (6,)} | options
    product = Product(("diabetes",), (n,), objectives=objectives, kernels=kernels, **options)
    return make_grid([product])


def test_metrics_are_those_of_the_cells_alone():
    cells = grid()
    assert len(cells) == 4
    for cell, answer in zip(cells, run_cells(cells), strict=True):
        alone = run_cell(cell)
        assert answer.keys() == alone.keys()
        for name in alone.keys() - set(TIMES):
            assert answer[name] == pytest.approx(alone[name], rel=1e-6, abs=1e-8), name


def test_a_cell_that_cannot_be_prepared_gives_its_error_alone():
    cells = [*grid(["lml"]), {**grid(["lml"])[0], "n": 10**6}]
    *good, bad = run_cells(cells)
    assert isinstance(bad, ArgumentError)
    assert "1000000" in str(bad) or "10" in str(bad)
    assert all(answer["num_steps"] == 6 for answer in good)


def test_only_cells_with_a_fixed_number_of_adam_steps_are_batched():
    sizes = {
        (cell["kernel"], cell["objective"]): most_in_batch(cell)
        for cell in grid(("lml", "clml", "lml-subset"), ("deep-bottleneck", "deep", "rbf"))
    }
    batched = {key for key, size in sizes.items() if size > 1}
    assert batched == {("deep-bottleneck", "lml"), ("deep-bottleneck", "clml")}
    large = [{**cell, "n": 700} for cell in grid()]
    assert {most_in_batch(cell) for cell in large} == {1}


def test_seeds_share_a_label_and_settings_do_not():
    cells = grid(held_out=(0.1, 0.5))
    assert len({batch_label(cell) for cell in cells}) == 3
    on_gpu = [{**cell, "device": "cuda"} for cell in cells]
    assert len({batch_label(cell) for cell in on_gpu}) == 1
    assert batch_label(cells[0]) != batch_label(grid(steps=(7,))[0])
