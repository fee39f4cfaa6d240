"""The commands fit and predict, and which models and rows fit in memory and time."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pandas
import pytest
import torch

from gpclml import Regressor
from gpclml.errors import ArgumentError
from gpclml.tables.data import read_table_data
from gpclml.tables.fitting import check_size, default_models, threads_for
from gpclml.tables.predictions import predicted
from gpclml.tables.recipes import MODELS, Recipe, TableOptions


@pytest.fixture
def fitted(csv, gpclml, tmp_path):
    def fit(model, *words):
        out = tmp_path / "model"
        options = "--target", "progression", "--model", model, "--out", out, "--steps", 5
        result = gpclml("fit", csv, *options, *words)
        assert result.exit_code == 0, result.output
        return out, result

    return fit


@pytest.mark.parametrize("name", ["linear", "rbf", "sm", "deep"])
def test_predictions_are_those_in_memory(csv, gpclml, tmp_path, fitted, name):
    drop = ["--drop", "bmi", "--drop", "bp"] if name == "deep" else []
    folder, result = fitted(name, "--quiet", *drop)
    assert f"{name} fitted to 129 rows in" in result.stdout
    options = TableOptions(csv, "progression", 4000, drop=tuple(drop[1::2]))
    data = read_table_data(options, tests=False)
    model, *_ = Recipe(name, steps=5).fit(*data.train, progress=False)

    out = tmp_path / "predictions.csv"
    result = gpclml("predict", folder, csv, "--out", out)
    assert result.exit_code == 0
    written = pandas.read_csv(out)
    assert list(written.columns) == ["mean", "standard_deviation", "lower_90", "upper_90"]
    table = pandas.read_csv(csv)
    assert len(written) == len(table) == 130
    x = torch.from_numpy(data.encoding.encode(table))
    found = predicted(model, x, categories=data.encoding.categories)
    mean, deviation = found.mean, found.std
    np.testing.assert_allclose(written["mean"], mean, rtol=1e-9)
    np.testing.assert_allclose(written["standard_deviation"], deviation, rtol=1e-9)
    half = 1.6448536269514722 * deviation
    np.testing.assert_allclose(written["lower_90"], mean - half, rtol=1e-9)
    np.testing.assert_allclose(written["upper_90"], mean + half, rtol=1e-9)
    assert "130 rows predicted" in result.stderr
    assert "The table has progression in 129 of these rows: typical error (RMSE) " in result.stderr


def test_a_stack_is_fitted_unless_a_model_is_named(csv, gpclml, tmp_path):
    folder, out = tmp_path / "model", tmp_path / "predictions.csv"
    result = gpclml("fit", csv, "--target", "progression", "--quiet", "--seed", 3, "--out", folder)
    assert result.exit_code == 0, result.output
    assert "stack fitted to 129 rows in" in result.stdout
    assert "seconds: weights 0." in result.stdout
    table = pandas.read_csv(csv)
    known = table["progression"].notna().to_numpy()
    inputs = table.drop(columns=["progression", "patient", "clinic"])  # which say nothing
    regressor = Regressor(random_state=3).fit(inputs[known], table["progression"][known])
    result = gpclml("predict", folder, csv, "--out", out)
    assert result.exit_code == 0, result.output
    written = pandas.read_csv(out)
    expected = regressor.predict_distribution(inputs)
    lower, upper = expected.interval(0.9)
    columns = {
        "mean": expected.mean, "standard_deviation": expected.std,
        "lower_90": lower, "upper_90": upper,
    }  # fmt: skip
    for name, values in columns.items():
        np.testing.assert_allclose(written[name], values, rtol=1e-6)
    targets = table["progression"].to_numpy()
    filled = torch.tensor(np.where(known, targets, 0.0))
    nll = -float(expected.log_density(filled)[torch.tensor(known)].mean())
    assert f"(NLL) {nll:.3f} a row" in result.stderr


def test_a_stack_has_no_other_objective_and_is_compared_with_itself_alone(csv, gpclml, tmp_path):
    words = csv, "--target", "progression", "--out", tmp_path / "model"
    for wrong in (("--steps", 5), ("--objective", "loo")):
        result = gpclml("fit", *words, *wrong)
        assert result.exit_code == 2
        assert "name another --model, such as matern" in " ".join(result.stderr.split())
    result = gpclml("compare", *words, "--models", "linear,stack")
    assert result.exit_code == 2
    assert "models: got 'stack'" in result.stderr
    assert not (tmp_path / "model").exists()


def test_a_time_budget_too_small_leaves_the_fastest_model(csv, gpclml, tmp_path):
    options = "--target", "progression", "--time-budget", 0, "--out", tmp_path / "model"
    result = gpclml("fit", csv, *options)
    assert result.exit_code == 0, result.output
    assert "weights 1.00 linear" in result.stdout
    assert "Left out of the stack: matern (the time budget of 0 seconds was spent)" in result.stderr
    single = gpclml("fit", csv, *options[:-1], tmp_path / "other", "--model", "rbf")
    assert single.exit_code == 2
    assert "time_budget: got 0.0, expected none for a single GP" in single.stderr
    assert not (tmp_path / "other").exists()


def test_new_tables_need_no_target_and_may_have_new_levels(csv, gpclml, tmp_path, fitted, diabetes):
    folder, _ = fitted("linear")
    odd = next(name for name in diabetes.columns if name.startswith("<b>"))
    table = diabetes.head(4).drop(columns=["progression", "clinic"])
    table.loc[1, odd] = "x"
    table.loc[2, "bp"] = None
    table.to_csv(tmp_path / "new.csv", index=False)
    result = gpclml("predict", folder, tmp_path / "new.csv", "--out", tmp_path / "out.csv")
    assert result.exit_code == 0
    written = pandas.read_csv(tmp_path / "out.csv")
    assert not written.isna().any(axis=None)
    said = "2 of 4 rows have values missing, or levels, where hardly any training row has that, in "
    assert f"{said}'bp', {odd!r}. Predictions are averages" in result.stderr
    assert "4 rows predicted" in result.stderr
    complete = diabetes.head(4).drop(columns=["progression", "clinic"])
    complete.to_csv(tmp_path / "new.csv", index=False)
    gpclml("predict", folder, tmp_path / "new.csv", "--out", tmp_path / "out.csv")
    spread, known = (
        frame["standard_deviation"] for frame in (written, pandas.read_csv(tmp_path / "out.csv"))
    )
    assert (spread > 1.001 * known).tolist() == [False, True, True, False]
    assert "RMSE" not in result.stderr


def test_a_model_of_fewer_rows_is_said(fitted):
    folder, result = fitted("linear", "--rows", 40)
    assert "40 random rows of 129 are fitted, the limit of --rows." in result.stderr
    assert "linear fitted to 40 rows in" in result.stdout
    record = json.loads((folder / "model.json").read_text())
    assert record["recipe"]["steps"] == 5
    assert torch.__version__.startswith(record["packages"]["torch"].partition("+")[0])


def test_what_cannot_be_predicted(csv, gpclml, tmp_path, fitted, report):
    folder, _ = fitted("linear")
    out = tmp_path / "out.csv"
    (tmp_path / "short.csv").write_text("bmi\n1\n2\n")
    (tmp_path / "rowless.csv").write_text(csv.read_text().partition("\n")[0] + "\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "texts.csv").write_text(csv.read_text().replace("\n", "\nunknown", 1))
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "model.json").write_bytes((folder / "model.json").read_bytes())
    unlike = tmp_path / "unlike"
    shutil.copytree(folder, unlike)
    (unlike / "model.json").write_text('{"format": "gpclml.TableModel", "version": 1}')
    for words, message in (
        ((tmp_path / "absent", csv), "There is no folder"),
        ((csv, csv), "is a file. Give a folder that 'gpclml fit' wrote."),
        ((tmp_path / "empty", csv), "holds no model. Give one that 'gpclml fit' wrote."),
        ((report[0], csv), "It is a report: give one of its models"),
        ((damaged, csv), "there is no file"),
        ((unlike, csv), "model.json was written by another release. Move the folder"),
        ((folder, tmp_path / "absent.csv"), "There is no file"),
        ((folder, tmp_path / "short.csv"), "no column 'bp', 's5', "),
        ((folder, tmp_path / "rowless.csv"), "rowless.csv has column names and no rows"),
        ((folder, tmp_path / "texts.csv"), "column 'bmi': got 1 of 130 values such as 'unknown"),
        ((folder, csv, "--out", csv), "is a file that is read"),
        ((folder, csv, "--out", folder / "model.pt"), "is a file that is read"),
        ((folder, csv, "--out", tmp_path), "is a folder"),
        ((folder, csv, "--out", tmp_path / "pipe"), "pipe is not a regular file"),
        ((folder, csv, "--out", csv / "out.csv"), f"there is no folder {csv}"),
        ((folder, csv, "--out", tmp_path / "absent" / "out.csv"), "there is no folder"),
        ((folder, csv, "--out", "/proc/out.csv"), "cannot write /proc/out.csv"),
    ):
        before = sorted(tmp_path.rglob("*"))
        default = () if "--out" in words else ("--out", out)
        result = gpclml("predict", *words, *default)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("Error: ")
        assert message in result.stderr
        assert sorted(tmp_path.rglob("*")) == before


def test_files_that_are_no_table_are_not_predicted(gpclml, tmp_path, fitted, no_tables):
    folder, _ = fitted("linear")
    data = tmp_path / "data.csv"
    for content, message in no_tables.values():
        data.mkdir() if content is None else data.write_bytes(content)
        before = sorted(tmp_path.rglob("*"))
        result = gpclml("predict", folder, data, "--out", tmp_path / "out.csv")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("Error: ")
        assert message in result.stderr
        assert sorted(tmp_path.rglob("*")) == before
        data.rmdir() if content is None else data.unlink()


def test_parquet_is_predicted_as_csv_is(csv, gpclml, tmp_path, fitted):
    folder, _ = fitted("linear")
    pandas.read_csv(csv).to_parquet(tmp_path / "data.parquet")
    written = []
    for data in (csv, tmp_path / "data.parquet"):
        assert gpclml("predict", folder, data, "--out", tmp_path / "out.csv").exit_code == 0
        written.append((tmp_path / "out.csv").read_text())
    assert written[0] == written[1]


def test_predictions_are_replaced_and_links_refused(csv, gpclml, tmp_path, fitted):
    folder, _ = fitted("linear")
    out = tmp_path / "out.csv"
    out.write_text("mean,standard_deviation,lower_90,upper_90\n")
    (tmp_path / "link.csv").symlink_to(out)
    link = tmp_path / "link.csv"
    refused = gpclml("predict", folder, csv, "--out", link)
    assert refused.exit_code == 2
    assert "is a link" in refused.stderr
    assert gpclml("predict", folder, csv, "--out", out, "--quiet").stderr == ""
    assert len(pandas.read_csv(out)) == 130
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("n", "d", "left_out"),
    [
        (40, 5, ()),
        (400, 8, ()),
        (600, 8, ("sm",)),
        (2000, 8, ("sm",)),
        (2001, 8, ("rq and matern", "sm")),
        (4000, 1, ("rq and matern", "sm")),
    ],
)
def test_models_by_size(n, d, left_out):
    names, notes = default_models(n, d)
    absent = [name for name in MODELS if name not in names]
    assert " ".join(absent) == " ".join(left_out).replace(" and", "")
    assert [note.partition(" is left")[0].partition(" are left")[0] for note in notes] == list(
        left_out
    )
    if "sm" in names:
        check_size(names, n, d)


def test_too_large_for_memory():
    check_size(("sm",), 1000, 8)
    with pytest.raises(ArgumentError, match="--rows 1000"):
        check_size(("sm",), 1001, 8)
    check_size(("rbf",), 4000, 100)


def test_more_rows_than_are_trained_on_are_test_rows(tmp_path):
    rng = np.random.default_rng(0)
    table = pandas.DataFrame(rng.standard_normal((6000, 2)), columns=["x", "y"])
    table.to_csv(tmp_path / "data.csv", index=False)
    data = read_table_data(TableOptions(tmp_path / "data.csv", "y", rows=4000), tests=True)
    assert len(data.train[1]) == 4000
    assert len(data.test[1]) == 2000
    assert data.notes[1] == (
        "4000 random rows are compared and fitted, the limit of --rows; all 2000 others are test "
        "rows."
    )
    data = read_table_data(TableOptions(tmp_path / "data.csv", "y", rows=5000), tests=True)
    assert (len(data.train[1]), len(data.test[1])) == (5000, 1000)
    assert len(data.notes) == 1


def test_threads_are_as_before():
    before = torch.get_num_threads()
    with threads_for(1000):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with threads_for(1001):
        assert torch.get_num_threads() == before
