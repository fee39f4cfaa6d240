"""What a report says of a stack, of trees and of the mean on the test rows."""

from __future__ import annotations

import json

import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression

from gpclml import StackedGP
from gpclml.tables import predictions as module
from gpclml.tables.predictions import choose, yardsticks


def split(function, n=80, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2 * n, 2, generator=generator, dtype=torch.float64)
    y = function(x) + 0.05 * torch.randn(2 * n, generator=generator, dtype=torch.float64)
    return (x[:n], y[:n]), (x[n:], y[n:])


def test_scores_are_those_of_the_test_rows():
    train, test = split(lambda x: (6 * x[:, 0]).sin())
    found = yardsticks(train, test, seed=3, with_line=True)
    scores = found.scores
    stack = StackedGP(seed=3).fit(*train).predict(test[0])
    trees = HistGradientBoostingRegressor(random_state=3)
    trees.fit(train[0].numpy(), train[1].numpy())
    means = {
        "stack": stack.mean,
        "trees": torch.from_numpy(trees.predict(test[0].numpy())),
        "mean": train[1].mean(),
    }
    line = LinearRegression().fit(train[0].numpy(), train[1].numpy()).predict(test[0].numpy())
    assert scores["linear"].rmse == pytest.approx(
        float((torch.from_numpy(line) - test[1]).square().mean().sqrt()), rel=0.05
    )
    for name, mean in means.items():
        rmse = float((mean - test[1]).square().mean().sqrt())
        assert scores[name].rmse == pytest.approx(rmse, rel=1e-6)
    assert scores["stack"].nll == pytest.approx(-float(stack.log_density(test[1]).mean()), abs=1e-6)
    assert 0.7 < scores["stack"].coverage <= 1
    assert not scores["trees"].has_intervals
    assert not found.failures
    for name, predict in found.predictors.items():
        torch.testing.assert_close(predict(test[0][:9]), scores[name].means[:9])
    assert list(found.predictors) == ["stack", "trees", "linear"]
    assert "linear" not in yardsticks(train, test, seed=3).scores


def test_they_are_rows_below_the_models(report):
    folder, result = report
    record = json.loads((folder / "report.json").read_text())
    assert list(record["others"]) == ["stack", "trees", "mean"]
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    squares = [record["others"][name]["test_rmse"] ** 2 for name in ("trees", "mean")]
    assert f"{100 * (1 - squares[0] / squares[1]):.0f}\N{NO-BREAK SPACE}%" in rows["trees"]
    assert "0\N{NO-BREAK SPACE}%" in rows["mean"]
    page = (folder / "index.html").read_text()
    assert '<th scope="row">trees</th>' in page
    assert "<dt>trees</dt><dd>a tree ensemble" in page


def test_trees_that_are_clearly_better_are_chosen():
    """Steps in each of ten columns, which a stationary covariance does not find."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(900, 10, generator=generator, dtype=torch.float64)
    y = ((x[:, 0] * 16).floor() % 2) * 5 + (x[:, 1] > 0.5) * 3.0
    choice = choose([], yardsticks((x[:600], y[:600]), (x[600:], y[600:]), seed=0).scores)
    assert choice[:3] == ("trees", "stack", True)
    assert choice.beaten == ("stack", "mean")
    smooth = choose([], yardsticks(*split(lambda x: (6 * x[:, 0]).sin()), seed=0).scores)
    assert smooth[:3] == ("stack", "stack", True)


def test_inputs_that_say_nothing():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(60, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(60, generator=generator, dtype=torch.float64)
    y[30:] = y[:30].mean()  # which nothing can predict better than the mean
    choice = choose([], yardsticks((x[:30], y[:30]), (x[30:], y[30:]), seed=0).scores)
    assert not choice.explains


def test_a_stack_that_would_take_long_is_said_to_be_left_out(monkeypatch):
    monkeypatch.setattr(module, "_MOST_STACKED", 20)
    found = yardsticks(*split(lambda x: x[:, 0]), seed=0)
    assert list(found.scores) == ["trees", "mean"]
    (said,) = found.failures
    assert said.startswith("stack is left out because it takes minutes with more than 20 training")


def test_what_fails_is_said_and_ends_nothing(monkeypatch):
    class Fails:
        def __init__(self, seed):
            raise RuntimeError("no such luck")

    monkeypatch.setattr(module, "StackedGP", Fails)
    found = yardsticks(*split(lambda x: x[:, 0]), seed=0)
    assert found.failures == ["stack failed (no such luck)."]
    assert list(found.scores) == ["trees", "mean"]
