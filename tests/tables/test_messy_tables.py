"""Tables as people have them, in whose plain fits nothing may go wrong in silence."""

from __future__ import annotations

import json

import numpy as np
import pandas
import pytest
import torch

from gpclml import GPRegression, fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood


@pytest.fixture
def compared(gpclml, tmp_path):
    """Compares the Matern GP with the yardsticks; its error on test rows, and what was said."""

    def compare(table):
        table.to_csv(tmp_path / "table.csv", index=False)
        words = "--target", "target", "--models", "matern", "--out", tmp_path / "report"
        result = gpclml("compare", tmp_path / "table.csv", *words)
        assert result.exit_code == 0, result.output
        record = json.loads((tmp_path / "report" / "report.json").read_text())
        return record["models"]["matern"]["test_rmse"], " ".join(record["notes"])

    return compare


@pytest.mark.data
def test_prices_written_with_commas_and_a_column_of_words(compared, data_folder):
    values = np.loadtxt(data_folder / "uci" / "boston.txt")
    table = pandas.DataFrame(values[:, :-1], columns=[f"x{i}" for i in range(13)])
    table["target"] = [f"${1000 * price:,.0f}" for price in values[:, -1]]
    table["x9"] = [f"{1000 * tax:,.0f}" for tax in table["x9"]]
    table["x3"] = np.where(table["x3"] > 0, "yes", "no")
    error, said = compared(table)
    assert "Read as numbers, without marks of thousands, money or percent: 'x9', 'target'" in said
    assert error <= 2700


@pytest.mark.data
def test_directions_written_as_words(compared, data_folder):
    values = np.loadtxt(data_folder / "uci" / "energy.txt")
    table = pandas.DataFrame(values[:, :-1], columns=[f"x{i}" for i in range(8)])
    table["x5"] = table["x5"].map({2: "north", 3: "east", 4: "south", 5: "west"})
    table["x7"] = table["x7"].map(
        dict(enumerate(["none", "uniform", "north", "east", "south", "west"]))
    )
    table["target"] = values[:, -1]
    error, _ = compared(table)
    assert error <= 0.40


@pytest.mark.data
def test_copies_of_rows_are_told(compared, data_folder):
    table = pandas.read_csv(data_folder / "uci" / "wine-white.csv")[:1200]
    table = table.rename(columns={"quality": "target"})
    _, said = compared(table)
    assert "Left out: 186 rows that repeat another in all inputs and target." in said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_fit_of_sixty_columns_ends_in_the_mean(seed):
    from sklearn.datasets import load_digits

    digits = load_digits()
    columns = digits.data.std(0).argsort()[-60:]
    rows = np.random.default_rng(seed).permutation(len(digits.data))[:300]
    x = torch.from_numpy(digits.data[rows][:, columns])
    y = torch.from_numpy(digits.target[rows]).double()
    model = GPRegression(x[:200], y[:200], "rbf", ard=False)
    result = fit_mll(ConditionalMarginalLogLikelihood(model.likelihood, model), progress=False)
    assert result.problem == ""
    error = model.predict(x[200:]).mean - y[200:]
    assert float(error.square().mean()) < 0.6 * float(y.var())
