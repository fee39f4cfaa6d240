"""The commands for a target of counts: asked for, compared, fitted, predicted."""

import json

import numpy as np
import pandas
import pytest
from scipy.stats import nbinom

from gpclml import Regressor
from gpclml.errors import ArgumentError
from gpclml.tables.comparing_classes import fitted_size
from gpclml.tables.data import TableOptions, read_table_data
from gpclml.tables.fitting import load_model

OTHERS = ["poisson", "boosting-poisson", "distribution"]


def table(n=90):
    draws = np.random.default_rng(0)
    x = draws.uniform(0, 3, (n, 2))
    town = draws.choice(["a", "b"], n)
    visits = draws.poisson(np.exp(x[:, 0] - 0.5 + (town == "b")))
    return pandas.DataFrame({"size": x[:, 0], "age": x[:, 1], "town": town, "visits": visits})


@pytest.fixture
def csv(tmp_path):
    def write(frame):
        frame.to_csv(tmp_path / "table.csv", index=False)
        return tmp_path / "table.csv"

    return write


@pytest.fixture
def read(csv):
    def read(frame, **options):
        return read_table_data(TableOptions(csv(frame), "visits", 4000, **options), tests=True)

    return read


def test_counts_are_asked_for(read):
    frame = table()
    plain, asked = read(frame), read(frame, task="counts")
    assert plain.task == "regression"
    assert asked.task == "counts"
    assert any("--task counts predicts" in note for note in plain.notes)
    assert any("'visits' has counts, as asked" in note for note in asked.notes)
    for other in (read(frame, task="regression"), read(frame.assign(visits=frame["size"]))):
        assert not any("--task counts" in note for note in other.notes)


@pytest.mark.parametrize(("value", "got"), [(-1, "-1"), (2.5, r"2\.5")])
def test_targets_that_are_no_counts(read, value, got):
    frame = table().astype({"visits": float})
    frame.loc[3, "visits"] = value
    with pytest.raises(
        ArgumentError, match=f"target 'visits': got {got} among them, expected whol"
    ):
        read(frame, task="counts")
    frame.loc[3, "visits"] = np.nan  # a row without a count is left out
    assert any("1 row without visits" in note for note in read(frame, task="counts").notes)


def test_the_size_of_negative_binomials():
    means = np.full(4000, 6.0)
    draws = nbinom(2.0, 2 / 8).rvs(4000, random_state=0)
    assert fitted_size(draws, means) == pytest.approx(2.0, rel=0.1)


@pytest.mark.slow
def test_compare(gpclml, csv, tmp_path):
    frame = table()
    arguments = "compare", csv(frame), "--target", "visits", "--task", "counts"
    result = gpclml(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "'visits' has counts, as asked" in result.stderr
    assert "To predict visits, use count-gps." in result.stdout
    record = json.loads((tmp_path / "out" / "report.json").read_text())
    scores = record["scores"]
    assert list(scores) == ["count-gps", *OTHERS]
    assert scores["count-gps"]["log loss"][0] < scores["distribution"]["log loss"][0]
    assert record["task"] == "counts"
    assert "--task counts" in record["command"]
    data = read_table_data(TableOptions(csv(frame), "visits", 4000, task="counts"), tests=True)
    (_, y), (test_x, test_y) = data.train, data.test
    size = fitted_size(y.numpy(), np.full(len(y), float(y.mean())))
    law = nbinom(size, size / (size + float(y.mean())))
    expected = -law.logpmf(test_y).mean()
    assert scores["distribution"]["log loss"][0] == pytest.approx(expected, rel=1e-4)
    inside = ((test_y >= law.ppf(0.05)) & (test_y <= law.ppf(0.95))).double().mean()
    assert scores["distribution"]["rows inside"][0] == pytest.approx(float(inside))
    saved = load_model(tmp_path / "out" / "models" / "count-gps")
    expected = -saved.predict(test_x).log_prob(test_y).mean()
    assert scores["count-gps"]["log loss"][0] == pytest.approx(float(expected))
    page = (tmp_path / "out" / "index.html").read_text()
    for words in ("log loss", "typical error", "rows inside", "--model count-gps"):
        assert words in page
    assert "Brier" not in page
    assert "data:image" not in page
    again = gpclml(*arguments, "--out", tmp_path / "out")
    assert again.exit_code == 0, again.output
    assert again.stdout == result.stdout


@pytest.mark.slow
def test_fit_and_predict(gpclml, csv, tmp_path):
    frame, out = table(), tmp_path / "model"
    result = gpclml("fit", csv(frame), "--target", "visits", "--task", "counts", "--out", out)
    assert result.exit_code == 0, result.output
    assert "count-gps fitted to 90 rows" in result.stdout
    new = frame.drop(columns="visits").head(20)
    new.to_csv(tmp_path / "new.csv", index=False)
    result = gpclml("predict", out, tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    written = pandas.read_csv(tmp_path / "p.csv")
    regressor = Regressor(counts=True).fit(frame.drop(columns="visits"), frame["visits"])
    mean, std, limits = regressor.predict(new, return_std=True, quantiles=(0.05, 0.95))
    np.testing.assert_allclose(written["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(written["standard_deviation"], std, rtol=1e-6)
    np.testing.assert_array_equal(written[["lower_90", "upper_90"]], limits)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "--models", "rbf"), "models: got rbf, expected none for counts"),
        (("fit", "--model", "rbf"), "model: got rbf, expected count-gps, for counts"),
        (("fit", "--model", "classifier"), "model: got classifier, expected count-gps"),
        (("compare", "--restarts", 2), "count-gps with options of the fit"),
        (("fit", "--task", "regression", "--model", "count-gps"), "expected a model of a regress"),
    ],
)
def test_options_that_are_refused(gpclml, csv, tmp_path, no_fit, words, message):
    task = () if "--task" in words else ("--task", "counts")
    command, *options = words
    target = "--target", "visits", *task
    result = gpclml(command, csv(table()), *target, *options, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()
