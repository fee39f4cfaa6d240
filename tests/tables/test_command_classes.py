"""The commands for a target of classes: told from its values, compared, fitted, predicted."""

import json
import re

import numpy as np
import pandas
import pytest
import torch
from sklearn import metrics

from gpclml import Classifier
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.tables.comparing_classes import ClassScores
from gpclml.tables.data import TableOptions, read_table_data, split_rows
from gpclml.tables.fitting import load_model

OTHERS = ["logistic", "forest", "boosting", "shares"]


def table(labels=("no", "<b>yes</b>"), n=90):
    draws = np.random.default_rng(0)
    x = draws.uniform(0, 3, (n, 2))
    score = x[:, 0] - 1.5 + 0.3 * draws.standard_normal(n)
    numbers = np.digitize(score, [0] if len(labels) == 2 else [-0.5, 0.5])
    town = draws.choice(["a", "b"], n)
    columns = {"size": x[:, 0], "age": x[:, 1], "town": town, "kind": np.array(labels)[numbers]}
    return pandas.DataFrame(columns)


@pytest.fixture
def csv(tmp_path):
    def write(frame):
        frame.to_csv(tmp_path / "table.csv", index=False)
        return tmp_path / "table.csv"

    return write


@pytest.fixture
def read(csv):
    def read(frame, **options):
        return read_table_data(TableOptions(csv(frame), "kind", 4000, **options), tests=True)

    return read


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["no", "yes"], ("no", "yes")), ([False, True], ("False", "True")), ([1, 0], ("0", "1")),
        ([2, 10], ("2", "10")), ([-1.5, 2.0], ("-1.5", "2")), (["b", "c", "a"], ("a", "b", "c")),
        ([3, 4, 5], ()),
    ],
)  # fmt: skip
def test_the_task_is_told_from_the_values(read, labels, classes):
    frame = table(labels)
    data = read(frame)
    assert data.classes == classes
    if classes:
        rows = torch.cat([data.train[1], data.test[1]]).long().bincount()
        counts = frame["kind"].astype(str).str.removesuffix(".0").value_counts()
        assert [counts[label] for label in classes] == rows.tolist()
    told = [note for note in data.notes if "so this is a classification" in note]
    assert len(told) == bool(classes)
    is_number = not isinstance(labels[0], str | bool)
    assert any("--task regression" in note for note in told) == (is_number and bool(classes))


def test_the_task_that_is_asked_for(read):
    assert read(table([0, 1]), task="regression").classes == ()
    assert read(table([3, 4, 5]), task="classification").classes == ("3", "4", "5")
    with pytest.raises(UnknownNameError, match="--task: got 'classes'"):
        read(table(), task="classes")
    with pytest.raises(ArgumentError, match="target 'kind': got 90 different values, expected 2"):
        read(table().assign(kind=np.arange(90.0)), task="classification")
    with pytest.raises(ArgumentError, match="target 'kind': got 1 different value, expected 2"):
        read(table().assign(kind="a"))
    with pytest.raises(ArgumentError, match=r"target 'kind': got texts.*--task classification"):
        read(table(), task="regression")


def test_classes_need_training_rows(read):
    _, test = split_rows(torch.zeros(90))
    frame = table()
    frame.loc[int(test[0]), "kind"] = "rare"
    with pytest.raises(ArgumentError, match="no training row of 'rare'"):
        read(frame)


def test_scores():
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


@pytest.mark.slow
def test_compare(gpclml, csv, tmp_path):
    arguments = "compare", csv(table()), "--target", "kind", "--out", tmp_path / "out"
    result = gpclml(*arguments)
    assert result.exit_code == 0, result.output
    assert "'kind' has 2 classes, so this is a classification" in result.stderr
    assert "To predict kind, use " in result.stdout
    record = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(record["scores"]) == ["classifier", *OTHERS]
    assert record["scores"]["classifier"]["log loss"][0] < record["scores"]["shares"]["log loss"][0]
    assert record["classes"] == ["<b>yes</b>", "no"]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "&lt;b&gt;yes" in page
    assert "<b>yes" not in page
    for words in ("log loss", "Brier score", "accuracy", "calibration error", "data:image/png"):
        assert words in page
    [again] = re.findall("<pre><code>(gpclml fit .*)", page)
    assert "--model classifier" in again
    assert str(tmp_path) in record["command"]
    saved = load_model(tmp_path / "out" / "models" / "classifier")
    assert saved.classes == ("<b>yes</b>", "no")
    repeated = gpclml(*arguments)
    assert repeated.exit_code == 0, repeated.output
    assert repeated.stdout == result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("labels", [("no", "yes"), ("low", "middle", "high, very")])
def test_fit_and_predict(gpclml, csv, tmp_path, labels):
    frame, out = table(labels), tmp_path / "model"
    result = gpclml("fit", csv(frame), "--target", "kind", "--out", out)
    assert result.exit_code == 0, result.output
    assert "classifier fitted to 90 rows" in result.stdout
    new = frame.drop(columns="kind").head(20).assign(age=[np.nan, *frame["age"][1:20]])
    new.loc[1, "town"] = "elsewhere"
    new.to_csv(tmp_path / "new.csv", index=False)
    for _ in range(2):  # predictions may be replaced
        result = gpclml("predict", out, tmp_path / "new.csv", "--out", tmp_path / "p.csv")
        assert result.exit_code == 0, result.output
    assert "20 rows predicted" in result.stderr
    found = pandas.read_csv(tmp_path / "p.csv")
    assert list(found) == ["class", *(f"probability of {label}" for label in sorted(labels))]
    with pytest.warns(UserWarning, match="missing"):
        expected = Classifier().fit(frame.drop(columns="kind"), frame["kind"]).predict_proba(new)
    np.testing.assert_allclose(found.iloc[2:, 1:], expected[2:], atol=1e-6)
    assert (found["class"] == frame["kind"][:20]).mean() > 0.7
    np.testing.assert_allclose(found.iloc[:, 1:].sum(axis=1), 1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "--models", "rbf"), "models: got rbf, expected none for classes"),
        (("fit", "--model", "rbf"), "model: got rbf, expected classifier"),
        (("fit", "--model", "classifier", "--steps", 3), "classifier with options of the fit"),
        (("compare", "--restarts", 2), "classifier with options of the fit"),
        (("fit", "--task", "regression", "--target", "age", "--model", "classifier"),
         "model: got classifier, expected a model of a regression"),
    ],
)  # fmt: skip
def test_options_that_are_refused(gpclml, csv, tmp_path, no_fit, words, message):
    target = () if "--target" in words else ("--target", "kind")
    command, *options = words
    result = gpclml(command, csv(table()), *target, *options, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()
