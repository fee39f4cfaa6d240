"""Wrong input and damaged models end with a sentence, and nothing is written."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import asdict

import numpy as np
import pandas
import pytest
import torch
import typer
from linear_operator.utils.errors import NanError, NotPSDError

from gpclml._utils.resuming import digest
from gpclml.errors import ArgumentError, DataError, NonFiniteError, NotConvergedError
from gpclml.tables.fitting import load_model
from gpclml.tables.recipes import Recipe
from gpclml.tables.terminal import FitError, error_text, errors_as_text


def made(**columns):
    rng = np.random.default_rng(0)
    table = {"price": rng.standard_normal(40), "x": rng.standard_normal(40)}
    return pandas.DataFrame(table | columns).to_csv(index=False)


HEAD, *LINES = made().splitlines()
TABLES = {
    "no numeric column": (
        "price,town\n" + "high,a\nlow,b\n" * 20,
        "target 'price': got texts, expected numbers. The table has no column of numbers.",
    ),
    "constant target": (
        made(price=3.5),
        "target 'price': got the same value 3.5 in all 40 rows, expected a column that varies.",
    ),
    "no such target": (
        made().replace("price", "prise"), "Did you mean 'prise'?",
    ),
    "10 rows": (
        "\n".join([HEAD, *LINES[:10]]), "got 10 rows with a value, of 10, expected at least 25",
    ),
    "mixed types": (
        made(size=[1, 2, "unknown", 4] * 10),
        "column 'size': got 10 of 40 values such as 'unknown' (row 3), 'unknown' (row 7), "
        "'unknown' (row 11), expected numbers alone, as the 30 others are. Leave those cells empty "
        "or list them under --missing; an input may also be named under --drop or --categories.",
    ),
    "mixed target": (
        made(price=[1, 2, "unknown", 4] * 10), "column 'price': got 10 of 40 values",
    ),
    "no column left": (
        made(x=1), "no usable column ('x': the same value in all rows)",
    ),
    "one column": (
        "It was the best of times\n" * 30, "data.csv has one column only",
    ),
    "mostly missing": (
        made(z=[1, 2] + [None] * 38, price=[1, 2, 3] + [None] * 37), "got 3 rows with a value",
    ),
}  # fmt: skip


def check_refused(result, message, folder, *there):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert message in lines[0], lines[0]
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == sorted(there)


@pytest.mark.parametrize("command", ["compare", "fit"])
@pytest.mark.parametrize("name", TABLES)
def test_tables(gpclml, tmp_path, command, name):
    text, message = TABLES[name]
    data = tmp_path / "data.csv"
    data.write_text(text)
    result = gpclml(command, data, "--target", "price", "--out", tmp_path / "out")
    check_refused(result, message, tmp_path, "data.csv")


@pytest.mark.parametrize("command", ["compare", "fit"])
def test_files_that_are_no_table(gpclml, tmp_path, command, no_tables):
    data, out = tmp_path / "data.csv", tmp_path / "out"
    words = command, data, "--target", "price", "--out", out
    check_refused(gpclml(*words), f"There is no file {data}", tmp_path)
    for content, message in no_tables.values():
        data.mkdir() if content is None else data.write_bytes(content)
        check_refused(gpclml(*words), message, tmp_path, "data.csv")
        data.rmdir() if content is None else data.unlink()
    os.mkfifo(data)  # can be read only once
    check_refused(gpclml(*words), "data.csv is not a regular file", tmp_path, "data.csv")


OPTIONS = {
    "model": (["--models", "rbf,rfb"], "Did you mean 'rbf'?"),
    "no model": (["--models", ","], "names separated by commas"),
    "objective": (["--objective", "cmll"], "Did you mean"),
    "steps": (["--steps", "0"], "steps: got 0"),
    "rows": (["--rows", "10"], "'--rows'"),
    "drop": (["--drop", "y"], "drop: got 'y'"),
    "categories": (["--categories", "price"], "not the target"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(gpclml, tmp_path, name):
    words, message = OPTIONS[name]
    data = tmp_path / "data.csv"
    data.write_text(made())
    out = tmp_path / "out"
    result = gpclml("compare", data, "--target", "price", "--out", out, *words)
    check_refused(result, message, tmp_path, "data.csv")


def test_the_spectral_mixture_of_too_many_rows(gpclml, tmp_path):
    rng = np.random.default_rng(0)
    table = pandas.DataFrame(rng.standard_normal((2000, 5)), columns=list("abcde"))
    table.to_csv(tmp_path / "data.csv", index=False)
    words = "--target", "a", "--models", "sm", "--out", tmp_path / "out", "--quiet"
    result = gpclml("compare", tmp_path / "data.csv", *words)
    check_refused(result, "at most 1414 rows for it", tmp_path, "data.csv")


def test_folders_that_cannot_be_written(gpclml, tmp_path):
    data = tmp_path / "data.csv"
    data.write_text(made())
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("text")
    (tmp_path / "busy.part").mkdir()
    (tmp_path / "busy.part" / "mine").write_text("text")
    there = "data.csv", "thesis", "busy.part"
    for command, record in (("compare", "report.json"), ("fit", "model.json")):
        for out, message in (
            (other, f"{other} is there and was not written by this command (it has no {record})"),
            (tmp_path / "busy", "busy.part is there and was not written by this command"),
            (data, f"{data} is there and was not written"),
            (tmp_path / "absent" / "report", f"there is no folder {tmp_path / 'absent'}"),
            (data / "report", f"there is no folder {data}. Make it first."),
            ("/proc/report", "cannot write in /proc"),
            ("/", "cannot be a new folder"),
        ):
            result = gpclml(command, data, "--target", "price", "--out", out, "--quiet")
            check_refused(result, message, tmp_path, *there)
    assert (other / "chapter.tex").read_text() == "text"


def test_an_empty_folder_is_filled(gpclml, tmp_path):
    data = tmp_path / "data.csv"
    data.write_text(made())
    (tmp_path / "out").mkdir()
    words = "--target", "price", "--out", tmp_path / "out", "--model", "linear", "--quiet"
    assert gpclml("fit", data, *words).exit_code == 0
    assert (tmp_path / "out" / "model.pt").is_file()


@pytest.mark.parametrize("command", ["compare", "fit"])
@pytest.mark.parametrize(
    ("size", "message"),
    [(1e308, "a value of size 9"), (1e-306, "a standard deviation of")],
)
def test_inputs_that_cannot_be_measured(gpclml, tmp_path, command, size, message):
    data = tmp_path / "data.csv"
    data.write_text(made(x=size * np.random.default_rng(0).uniform(-1, 1, 40)))
    words = "--target", "price", "--out", tmp_path / "out", "--quiet"
    check_refused(gpclml(command, data, *words), "column 'x': got", tmp_path, "data.csv")
    assert message in gpclml(command, data, *words).stderr


def test_what_cannot_be_fitted_is_told(gpclml, tmp_path, monkeypatch):
    def fail(recipe, x, y, **options):
        raise NotPSDError(f"the covariance of {len(y)} points is not positive definite")

    monkeypatch.setattr(Recipe, "fit", fail)
    data = tmp_path / "data.csv"
    data.write_text(made())
    words = "--target", "price", "--out", tmp_path / "out"
    result = gpclml("compare", data, *words, "--models", "rbf,linear")
    assert result.exit_code == 3
    assert "rbf could not be fitted: the covariance of" in result.stderr
    assert "Error: no model could be fitted" in result.stderr
    result = gpclml("fit", data, *words, "--model", "rbf")
    assert result.exit_code == 3
    assert "Error: rbf could not be fitted" in result.stderr
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NonFiniteError("covariance", "2 non-finite of 9 entries", "finite entries"), 3),
        (NotConvergedError("tolerance", "a relative residual of 0.1", "at most 0.001"), 3),
        (NotPSDError("covariance of shape (9, 9)"), 3),
        (NanError("a matrix with NaN"), 3),
        (torch.linalg.LinAlgError("singular"), 3),
        (FitError("no model could be fitted."), 3),
        (ArgumentError("rows", 3, "at least 20"), 2),
        (DataError("data.csv is empty"), 2),
        (OSError("disk full"), 1),
        (MemoryError(), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_exit_code_says_what_kind_of_error_it_is_and_notes_are_kept(error, code, capsys):
    error.add_note("This happened in the scores of models['rbf'].")
    with pytest.raises(typer.Exit) as ended, errors_as_text():
        raise error
    assert ended.value.exit_code == code
    said = capsys.readouterr().err
    assert said.startswith(f"Error: {str(error) or 'MemoryError'}")
    assert said.count("in the scores of models['rbf'].") == 1


def test_the_notes_of_a_cause_are_told_too():
    cause = NotPSDError("not positive definite")
    cause.add_note("Member 3 of the batch.")
    error = FitError("rbf could not be fitted: not positive definite")
    error.__cause__ = cause
    assert error_text(error) == f"{error} Member 3 of the batch."


FLIPS = 150  # in each of the files


def content_of(folder):
    saved = load_model(folder)
    model = saved.model
    parts = [dict(model.state_dict()), model.train_inputs[0], model.train_targets]
    return digest(
        [*parts, json.dumps(asdict(saved.encoding)), asdict(saved.fitted), dict(saved.made_from)]
    )


def test_no_flipped_bit_goes_unseen(report, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(report[0] / "models" / "rbf", folder)
    expected = content_of(folder)
    for name in ("model.pt", "model.json"):
        path = folder / name
        raw, silent, refused = path.read_bytes(), [], 0
        for bit in random.Random(name).sample(range(8 * len(raw)), FLIPS):
            changed = bytearray(raw)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            try:
                found = content_of(folder)
            except DataError:
                refused += 1
            else:
                if found != expected:
                    silent.append(bit)
        path.write_bytes(raw)
        assert silent == [], name
        assert refused > 0.9 * FLIPS, name
    assert content_of(folder) == expected
