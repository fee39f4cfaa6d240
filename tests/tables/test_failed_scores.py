"""A model that cannot be scored is a row of the report, and takes nothing else along."""

from __future__ import annotations

import json

import numpy as np
import pandas
import pytest
import torch
from linear_operator.utils.errors import NotPSDError

from gpclml.evaluation import model_scores
from gpclml.tables import comparing, fitting

OPTIONS = "--target", "progression", "--seed", 1, "--steps", 10


@pytest.fixture
def broken(monkeypatch):
    """Makes fits of these models end with a lengthscale that is no number."""

    def make(*names):
        fit = comparing.fit_recipe

        def spoiled(recipe, data, progress):
            saved = fit(recipe, data, progress)
            if recipe.model in names:
                for name, parameter in saved.model.named_parameters():
                    if "lengthscale" in name:
                        parameter.data.fill_(torch.nan)
            return saved

        monkeypatch.setattr(comparing, "fit_recipe", spoiled)
        monkeypatch.setattr(fitting, "fit_recipe", spoiled)

    return make


def no_constants(text):
    raise AssertionError(f"{text} is no JSON")


def test_a_report_survives_a_model_without_scores(gpclml, csv, tmp_path, broken):
    broken("rbf")
    out = tmp_path / "out"
    result = gpclml("compare", csv, *OPTIONS, "--models", "rbf,linear,matern", "--out", out)
    assert result.exit_code == 0, result.output
    assert ["rbf"] in [line.split() for line in result.stdout.splitlines()]  # a row of no score
    assert "rbf has no LML, CLML, LOO, learning curves" in result.stdout
    record = json.loads((out / "report.json").read_text(), parse_constant=no_constants)
    assert record["chosen"] in ("linear", "matern")
    assert list(record["models"])[-1] == "rbf"
    line = record["models"]["rbf"]
    assert line["loo"] is line["weight"] is line["test_nll"] is None
    assert "not-scored" in line["findings"]
    assert line["failure"].startswith("no LML, CLML, LOO")
    weights = [record["models"][name]["weight"] for name in ("linear", "matern")]
    assert sum(weights) == pytest.approx(1)
    assert any(note.startswith("rbf could not predict the test rows: ") for note in record["notes"])
    page = (out / "index.html").read_text()
    assert page.count("data:image/png") == 4
    assert "rbf could not predict the test rows" in page
    assert ">nan" not in page


def test_a_report_survives_a_diagnostic(gpclml, csv, tmp_path, monkeypatch):
    """The covariance is looked at again for the wider prior, of which some are no covariance."""
    observed = model_scores.observed_gaussian

    def wider_fails(model, rows, prior_scale=1.0):
        if prior_scale != 1.0:
            raise NotPSDError("the wider covariance is not positive definite")
        return observed(model, rows, prior_scale)

    monkeypatch.setattr(model_scores, "observed_gaussian", wider_fails)
    out = tmp_path / "out"
    result = gpclml("compare", csv, *OPTIONS, "--models", "rbf,linear", "--out", out)
    assert result.exit_code == 0, result.output
    told = "has no wider prior (the wider covariance is not positive definite)."
    for name in ("rbf", "linear"):
        assert f"{name} {told}" in result.stdout
        assert f"{name} {told}" in (out / "index.html").read_text()


def test_one_scored_model_is_said_to_be_the_only_one(gpclml, csv, tmp_path, broken):
    broken("rbf")
    out = tmp_path / "out"
    result = gpclml("compare", csv, *OPTIONS, "--models", "rbf,linear", "--out", out)
    assert result.exit_code == 0, result.output
    assert "linear is the only model whose LOO could be computed." in result.stdout


def test_where_no_model_can_be_scored_the_command_says_why(gpclml, csv, tmp_path, broken):
    broken("rbf", "matern")
    out = tmp_path / "out"
    result = gpclml("compare", csv, *OPTIONS, "--models", "rbf,matern", "--out", out)
    assert result.exit_code == 3
    assert "Error: covariance: got" in result.stderr
    assert "This happened in the scores of models['rbf']." in result.stderr
    assert "Traceback" not in result.output
    assert not out.exists()


def test_a_fitted_model_is_kept_where_its_scores_fail(gpclml, csv, tmp_path, broken):
    broken("rbf")
    out = tmp_path / "model"
    result = gpclml("fit", csv, *OPTIONS, "--model", "rbf", "--out", out)
    assert result.exit_code == 0, result.output
    assert "no LML (covariance: got" in result.stdout
    assert "no LOO (covariance: got" in result.stdout
    assert (out / "model.pt").is_file()


def test_fits_that_failed_or_have_no_noise_are_said_so_in_table_terminal_and_note(gpclml, tmp_path):
    rng = np.random.default_rng(3)
    x = rng.uniform(size=(50, 10))
    y = np.sin(3 * x[:, :3]).sum(1) + 0.5 * rng.normal(size=50)
    table = pandas.DataFrame(np.c_[x, y], columns=[*"abcdefghij", "y"])
    csv, out = tmp_path / "noisy.csv", tmp_path / "out"
    table.to_csv(csv, index=False)
    words = "--target", "y", "--models", "linear,rbf", "--out", out
    result = gpclml("compare", csv, *words)
    assert result.exit_code == 0, result.output
    record = json.loads((out / "report.json").read_text())
    assert record["models"]["linear"]["rank"] is None
    assert record["models"]["rbf"]["rank"] == 0
    page = (out / "index.html").read_text()
    for said in ("linear (fit failed, predicts the mean)", "rbf (noise at its bound)"):
        assert said in result.stdout
        assert page.count(said) == 2  # the tables of test scores and of criteria
    for said in ("linear: The fit explains nothing", "rbf: The noise ended at its lower bound"):
        assert said in result.stdout
        assert said in page
    table[:40].to_csv(csv, index=False)
    fitted = gpclml("fit", csv, "--target", "y", "--model", "rbf", "--out", tmp_path / "model")
    assert fitted.exit_code == 0, fitted.output
    assert "The noise ended at its lower bound" in fitted.stderr
