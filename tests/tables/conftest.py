"""A real table with all that tables have, and the commands run on it."""

import numpy as np
import pytest
from sklearn.datasets import load_diabetes
from typer.testing import CliRunner

from gpclml.tables import comparing, fitting
from gpclml.tables.command import app

NAME = '<b>sex & "gender"</b>'


@pytest.fixture(scope="session")
def diabetes():
    """Diabetes: 130 rows with categories of an odd name, dates, ids, and missing values."""
    table = load_diabetes(as_frame=True, scaled=False).frame.head(130)
    rng = np.random.default_rng(0)
    table = table.rename(columns={"target": "progression"})[
        ["sex", "bmi", "bp", "s5", "progression"]
    ]
    table[NAME] = table.pop("sex").map({1: "<i>f</i>", 2: "m"})
    table["patient"] = [f"patient {i}" for i in range(len(table))]
    table["clinic"] = "Boston"
    table.loc[rng.random(len(table)) < 0.1, "bmi"] = np.nan
    table.loc[3, "progression"] = np.nan
    return table


@pytest.fixture
def csv(diabetes, tmp_path):
    path = tmp_path / "a <table> & more.csv"
    diabetes.to_csv(path, index=False)
    return path


@pytest.fixture(scope="session")
def gpclml():
    """Runs a command; options as they are typed. Gives exit code, stdout and stderr."""

    def run(*words):
        return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)

    return run


@pytest.fixture
def no_fit(monkeypatch):
    """Whatever is refused is refused before any fit."""

    def fit(*args, **kwargs):
        raise AssertionError("a model was fitted")

    monkeypatch.setattr(fitting, "fit_recipe", fit)
    monkeypatch.setattr(comparing, "fit_recipe", fit)


@pytest.fixture
def plain_pictures(monkeypatch):
    """Pages are written with one small picture for all, where none is looked at."""
    monkeypatch.setattr(comparing, "drawn", lambda draw, panels, height: "data:image/png;base64,")


@pytest.fixture(scope="session")
def report(diabetes, gpclml, tmp_path_factory):
    """The folder of a report of two models, and what the command printed."""
    folder = tmp_path_factory.mktemp("report")
    data = folder / "a <table> & more.csv"
    diabetes.to_csv(data, index=False)
    out = folder / "out"
    options = "--models", "linear,rbf", "--seed", 1, "--steps", 30, "--out", out
    result = gpclml("compare", data, "--target", "progression", *options)
    assert result.exit_code == 0, result.output
    return out, result
