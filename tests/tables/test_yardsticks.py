"""What a report says of a stack, of trees and of the mean on the test rows."""

from __future__ import annotations

import json

import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression

from gpclml import StackedGP
from gpclml.tables import predictions as module
from gpclml.tables.predictions import choose, prediction_scores, yardsticks


def split(function, n=80, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2 * n, 2, generator=generator, dtype=torch.float64)
    y = function(x) + 0.05 * torch.randn(2 * n, generator=generator, dtype=torch.float64)
    return (x[:n], y[:n]), (x[n:], y[n:])


def scores_of(train, test):
    """Scores of all yardsticks but the line."""
    predictors, _ = yardsticks(train, seed=0)
    return {
        name: prediction_scores(test[1], predict(test[0])) for name, predict in predictors.items()
    }


def test_predictions_are_those_of_the_libraries():
    train, (x, y) = split(lambda x: (6 * x[:, 0]).sin())
    predictors, failures = yardsticks(train, seed=3, with_line=True)
    assert list(predictors) == ["stack", "trees", "linear", "mean"]
    assert not failures
    stack = StackedGP(seed=3).fit(*train).predict(x)
    torch.testing.assert_close(predictors["stack"](x).mean, stack.mean)
    trees = HistGradientBoostingRegressor(random_state=3)
    trees.fit(train[0].numpy(), train[1].numpy())
    torch.testing.assert_close(predictors["trees"](x), torch.from_numpy(trees.predict(x.numpy())))
    line = LinearRegression().fit(train[0].numpy(), train[1].numpy()).predict(x.numpy())
    assert prediction_scores(y, predictors["linear"](x)).rmse == pytest.approx(
        float((torch.from_numpy(line) - y).square().mean().sqrt()), rel=0.05
    )
    assert bool((predictors["mean"](x) == train[1].mean()).all())
    assert 0.7 < prediction_scores(y, predictors["stack"](x)).coverage <= 1
    assert not prediction_scores(y, predictors["trees"](x)).has_intervals
    assert "linear" not in yardsticks(train, seed=3)[0]


def test_missing_inputs_are_predicted_from_the_others():
    (x, y), (new, _) = split(lambda x: x[:, 0])
    x[:, 1] = x[:, 0]
    new[:, 1] = new[:, 0]
    lacking = new.clone()
    lacking[::3, 0] = torch.nan
    predictors, _ = yardsticks((x, y), seed=0, with_line=True)
    for name in ("stack", "trees", "linear"):
        found, expected = (
            one if isinstance(one, torch.Tensor) else one.mean
            for one in map(predictors[name], (lacking, new))
        )
        torch.testing.assert_close(found, expected, atol=0.1, rtol=0)


def test_they_are_rows_below_the_models(report):
    folder, result = report
    record = json.loads((folder / "report.json").read_text())
    assert list(record["others"]) == ["stack", "trees", "mean"]
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    squares = [record["others"][name]["test_rmse"] ** 2 for name in ("trees", "mean")]
    assert f"{100 * (1 - squares[0] / squares[1]):.0f}\N{NO-BREAK SPACE}%" in rows["trees"]
    assert "0\N{NO-BREAK SPACE}%" in rows["mean"]
    page = (folder / "index.html").read_text()
    assert "<th>trees</th>" in page
    assert "<dt>trees</dt><dd>a tree ensemble" in page


def test_trees_that_are_clearly_better_are_chosen():
    """Steps in each of ten columns, which a stationary covariance does not find."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(900, 10, generator=generator, dtype=torch.float64)
    y = ((x[:, 0] * 16).floor() % 2) * 5 + (x[:, 1] > 0.5) * 3.0
    choice = choose([], scores_of((x[:600], y[:600]), (x[600:], y[600:])))
    assert choice[:3] == ("trees", "stack", True)
    assert choice.beaten == ("stack", "mean")
    smooth = choose([], scores_of(*split(lambda x: (6 * x[:, 0]).sin())))
    assert smooth[:3] == ("stack", "stack", True)


def test_inputs_that_say_nothing():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(60, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(60, generator=generator, dtype=torch.float64)
    y[30:] = y[:30].mean()  # which nothing can predict better than the mean
    choice = choose([], scores_of((x[:30], y[:30]), (x[30:], y[30:])))
    assert not choice.explains


def test_a_stack_that_would_take_long_is_said_to_be_left_out(monkeypatch):
    monkeypatch.setattr(module, "_MOST_STACKED", 20)
    predictors, (said,) = yardsticks(split(lambda x: x[:, 0])[0], seed=0)
    assert list(predictors) == ["trees", "mean"]
    assert said.startswith("stack is left out because it takes minutes with more than 20 training")


def test_what_fails_is_said_and_ends_nothing(monkeypatch):
    class Fails:
        def __init__(self, seed):
            raise RuntimeError("no such luck")

    monkeypatch.setattr(module, "StackedGP", Fails)
    predictors, failures = yardsticks(split(lambda x: x[:, 0])[0], seed=0)
    assert failures == ["stack failed (no such luck)."]
    assert list(predictors) == ["trees", "mean"]
