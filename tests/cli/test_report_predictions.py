"""Scores of predictions, and which model each criterion chooses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from gpclml.cli.report import predicted as predictions_of
from gpclml.cli.report import prediction_scores
from gpclml.cli.report.predictions import best_on_test, lead_of_best
from gpclml.cli.report.words import answer, choice_rows, headline
from gpclml.errors import ShapeError
from gpclml.evaluation import score_models
from gpclml.inference import posterior
from gpclml.linalg import dense, safe_cholesky
from gpclml.models import GPRegression


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(40, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(40, generator=generator, dtype=torch.float64)
    return x, 30 * torch.sin(6 * x[:, 0]) + noise + 7


def test_scores_are_those_of_scipy():
    rng = np.random.default_rng(0)
    y, mean, deviation = rng.standard_normal((3, 50))
    deviation = np.abs(deviation) + 0.5
    scores = prediction_scores(*map(torch.tensor, (y, mean, deviation)))
    squares = (y - mean) ** 2
    logs = norm.logpdf(y, mean, deviation)
    low, high = norm.interval(0.9, mean, deviation)
    inside = (low <= y) & (y <= high)
    assert scores.rmse == pytest.approx(math.sqrt(squares.mean()))
    assert scores.rmse_se == pytest.approx(squares.std(ddof=1) / math.sqrt(50) / 2 / scores.rmse)
    assert scores.nll == pytest.approx(-logs.mean())
    assert scores.nll_se == pytest.approx(logs.std(ddof=1) / math.sqrt(50))
    assert scores.coverage == pytest.approx(inside.mean())
    np.testing.assert_allclose(scores.log_densities, logs)


def test_the_error_of_the_rmse_is_that_of_repeated_draws():
    generator = torch.Generator().manual_seed(1)
    errors = torch.randn(1000, 200, generator=generator, dtype=torch.float64)
    zero, one = torch.zeros(200, dtype=torch.float64), torch.ones(200, dtype=torch.float64)
    scores = [prediction_scores(row, zero, one) for row in errors]
    spread = float(np.std([one.rmse for one in scores]))
    assert np.mean([one.rmse_se for one in scores]) == pytest.approx(spread, rel=0.1)
    covered = float(np.mean([one.coverage for one in scores]))
    assert covered == pytest.approx(0.9, abs=0.004)


def test_many_rows_are_predicted_from_one_factorization(monkeypatch, capsys):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 2, generator=generator, dtype=torch.float64)
    new = torch.rand(25_000, 2, generator=generator, dtype=torch.float64)
    model = GPRegression(x, x.sum(-1).sin())
    factored = []

    def counted(matrix, *options, **more):
        factored.append(tuple(matrix.shape))
        return safe_cholesky(matrix, *options, **more)

    monkeypatch.setattr(dense, "safe_cholesky", counted)
    mean, deviation = predictions_of(model, new)
    assert factored == [(400, 400)]
    assert capsys.readouterr().err == ""
    last = model.predict(new[-7:])
    torch.testing.assert_close(mean[-7:], last.mean.detach())
    torch.testing.assert_close(deviation[-7:], last.stddev.detach())
    predictions_of(model, new, True)
    assert "predict" in capsys.readouterr().err


def test_shapes_must_agree():
    one = torch.zeros(3)
    for shapes in ((one, one, one[:2]), (one, one[:2], one), (one[:0], one[:0], one[:0])):
        with pytest.raises(ShapeError):
            prediction_scores(*shapes)


def test_predictions_in_parts_are_those_of_one_call(data, monkeypatch):
    x, y = data
    model = GPRegression(x, y)
    mean, deviation = predictions_of(model, x)
    monkeypatch.setattr(posterior, "_CHUNK", 7)
    parts = predictions_of(model, x)
    torch.testing.assert_close((mean, deviation), parts)
    normal = model.predict(x)
    torch.testing.assert_close(mean, normal.mean)
    torch.testing.assert_close(deviation, normal.stddev)
    assert [len(part) for part in predictions_of(model, x[:0])] == [0, 0]


@pytest.fixture(scope="module")
def compared(data):
    """A good model and a bad one, compared, and their scores on other rows."""
    x, y = data
    good, bad = GPRegression(x[:30], y[:30]), GPRegression(x[:30], y[:30], kernel="matern")
    good.covar_module.base_kernel.lengthscale = 0.8
    good.likelihood.noise = 0.01
    bad.likelihood.noise = 5.0
    comparison = score_models({"bad": bad, "good": good}, orderings=20)
    scores = {
        name: prediction_scores(y[30:], *predictions_of(model, x[30:]))
        for name, model in comparison.models.items()
    }
    return comparison, scores


def test_all_choose_the_good_model_and_it_is_said(compared):
    comparison, scores = compared
    assert best_on_test(scores) == "good"
    chosen = [(name, cells[0][0], cells[-1][0]) for name, cells in choice_rows(*compared)]
    assert chosen == [(name, "good", "the same") for name in ("LML", "CLML", "LOO")]
    said = headline(comparison, "price")
    assert said == "good ranks first for price, and all three criteria agree."
    assert "They prefer good too." in answer(comparison, scores)
    assert f"off by {scores['good'].rmse:.4g}" in answer(comparison, scores)


def test_a_disagreement_is_said(compared):
    comparison, scores = compared
    bad = replace(comparison.scores["bad"], lml=1e6)
    unclear = replace(comparison, scores={**comparison.scores, "bad": bad}, findings=())
    assert headline(unclear, "price") == (
        "good ranks first for price; LML prefers bad, but not clearly."
    )
    warning = type("Warning", (), {"name": "criteria-disagree", "models": ("good", "bad")})
    assert headline(replace(unclear, findings=(warning,)), "price") == (
        "The criteria disagree: good ranks first for price, but LML prefers bad."
    )
    _, by_lml = choice_rows(unclear, scores)[0]
    assert by_lml[0][0] == "bad"
    assert by_lml[-1][0].startswith("good, by ")
    difference = scores["good"].log_densities - scores["bad"].log_densities
    assert lead_of_best(scores, "bad").value == pytest.approx(float(difference.sum()))
    swapped = {"good": scores["bad"], "bad": scores["good"]}
    assert "They prefer bad, by" in answer(comparison, swapped)
    assert answer(comparison, swapped).endswith(("clearly.", "not clearly."))


def test_one_model_is_not_compared(compared):
    comparison, scores = compared
    alone = score_models({"good": comparison.models["good"]}, orderings=20)
    assert "nothing to compare" in headline(alone, "price")
    assert "prefer" not in answer(alone, {"good": scores["good"]})
