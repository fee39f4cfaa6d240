"""What is compared at large n: accuracy, cost and training, at sizes that take seconds."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from benchmarks.speed.methods import BASE, SCALE_METHODS, Problem, gradient_step
from benchmarks.speed.scale import cost
from benchmarks.speed.scale.accuracy import errors_of_solvers
from benchmarks.speed.scale.cost import (
    cost_of_steps,
    draw_costs,
    machine_constants,
    methods_that_fit,
    slopes,
)
from benchmarks.speed.scale.training import Data, compare_training, full_evaluation
from gpclml.errors import DataError


def test_errors_are_within_their_bound():
    row = errors_of_solvers("diabetes", 300, 0.1, True, block=30, rank=50)
    assert row["value error"] <= row["bound"] <= 1e-3
    assert row["gradient error"] < 0.01
    assert row["LML gradient error"] < 1e-6  # below n = 800 GPyTorch's default is Cholesky too


def test_every_method_takes_a_step():
    problem = Problem(300)
    for name in SCALE_METHODS:
        assert torch.isfinite(gradient_step(name, problem)())
        assert all(p.grad is not None for p in problem.model.parameters())


def test_a_row_for_each_method_that_fits(monkeypatch, tmp_path):
    table = pd.concat([cost_of_steps(n, rounds=1, memory=False) for n in (60, 120)])
    assert len(table) == 2 * (len(SCALE_METHODS) - 1)
    assert (table.loc[table["method"] == BASE, "ratio"] == 1).all()
    grown = slopes(table.assign(seconds=table["n"] ** 3.0, GiB=table["n"] ** 2.0))
    assert grown["seconds"].tolist() == pytest.approx([3.0] * len(grown))
    assert grown["GiB"].tolist() == pytest.approx([2.0] * len(grown))
    draw_costs(table, tmp_path / "costs.png")
    assert (tmp_path / "costs.png").stat().st_size > 1000
    with pytest.raises(DataError):
        draw_costs(table, tmp_path / "none" / "costs.png")
    monkeypatch.setattr(cost, "available_memory", lambda device: 10 * 5000**2 * 4)
    assert methods_that_fit(5000, torch.float32, "cpu") == [
        "CLML of 256, cg", "CLML of 256 given 4000",
    ]  # fmt: skip


def test_rates_are_positive():
    row = machine_constants(200, torch.float64, columns=10, rounds=1).iloc[0]
    assert (row[["product", "tall product", "Cholesky", "kernel"]] > 0).all()


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(700, 2, generator=generator)
    y = (6 * x).sin().sum(-1) + 0.1 * torch.randn(700, generator=generator)
    return Data(x[:600], y[:600], x[600:], y[600:])


def test_trainings_are_compared_on_the_same_points(data, monkeypatch):
    monkeypatch.setattr("benchmarks.speed.scale.training.FEW", 60)
    monkeypatch.setattr("benchmarks.speed.scale.training.CONDITION_ON", 100)
    monkeypatch.setattr("benchmarks.speed.scale.training.BLOCK", 20)
    # As many steps of each, where the command gives each as much time.
    monkeypatch.setattr("benchmarks.speed.scale.training._timed", lambda seconds: iter(range(20)))
    table = pd.concat(compare_training(data, steps=20), ignore_index=True)
    assert table["given"].tolist() == [600, 600, 60, 600, 60]
    assert table["less than redrawn"][0] == 0
    assert (table["NLL"] < 1.0).all()
    assert table["error bound"].max() < 0.1
    given_all = table.set_index(["trained on", "given"])["NLL"]
    assert given_all["LML of fixed 60", 600] < given_all["LML of fixed 60", 60]


def test_a_full_evaluation_says_how_good_it_is(data, monkeypatch):
    monkeypatch.setattr("benchmarks.speed.scale.training._RANK_OF_ONE", 50)
    row = full_evaluation(data, block=30).iloc[0]
    assert row["residual"] <= 1e-3
    assert row["error bound"] <= 1e-3
    assert math.isfinite(row["nats per point"])
