"""What ``gpclml compare`` prints and leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch

from gpclml.evaluation import score_models
from gpclml.tables.data import read_table_data
from gpclml.tables.fitting import load_model
from gpclml.tables.predictions import prediction_scores
from gpclml.tables.reading import read_table, read_targets, split_rows
from gpclml.tables.recipes import Recipe, TableOptions
from gpclml.tables.words import figure


@pytest.fixture(scope="module")
def record(report):
    return json.loads((report[0] / "report.json").read_text())


def test_it_prints_the_answer_the_table_and_where_the_page_is(report, record):
    folder, result = report
    lines = result.stdout.splitlines()
    name, scores = record["recommended"], {**record["models"], **record["others"]}
    assert lines[0] == f"To predict progression, use {name}."
    rows = [line.split()[0] for line in lines[4 : 4 + len(scores)]]
    assert rows[0] == name
    errors = [scores[row]["test_rmse"] for row in rows[1:]]
    assert errors == sorted(errors)
    assert set(rows) == set(scores) == {"linear", "rbf", "stack", "trees", "mean"}
    assert f"Report: {folder / 'index.html'}" == lines[-1]
    assert len(lines) < 18
    assert "\N{MINUS SIGN}" not in result.stdout
    assert "On the 26 test rows, which no fit has seen, its typical error is" in result.stdout
    assert f" {figure(scores[name]['test_rmse'])}, where the mean has " in result.stdout
    assert f"rows with the same inputs scatter by {figure(record['noise'])}" in result.stdout


def test_it_tells_what_was_done_to_rows_and_columns(report, record):
    told = report[1].stderr
    assert "a <table> & more.csv has 130 rows." in told
    assert "Left out: 1 row without progression." in told
    assert "Missing values are filled" in told
    assert "rbf (2 of 2): fitting" in told
    assert "\r" not in told  # bars are for terminals
    assert all(note in told for note in record["notes"])


def test_all_is_in_the_folder_and_nothing_beside_it(report):
    folder, _ = report
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    of_a_model = ["model.json", "model.pt"]
    assert names == sorted(
        ["index.html", "report.json"]
        + [f"models/{model}/{name}" for model in ("linear", "rbf") for name in of_a_model]
    )
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        "a <table> & more.csv", folder.name,
    ]  # fmt: skip


def test_scores_are_those_of_the_library(report, record):
    options = TableOptions(report[0].parent / "a <table> & more.csv", "progression", 4000, seed=1)
    data = read_table_data(options, tests=True)
    (x, y), (test_x, test_y) = data.train, data.test
    models = {
        name: Recipe(name, seed=1, steps=30).fit(x, y, progress=False)[0]
        for name in ("linear", "rbf")
    }
    comparison = score_models(models, seed=1)
    assert list(record["models"]) == list(comparison.table.index)
    for name, line in comparison.table.to_dict("index").items():
        saved = record["models"][name]
        for criterion in ("lml", "clml", "loo", "weight"):
            assert saved[criterion] == pytest.approx(line[criterion], rel=1e-9)
        kept = load_model(report[0] / "models" / name)
        scores = prediction_scores(test_y, kept.predict(test_x))
        assert saved["test_rmse"] == pytest.approx(scores.rmse, rel=1e-9)
        assert saved["test_nll"] == pytest.approx(scores.nll, rel=1e-9)
        assert saved["test_coverage"] == scores.coverage
        assert kept.encoding == data.encoding
        torch.testing.assert_close(kept.model.predict(x).mean, models[name].predict(x).mean)


def test_the_command_on_record_gives_the_same_report_until_another_is_finished(
    report, record, gpclml, tmp_path
):
    words = shlex.split(record["command"])
    assert words[:2] == ["gpclml", "compare"]
    out = tmp_path / "report"
    words[words.index("--out") + 1] = str(out)
    result = gpclml(*words[1:], "--quiet")
    assert result.exit_code == 0
    assert result.stderr == ""
    again = json.loads((out / "report.json").read_text())
    assert again["models"] == record["models"]
    assert again["chosen"] == record["chosen"]

    before = (out / "index.html").read_bytes()
    assert gpclml(*words[1:], "--models", "linear,rfb").exit_code == 2
    assert (out / "index.html").read_bytes() == before
    assert gpclml(*words[1:], "--models", "linear", "--objective", "loo").exit_code == 0
    other = json.loads((out / "report.json").read_text())
    assert other["fitted"]["linear"]["recipe"]["objective"] == "loo"
    assert list(other["models"]) == ["linear"]
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_bars_are_on_a_terminal_and_not_in_what_is_piped(csv, tmp_path):
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    words = [sys.executable, "-m", "gpclml", "fit", csv, "--target", "progression"]
    words += ["--model", "rbf", "--steps", "2", "--out", tmp_path / "Ω"]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=theirs, check=True,
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},  # has no Ω
    )  # fmt: skip
    os.close(theirs)
    told = os.read(terminal, 100_000).decode("cp1252")
    os.close(terminal)
    assert "fit: 100%" in told
    first, second, third = done.stdout.decode("cp1252").splitlines()
    assert first.startswith("rbf fitted to ")
    assert second == f"Model: {tmp_path / '?'}"
    assert third.startswith("Predict new rows: gpclml predict ")


def test_help_needs_no_torch():
    code = (
        "import sys; from gpclml.tables.command import app\n"
        "try: app(['compare', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert "--objective" in done.stdout


def test_the_module_is_the_command():
    words = [sys.executable, "-m", "gpclml", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gpclml", "0.1.0"]


def test_other_columns_do_not_move_the_rows(csv, diabetes):
    """The rows depend on targets and seed alone, so that two reports test on the same."""
    targets = read_targets(read_table(csv), "progression")
    rows = split_rows(targets, 1)
    np.testing.assert_array_equal(
        rows.test, split_rows(read_targets(diabetes[["progression"]], "progression"), 1).test
    )


def test_a_deep_kernel_that_is_the_rbf_gp_is_one_row_with_it(csv, gpclml, tmp_path):
    out = tmp_path / "out"
    gpclml("compare", csv, "--target", "progression", "--models", "rbf,deep", "--out", out)
    record = json.loads((out / "report.json").read_text())
    assert list(record["models"]) == ["rbf"]
    (said,) = [note for note in record["notes"] if note.startswith("deep is the same as rbf here")]
    assert "Learned features do not help" in said
    assert load_model(out / "models" / "deep").fitted.recipe.model == "deep"
