"""What names of files and columns hold reaches no terminal as controls, nor ends a run too late."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pandas
import pytest

from gpclml.tables.terminal import printable

UNSAFE = "\x9b2J\u202e\u2028\x1b[31m"
NAME = f"y{UNSAFE}"


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("price in \N{EURO SIGN}, π", "price in \N{EURO SIGN}, π"),
        ("a\x1b[31mb\nc\td", r"a\x1b[31mb\nc\td"),
        ("\x7f\x9b\u2028\u202e", r"\x7f\x9b\u2028\u202e"),
        ("\udcff.csv", r"\xff.csv"),
        ("\ud800", r"\ud800"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown


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
    assert r"predict y\x9b2J" in compared.stdout


def test_a_line_cannot_be_forged(gpclml, tmp_path):
    name = "y\nError: all is lost"
    table().rename(columns={"y": name}).to_csv(tmp_path / "data.csv", index=False)
    words = "--models", "linear", "--steps", 2, "--out", tmp_path / "r"
    result = gpclml("compare", tmp_path / "data.csv", "--target", name, *words)
    assert result.exit_code == 0, result.output
    assert not any(line.startswith("Error: ") for line in result.output.splitlines())
    check_safe(result.output)


def run(*words, **options):
    words = [sys.executable, "-m", "gpclml", *words]
    return subprocess.run(words, capture_output=True, check=False, **options)


def test_words_misplaced_and_bugs_are_shown_alike(tmp_path):
    done = run("fit", f"a{UNSAFE}", f"b{UNSAFE}", "--target", "y")
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


def test_help_is_as_ever():
    done = run("fit", "--help")
    assert done.returncode == 0
    assert b"--objective" in done.stdout
    assert run().returncode == 2


NOT_UTF8 = pytest.mark.skipif(sys.platform != "linux", reason="names are UTF-8 here")


@NOT_UTF8
def test_names_that_are_not_utf8(gpclml, tmp_path):
    """A model of such a table in such a folder is fitted and predicts."""
    data, out = tmp_path / os.fsdecode(b"data\xff.csv"), tmp_path / os.fsdecode(b"m\xfe")
    table().to_csv(data, index=False)
    fit = "fit", data, "--target", "y", "--steps", 2, "--model", "linear", "--out", out
    for words in (fit, ("predict", out, data, "--out", tmp_path / os.fsdecode(b"p\xfd"))):
        result = gpclml(*words)
        assert result.exit_code == 0, result.output
        check_safe(result.output)
    assert r"data\xff.csv has 60 rows" in gpclml(*fit).stderr
    assert len(pandas.read_csv(tmp_path / os.fsdecode(b"p\xfd"))) == 60


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


@pytest.mark.parametrize("command", ["compare", "fit"])
@pytest.mark.parametrize("seed", [2**64, -1])
def test_seeds_that_no_generator_takes(gpclml, tmp_path, no_fit, command, seed):
    table().to_csv(tmp_path / "data.csv", index=False)
    words = "--target", "y", "--out", tmp_path / "out"
    result = gpclml(command, tmp_path / "data.csv", *words, "--seed", seed)
    assert result.exit_code == 2, result.output
    assert "'--seed'" in result.stderr
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


def test_the_largest_seed(gpclml, tmp_path):
    table().to_csv(tmp_path / "data.csv", index=False)
    words = "--models", "linear,rbf,sm,deep", "--steps", 2, "--restarts", 1, "--seed", 2**64 - 1
    result = gpclml(
        "compare", tmp_path / "data.csv", "--target", "y", "--out", tmp_path / "out", *words
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["compare", "fit"])
@pytest.mark.parametrize(
    ("scale", "offset", "said"),
    [
        (1e300, 0.0, "got a value of size"),
        (1e300, 1e307, "got a value of size"),
        (1e152, 0.0, "got a value of size"),
        (1e-160, 0.0, "got a standard deviation of"),
        (1e-300, 0.0, "got a standard deviation of"),
    ],
)
def test_targets_that_cannot_be_squared(gpclml, tmp_path, no_fit, command, scale, offset, said):
    table(y=table()["y"] * scale + offset).to_csv(tmp_path / "data.csv", index=False)
    words = "--target", "y", "--out", tmp_path / "out"
    result = gpclml(command, tmp_path / "data.csv", *words)
    assert result.exit_code == 2, result.output
    assert f"Error: target 'y': {said}" in result.stderr
    assert "divide the column by a power of ten" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


@pytest.mark.parametrize("scale", [1e-140, 1e140])
def test_targets_that_can_be(gpclml, tmp_path, scale):
    """Predictions are those of the same targets in another unit."""
    written = []
    for name, unit in (("a", 1.0), ("b", scale)):
        table(y=table()["y"] * unit).to_csv(tmp_path / f"{name}.csv", index=False)
        data, model, out = (tmp_path / f"{name}{ending}" for ending in (".csv", "", ".out"))
        options = "--target", "y", "--model", "linear", "--out", model
        assert gpclml("fit", data, *options).exit_code == 0
        result = gpclml("predict", model, data, "--out", out)
        assert result.exit_code == 0, result.output
        assert "RMSE" in result.stderr
        written.append(pandas.read_csv(out) / unit)
    pandas.testing.assert_frame_equal(*written, rtol=1e-6)


def test_predictions_of_targets_that_cannot_be_scored(gpclml, tmp_path):
    table().to_csv(tmp_path / "data.csv", index=False)
    table(y=1e300 * table()["y"]).to_csv(tmp_path / "huge.csv", index=False)
    words = "--target", "y", "--model", "linear", "--out", tmp_path / "m"
    assert gpclml("fit", tmp_path / "data.csv", *words).exit_code == 0
    words = tmp_path / "m", tmp_path / "huge.csv", "--out", tmp_path / "p.csv"
    result = gpclml("predict", *words)
    assert result.exit_code == 0
    assert "No scores: values of y are too far from the predictions" in result.stderr
    assert bool(np.isfinite(pandas.read_csv(tmp_path / "p.csv")).all(axis=None))
