"""Wrong input ends with a sentence, no name reaches a terminal as controls, no damage is unseen."""

import os
import random
import shutil
import subprocess
import sys
import unicodedata
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import typer
from linear_operator.utils.errors import NanError, NotPSDError

from gpclml._utils.resuming import digest
from gpclml.errors import ArgumentError, DataError, NonFiniteError, NotConvergedError
from gpclml.tables.fitting import Recipe, load_model
from gpclml.tables.terminal import FitError, errors_as_text


def made(**columns):
    rng = np.random.default_rng(0)
    table = {"price": rng.standard_normal(40), "x": rng.standard_normal(40)}
    return pandas.DataFrame(table | columns).to_csv(index=False)


TABLES = {
    "no numeric column": (
        "price,town\n" + "".join(f"{n} Euro,{'ab'[n % 2]}\n" for n in range(40)),
        "target 'price': got texts, expected numbers. The table has no column of numbers.",
    ),
    "mixed types": (
        made(size=[1, 2, "unknown", 4] * 10),
        "column 'size': got 10 of 40 values such as 'unknown' (row 3), 'unknown' (row 7), "
        "'unknown' (row 11), expected numbers alone, as the 30 others are. Leave those cells empty "
        "or list them under --missing; an input may also be named under --drop or --categories.",
    ),
    "no column left": (
        made(x=1), "no usable column ('x': the same value in all rows)",
    ),
    "no table": ("", "data.csv is empty"),
    "one column": (
        "It was the best of times\n" * 30, "data.csv has one column only",
    ),
}  # fmt: skip


def check_refused(result, message, folder, *there):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 or "Invalid value" in result.stderr  # typer's own
    assert message in " ".join(result.stderr.split()), result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == sorted(there)


@pytest.mark.parametrize("name", TABLES)
def test_tables(gpclml, tmp_path, no_fit, name):
    text, message = TABLES[name]
    data = tmp_path / "data.csv"
    data.write_text(text)
    for command in ("compare", "fit"):
        result = gpclml(command, data, "--target", "price", "--out", tmp_path / "out")
        check_refused(result, message, tmp_path, "data.csv")


def test_a_pipe_can_be_read_only_once(gpclml, tmp_path):
    os.mkfifo(tmp_path / "data.csv")
    result = gpclml("fit", tmp_path / "data.csv", "--target", "price", "--out", tmp_path / "out")
    check_refused(result, "data.csv is not a regular file", tmp_path, "data.csv")


OPTIONS = {
    "model": (["--models", "rbf,rfb"], "Did you mean 'rbf'?"),
    "no model": (["--models", ","], "names separated by commas"),
    "objective": (["--objective", "cmll"], "Did you mean"),
    "steps": (["--steps", "0"], "steps: got 0"),
    "rows": (["--rows", "10"], "'--rows'"),
    "drop": (["--drop", "y"], "drop: got 'y'"),
    "categories": (["--categories", "price"], "not the target"),
    "seed": (["--seed", str(2**64)], "'--seed'"),
    "decimal": (["--decimal", "x"], "--decimal: got 'x'"),
    "a stack": (["--models", "linear,stack"], "models: got 'stack'"),
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


FLIPS = 150  # in each of the files


def content_of(folder):
    saved = load_model(folder)
    model = saved.model
    tensors = [dict(model.state_dict()), model.train_inputs[0], model.train_targets]
    return digest([*tensors, asdict(saved.encoding), saved.record, dict(saved.made_from)])


@pytest.mark.slow
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
                silent += [bit] if content_of(folder) != expected else []
            except DataError:
                refused += 1
        path.write_bytes(raw)
        assert silent == [], name
        assert refused > 0.9 * FLIPS, name
    assert content_of(folder) == expected


UNSAFE = "\x9b2J\u202e\u2028\x1b[31m"
NAME = f"y{UNSAFE}\nError: all is lost"


def table(**columns):
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((2, 60))
    return pandas.DataFrame({"x": x, "z": z, "y": x + 0.1 * z} | columns)


def check_safe(text, *but):
    """No controls but ends of lines, and none that turn or part them."""
    unsafe = {
        character for character in text
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in "\u202e"
    } - {"\n", *but}  # fmt: skip
    assert not unsafe, text


@pytest.mark.slow
def test_controls_in_names_of_columns_and_files(gpclml, tmp_path):
    data = tmp_path / f"data{UNSAFE}.csv"
    columns = {"y": np.nan, NAME: table()["y"], f"c{UNSAFE}": ["a", "b", f"l{UNSAFE}"] * 20}
    frame = table(**columns).drop(columns="y")
    frame.loc[3, NAME] = np.nan
    frame.loc[:9, "x"] = np.nan
    frame = frame.rename(columns={"x": f"x{UNSAFE}"})
    frame.to_csv(data, index=False)
    out = tmp_path / f"report{UNSAFE}"
    words = "--target", NAME, "--models", "linear,rbf", "--steps", 2, "--out", out
    new = frame.assign(**{f"c{UNSAFE}": f"new{UNSAFE}"})
    new.to_csv(tmp_path / "new.csv", index=False)
    compared = gpclml("compare", data, *words)
    predicted = gpclml("predict", out / "models" / "rbf", tmp_path / "new.csv", "--out", out / "p")
    refused = gpclml("fit", data, "--target", f"no{UNSAFE}", "--out", out)
    for result, code in ((compared, 0), (predicted, 0), (refused, 2)):
        assert result.exit_code == code, result.output
        check_safe(result.output)
        assert r"\x9b2J\u202e\u2028\x1b[31m" in result.output
    # No line is forged.
    assert not any(line.startswith("Error: ") for line in compared.output.splitlines())
    assert r"predict y\x9b2J" in compared.stdout


@pytest.mark.slow
def test_words_misplaced_and_bugs_are_shown_alike(tmp_path):
    words = [sys.executable, "-m", "gpclml", "fit", f"a{UNSAFE}", f"b{UNSAFE}", "--target", "y"]
    done = subprocess.run(words, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    said = done.stderr.decode()
    check_safe(said)
    assert r"unexpected extra argument" in said
    assert r"\x1b[31m" in said
    code = (
        "import sys, warnings\n"
        "from gpclml.tables.command import app, main\n"
        "@app.command()\n"
        "def bug(text: str):\n"
        "    warnings.warn(text)\n"
        "    raise AttributeError(text)\n"
        "main()\n"
    )
    words = [sys.executable, "-c", code, "bug", f"text{UNSAFE}"]
    done = subprocess.run(words, capture_output=True, check=False)
    said = done.stderr.decode()
    assert done.returncode == 1
    check_safe(said)
    assert r"Warning: text\x9b2J" in said
    assert r"AttributeError: text\x9b2J" in said


NOT_UTF8 = pytest.mark.skipif(sys.platform != "linux", reason="names are UTF-8 here")


@pytest.mark.slow
@NOT_UTF8
def test_a_report_of_names_that_are_not_utf8(gpclml, tmp_path, monkeypatch):
    odd = os.fsdecode(b"odd\xff")
    (tmp_path / odd).mkdir()
    monkeypatch.chdir(tmp_path / odd)
    table().to_csv(f"{odd}.csv", index=False)
    words = f"{odd}.csv", "--target", "y", "--models", "linear"
    result = gpclml("compare", *words, "--out", f"{odd} report")
    assert result.exit_code == 0, result.output
    check_safe(result.output)
    assert gpclml("compare", *words, "--missing", odd).exit_code == 2
    assert r"odd\udcff" in Path(f"{odd} report", "index.html").read_text(encoding="utf-8")
