"""The commands for a target of classes or counts: told from values, compared, fitted, predicted."""

import json
import re

import numpy as np
import pandas
import pytest
import torch
from scipy.stats import nbinom
from sklearn import metrics

from gpclml import Classifier, Regressor
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.tables.data import TableOptions, read_table_data, split_rows
from gpclml.tables.fitting import load_model
from gpclml.tables.methods import YARDSTICKS, ClassScores, fitted_size


def classes(labels=("no", "<b>yes</b>"), n=90):
    draws = np.random.default_rng(0)
    x = draws.uniform(0, 3, (n, 2))
    score = x[:, 0] - 1.5 + 0.3 * draws.standard_normal(n)
    numbers = np.digitize(score, [0] if len(labels) == 2 else [-0.5, 0.5])
    town = draws.choice(["a", "b"], n)
    columns = {"size": x[:, 0], "age": x[:, 1], "town": town, "kind": np.array(labels)[numbers]}
    return pandas.DataFrame(columns)


def counts(n=90):
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
        target = frame.columns[-1]
        return read_table_data(TableOptions(csv(frame), target, 4000, **options), tests=True)

    return read


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["no", "yes"], ("no", "yes")), ([False, True], ("False", "True")), ([1, 0], ("0", "1")),
        ([2, 10], ("2", "10")), ([-1.5, 2.0], ("-1.5", "2")), (["b", "c", "a"], ("a", "b", "c")),
        ([3, 4, 5], ()),
    ],
)  # fmt: skip
def test_the_task_is_told_from_the_values(read, labels, told):
    frame = classes(labels)
    data = read(frame)
    assert data.classes == told
    if told:
        rows = torch.cat([data.train[1], data.test[1]]).long().bincount()
        numbers = frame["kind"].astype(str).str.removesuffix(".0").value_counts()
        assert [numbers[label] for label in told] == rows.tolist()
    said = [note for note in data.notes if "so this is a classification" in note]
    assert len(said) == bool(told)
    is_number = not isinstance(labels[0], str | bool)
    assert any("--task regression" in note for note in said) == (is_number and bool(told))


def test_the_task_that_is_asked_for(read):
    assert read(classes([0, 1]), task="regression").classes == ()
    assert read(classes([3, 4, 5]), task="classification").classes == ("3", "4", "5")
    with pytest.raises(UnknownNameError, match="--task: got 'classes'"):
        read(classes(), task="classes")
    with pytest.raises(ArgumentError, match="target 'kind': got 90 different values, expected 2"):
        read(classes().assign(kind=np.arange(90.0)), task="classification")
    with pytest.raises(ArgumentError, match="target 'kind': got 1 different value, expected 2"):
        read(classes().assign(kind="a"))
    with pytest.raises(ArgumentError, match=r"target 'kind': got texts.*--task classification"):
        read(classes(), task="regression")


def test_classes_need_training_rows(read):
    _, test = split_rows(torch.zeros(90))
    frame = classes()
    frame.loc[int(test[0]), "kind"] = "rare"
    with pytest.raises(ArgumentError, match="no training row of 'rare'"):
        read(frame)


def test_counts_are_asked_for(read):
    frame = counts()
    plain, asked = read(frame), read(frame, task="counts")
    assert plain.task == "regression"
    assert asked.task == "counts"
    assert any("--task counts predicts" in note for note in plain.notes)
    assert any("'visits' has counts, as asked" in note for note in asked.notes)
    for other in (read(frame, task="regression"), read(frame.assign(visits=frame["size"]))):
        assert not any("--task counts" in note for note in other.notes)


@pytest.mark.parametrize(("value", "got"), [(-1, "-1"), (2.5, r"2\.5")])
def test_targets_that_are_no_counts(read, value, got):
    frame = counts().astype({"visits": float})
    frame.loc[3, "visits"] = value
    message = f"target 'visits': got {got} among them, expected whol"
    with pytest.raises(ArgumentError, match=message):
        read(frame, task="counts")
    frame.loc[3, "visits"] = np.nan  # a row without a count is left out
    assert any("1 row without visits" in note for note in read(frame, task="counts").notes)


def test_scores_of_classes():
    p = torch.tensor([[0.9, 0.3, 0.6, 0.05], [0.1, 0.7, 0.4, 0.95]], dtype=torch.float64)
    scores, y = ClassScores(p, torch.tensor([0, 1, 1, 1])), [0, 1, 1, 1]
    values = {name: value for name, (value, _) in scores.values.items()}
    assert values["log loss"] == pytest.approx(metrics.log_loss(y, p[1]))
    assert values["Brier score"] == pytest.approx(metrics.brier_score_loss(y, p[1]))
    assert values["accuracy"] == 0.75
    assert scores.curve["share"].tolist() == [0, 1, 1, 1]
    assert scores.calibration_error == pytest.approx((0.1 + 0.6 + 0.3 + 0.05) / 4)
    three = ClassScores(torch.eye(3).double()[:, [0, 1, 1]], torch.tensor([0, 1, 2]))
    assert three.curve["rows"].tolist() == [6, 3]
    assert three.values["Brier score"][0] == pytest.approx(1 / 3)


def test_the_size_of_negative_binomials():
    draws = nbinom(2.0, 2 / 8).rvs(4000, random_state=0)
    assert fitted_size(draws, np.full(4000, 6.0)) == pytest.approx(2.0, rel=0.1)


@pytest.fixture
def compare(gpclml, csv, tmp_path):
    """Compares twice, with one result; gives what is said, the record, the page and the model."""

    def run(frame, model, *words):
        out = tmp_path / "out"
        arguments = "compare", csv(frame), "--target", frame.columns[-1], *words, "--out", out
        results = [gpclml(*arguments) for _ in range(2)]
        assert [result.exit_code for result in results] == [0, 0], results[0].output
        assert results[0].stdout == results[1].stdout
        record = json.loads((out / "report.json").read_text())
        assert list(record["scores"]) == [model, *YARDSTICKS[record["task"]]]
        page = (out / "index.html").read_text()
        [again] = re.findall("<pre><code>(gpclml fit .*)", page)
        assert f"--model {model}" in again
        assert str(tmp_path) in record["command"]
        return results[0], record, page, load_model(out / "models" / model)

    return run


@pytest.mark.slow
def test_compare_classes(compare):
    result, record, page, saved = compare(classes(), "classifier")
    assert "'kind' has 2 classes, so this is a classification" in result.stderr
    assert "To predict kind, use " in result.stdout
    assert record["scores"]["classifier"]["log loss"][0] < record["scores"]["shares"]["log loss"][0]
    assert record["classes"] == ["<b>yes</b>", "no"]
    assert "&lt;b&gt;yes" in page
    assert "<b>yes" not in page
    for words in ("log loss", "Brier score", "accuracy", "calibration error", "data:image/png"):
        assert words in page
    assert saved.classes == ("<b>yes</b>", "no")


@pytest.mark.slow
def test_compare_counts(compare, read):
    result, record, page, saved = compare(counts(), "count-gps", "--task", "counts")
    assert "'visits' has counts, as asked" in result.stderr
    assert "To predict visits, use count-gps." in result.stdout
    scores = record["scores"]
    assert scores["count-gps"]["log loss"][0] < scores["distribution"]["log loss"][0]
    assert "--task counts" in record["command"]
    data = read(counts(), task="counts")
    (_, y), (test_x, test_y) = data.train, data.test
    size = fitted_size(y.numpy(), np.full(len(y), float(y.mean())))
    law = nbinom(size, size / (size + float(y.mean())))
    expected = -law.logpmf(test_y).mean()
    assert scores["distribution"]["log loss"][0] == pytest.approx(expected, rel=1e-4)
    inside = ((test_y >= law.ppf(0.05)) & (test_y <= law.ppf(0.95))).double().mean()
    assert scores["distribution"]["rows inside"][0] == pytest.approx(float(inside))
    expected = -saved.predict(test_x).log_prob(test_y).mean()
    assert scores["count-gps"]["log loss"][0] == pytest.approx(float(expected))
    for words in ("log loss", "typical error", "rows inside"):
        assert words in page
    assert "Brier" not in page
    assert "data:image" not in page


@pytest.fixture
def fit_and_predict(gpclml, csv, tmp_path):
    """What ``predict`` writes of these rows by a model that ``fit`` made."""

    def run(frame, new, model, *words):
        out, target = tmp_path / "model", frame.columns[-1]
        result = gpclml("fit", csv(frame), "--target", target, *words, "--out", out)
        assert result.exit_code == 0, result.output
        assert f"{model} fitted to 90 rows" in result.stdout
        new.to_csv(tmp_path / "new.csv", index=False)
        for _ in range(2):  # predictions may be replaced
            result = gpclml("predict", out, tmp_path / "new.csv", "--out", tmp_path / "p.csv")
            assert result.exit_code == 0, result.output
        assert f"{len(new)} rows predicted" in result.stderr
        return pandas.read_csv(tmp_path / "p.csv")

    return run


@pytest.mark.slow
@pytest.mark.parametrize("labels", [("no", "yes"), ("low", "middle", "high, very")])
def test_fit_and_predict_classes(fit_and_predict, labels):
    frame = classes(labels)
    new = frame.drop(columns="kind").head(20).assign(age=[np.nan, *frame["age"][1:20]])
    new.loc[1, "town"] = "elsewhere"
    written = fit_and_predict(frame, new, "classifier")
    assert list(written) == ["class", *(f"probability of {label}" for label in sorted(labels))]
    with pytest.warns(UserWarning, match="missing"):
        expected = Classifier().fit(frame.drop(columns="kind"), frame["kind"]).predict_proba(new)
    np.testing.assert_allclose(written.iloc[2:, 1:], expected[2:], atol=1e-6)
    assert (written["class"] == frame["kind"][:20]).mean() > 0.7
    np.testing.assert_allclose(written.iloc[:, 1:].sum(axis=1), 1.0)


@pytest.mark.slow
def test_fit_and_predict_counts(fit_and_predict):
    frame = counts()
    inputs = frame.drop(columns="visits")
    written = fit_and_predict(frame, inputs.head(20), "count-gps", "--task", "counts")
    regressor = Regressor(counts=True).fit(inputs, frame["visits"])
    mean, std, limits = regressor.predict(inputs[:20], return_std=True, quantiles=(0.05, 0.95))
    np.testing.assert_allclose(written["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(written["standard_deviation"], std, rtol=1e-6)
    np.testing.assert_array_equal(written[["lower_90", "upper_90"]], limits)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare kind --models rbf", "models: got rbf, expected none for classes"),
        ("fit kind --model rbf", "model: got rbf, expected classifier"),
        ("fit kind --model classifier --steps 3", "classifier with options of the fit"),
        ("compare kind --restarts 2", "classifier with options of the fit"),
        ("fit age --model classifier", "model: got classifier, expected a model of a regression"),
        ("compare visits --task counts --models rbf", "models: got rbf, expected none for counts"),
        ("fit visits --task counts --model rbf", "got rbf, expected count-gps, for counts"),
        ("fit visits --task counts --model classifier", "got classifier, expected count-gps"),
        ("compare visits --task counts --restarts 2", "count-gps with options of the fit"),
        ("fit visits --task regression --model count-gps", "expected a model of a regress"),
    ],
)
def test_options_that_are_refused(gpclml, csv, tmp_path, no_fit, words, message):
    command, target, *options = words.split()
    out = tmp_path / "out"
    frame = classes().assign(visits=counts()["visits"])
    result = gpclml(command, csv(frame), "--target", target, *options, "--out", out)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert not out.exists()
