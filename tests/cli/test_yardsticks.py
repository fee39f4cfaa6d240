"""What a report says of a stack, of trees and of the mean on the test rows."""

from __future__ import annotations

import re

import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from gpclml import StackedGP
from gpclml.cli import yardsticks
from gpclml.cli.yardsticks import yardstick_sentences


def split(function, n=80, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2 * n, 2, generator=generator, dtype=torch.float64)
    y = function(x) + 0.05 * torch.randn(2 * n, generator=generator, dtype=torch.float64)
    return (x[:n], y[:n]), (x[n:], y[n:])


def test_figures_are_those_of_the_test_rows():
    train, test = split(lambda x: (6 * x[:, 0]).sin())
    said = yardstick_sentences(train, test, seed=3)
    stack = StackedGP(seed=3).fit(*train).predict(test[0])
    trees = HistGradientBoostingRegressor(random_state=3)
    trees.fit(train[0].numpy(), train[1].numpy())
    of_trees = torch.from_numpy(trees.predict(test[0].numpy()))
    for sentence, mean in zip(said, (stack.mean, of_trees), strict=True):
        squares = (mean - test[1]).square()
        explained = 1 - squares.mean() / (test[1] - train[1].mean()).square().mean()
        assert f"RMSE {float(squares.mean().sqrt()):.4g}, R² {float(explained):.3f}" in sentence
    nll = re.search(r"NLL (-?[\d.]+),", said[0])
    assert nll is not None
    assert float(nll[1]) == pytest.approx(-float(stack.log_density(test[1]).mean()), abs=1e-3)


def test_trees_that_are_clearly_better_are_named():
    """Steps in each of ten columns, which a stationary covariance does not find."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(900, 10, generator=generator, dtype=torch.float64)
    y = ((x[:, 0] * 16).floor() % 2) * 5 + (x[:, 1] > 0.5) * 3.0
    said = yardstick_sentences((x[:600], y[:600]), (x[600:], y[600:]), seed=0)
    assert any("trees may be the better choice" in sentence for sentence in said)
    smooth = yardstick_sentences(*split(lambda x: (6 * x[:, 0]).sin()), seed=0)
    assert not any("better choice" in sentence for sentence in smooth)


def test_inputs_that_say_nothing():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(60, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(60, generator=generator, dtype=torch.float64)
    y[30:] = y[:30].mean()  # which nothing can predict better than the mean
    said = yardstick_sentences((x[:30], y[:30]), (x[30:], y[30:]), seed=0)
    assert any("no better than the mean" in sentence for sentence in said)


def test_what_fails_is_said_and_ends_nothing(monkeypatch):
    class Fails:
        def __init__(self, seed):
            raise RuntimeError("no such luck")

    monkeypatch.setattr(yardsticks, "StackedGP", Fails)
    said = yardstick_sentences(*split(lambda x: x[:, 0]), seed=0)
    assert "gpclml.StackedGP failed (no such luck)" in said[0]
    assert "tree ensemble" in said[1]
