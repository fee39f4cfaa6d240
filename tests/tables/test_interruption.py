"""Ctrl-C: what is fitted is kept, and the same command goes on from it."""

from __future__ import annotations

import itertools
import json
import signal
from dataclasses import replace

import pytest

from gpclml.gram.kernels import SpectralMixtureGram
from gpclml.tables.data import read_table_data
from gpclml.tables.fitting import load_model_made_from, made_from
from gpclml.tables.recipes import Recipe, TableOptions


@pytest.fixture
def interrupt_when(interruptible, monkeypatch):
    """Ctrl-C comes as soon as a file is there and a spectral mixture was evaluated ten times."""

    def watch(path):
        evaluated, evaluations = SpectralMixtureGram.__call__, itertools.count(1)

        def evaluate(*args, **kwargs):
            if path.exists() and next(evaluations) == 10:  # well into the fit
                signal.raise_signal(signal.SIGINT)
            return evaluated(*args, **kwargs)

        monkeypatch.setattr(SpectralMixtureGram, "__call__", evaluate)

    return watch


@pytest.fixture
def words(csv, tmp_path):
    """The command of the report that was not interrupted, its models aside."""
    options = "--seed", 1, "--steps", 30, "--out", tmp_path / "report"
    return "compare", csv, "--target", "progression", *options


def models_of(folder):
    return json.loads((folder / "report.json").read_text())["models"]


def test_fitted_models_are_kept_and_taken_up(gpclml, words, csv, tmp_path, interrupt_when, report):
    part = tmp_path / "report.part"
    linear = part / "models" / "linear"
    interrupt_when(linear / "model.json")
    result = gpclml(*words, "--models", "linear,sm")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert f"Fitted models are kept in {part}: linear." in result.stderr
    assert "--models linear" in result.stderr
    assert not (tmp_path / "report").exists()
    kept = (linear / "model.pt").stat().st_mtime_ns

    check_taken_only_for_the_same(linear, csv)
    result = gpclml(*words, "--models", "linear,rbf")
    assert result.exit_code == 0
    assert "linear (1 of 2): kept from before" in result.stderr
    assert "rbf (2 of 2): fitting" in result.stderr
    assert not part.exists()
    out = tmp_path / "report"
    assert (out / "models" / "linear" / "model.pt").stat().st_mtime_ns == kept
    assert models_of(out) == models_of(report[0])


def check_taken_only_for_the_same(folder, csv):
    recipe = Recipe("linear", seed=1, steps=30)
    options = TableOptions(csv, "progression", rows=4000, seed=1)
    data = read_table_data(options, tests=True)
    assert load_model_made_from(folder, made_from(recipe, data)) is not None
    for other in (replace(recipe, objective="loo"), replace(recipe, steps=31)):
        assert load_model_made_from(folder, made_from(other, data)) is None
    for changed in (replace(options, seed=2), replace(options, drop=("bmi",))):
        data = read_table_data(changed, tests=True)
        assert load_model_made_from(folder, made_from(recipe, data)) is None
    text = csv.read_text()
    csv.write_text(text + "25.0,90,4.5,100,m,patient x,Boston\n")
    data = read_table_data(options, tests=True)
    assert load_model_made_from(folder, made_from(recipe, data)) is None
    csv.write_text(text)


def test_before_a_model_is_fitted_nothing_is_kept(gpclml, words, csv, tmp_path, interrupt_when):
    interrupt_when(tmp_path / "report.part" / ".gpclml-work")
    result = gpclml(*words, "--models", "sm")
    assert result.exit_code == 130
    assert "nothing was written" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [csv.name]


def test_one_fit_is_whole_or_not_there(gpclml, csv, tmp_path, interrupt_when):
    interrupt_when(tmp_path / "model.part" / ".gpclml-work")
    out = "--out", tmp_path / "model"
    result = gpclml("fit", csv, "--target", "progression", "--model", "sm", *out)
    assert result.exit_code == 130
    assert "nothing was written" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [csv.name]
