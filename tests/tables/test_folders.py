"""The command writes its folder as a whole, goes on where it was stopped, and harms no other."""

import itertools
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gpclml.gram.kernels import SpectralMixtureGram
from gpclml.tables import fitting, folders
from gpclml.tables.data import TableOptions, read_table_data
from gpclml.tables.fitting import Recipe, load_model_made_from, made_from

MODELS = "--models", "linear,rbf"

pytestmark = pytest.mark.usefixtures("plain_pictures")


def content(folder):
    """What is in a folder: links as what they name, files as their bytes, folders as None."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink()
        else path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }  # fmt: skip


@pytest.fixture
def words(csv):
    return csv, "--target", "progression", "--seed", 1, "--quiet"


@pytest.fixture
def check_refused(gpclml, tmp_path, no_fit):
    """Runs a command that is to be refused, and checks that all is as before."""

    def check(message, *words):
        before = content(tmp_path)
        result = gpclml(*words)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert message in result.stderr
        assert content(tmp_path) == before

    return check


@pytest.fixture
def model(report, tmp_path):
    """The folder of a fitted model."""
    return shutil.copytree(report[0] / "models" / "linear", tmp_path / "m")


@pytest.fixture
def old(report, tmp_path):
    """A report of two models that is there already."""
    return shutil.copytree(report[0], tmp_path / "old")


@pytest.mark.slow
def test_folders_that_are_not_its_own(check_refused, words, csv, tmp_path):
    other = tmp_path / "network"
    (other / "layers").mkdir(parents=True)
    (other / "layers" / "1.bin").write_bytes(bytes(100))
    said = "is there and was not written by this command"
    for command, record in (("compare", "report.json"), ("fit", "model.json")):
        for out, message in (
            (other, f"{other} {said} (it has no {record})"),
            (csv, f"{csv} {said}"),
            (tmp_path / "absent" / "report", f"there is no folder {tmp_path / 'absent'}"),
            ("/proc/report", "cannot write in /proc"),
            ("/", "cannot be a new folder"),
        ):
            check_refused(message, command, *words, "--out", out)
        for text in ('{"weights": [1, 2, 3]}', "no JSON", "[]"):
            (other / record).write_text(text)
            check_refused(
                f"{other} {said} (its {record} is of another", command, *words, "--out", other
            )


@pytest.mark.parametrize("out", [".", "..", "../network"])
def test_the_current_folder(check_refused, words, tmp_path, monkeypatch, out):
    other = tmp_path / "network"
    (other / "src").mkdir(parents=True)
    monkeypatch.chdir(other / "src" if out == ".." else other)
    said = f"{other} is the current folder, or holds it. Name a new one."
    check_refused(said, "fit", *words, "--out", out)


@pytest.mark.parametrize("name", ["notes.txt", "models/mine/model.pt"])
def test_a_report_with_files_of_others_is_refused(check_refused, words, old, name):
    (old / name).parent.mkdir(exist_ok=True, parents=True)
    (old / name).write_text("mine")
    said = f"{old / name} is there and was not written by this command. Move it elsewhere"
    check_refused(said, "compare", *words, *MODELS, "--out", old)


@pytest.mark.slow
def test_a_report_is_replaced_as_a_whole(gpclml, words, old):
    result = gpclml("compare", *words, "--models", "linear", "--out", old)
    assert result.exit_code == 0, result.output
    record = json.loads((old / "report.json").read_text())
    files = {name for name, data in content(old).items() if data is not None}
    assert files == {*record["files"], "report.json"}
    assert "models/rbf/model.pt" not in files
    assert [path.name for path in old.parent.iterdir() if path.name != words[0].name] == ["old"]


@pytest.mark.parametrize("name", ["index.html", "report.json", "models/linear/model.json"])
def test_a_file_that_was_edited_is_named_and_stays(check_refused, words, old, name):
    text = (old / name).read_text()
    edited = text.replace('"chosen"', '"chosen, I say"') if name == "report.json" else f"{text} "
    (old / name).write_text(edited)
    said = f"{old / name} "
    check_refused(said, "compare", *words, "--models", "linear", "--out", old)


def test_a_file_that_comes_while_the_model_is_fitted(gpclml, words, model, monkeypatch, tmp_path):
    fit = fitting.fit_recipe

    def slowly(*args, **kwargs):
        (model / "model.pt").write_text("mine")
        return fit(*args, **kwargs)

    monkeypatch.setattr(fitting, "fit_recipe", slowly)
    before = content(model) | {"model.pt": b"mine"}
    result = gpclml("fit", *words, "--model", "linear", "--out", model)
    assert result.exit_code == 2
    assert f"{model / 'model.pt'} has been changed since gpclml wrote it" in result.stderr
    assert content(model) == before
    assert {path.name for path in tmp_path.iterdir()} == {words[0].name, "m", "m.gpclml-work"}


@pytest.mark.slow
def test_no_link_is_followed(check_refused, words, old, tmp_path):
    compare = "compare", *words, "--models", "linear", "--out"
    (tmp_path / "link").symlink_to(old)
    check_refused(f"{tmp_path / 'link'} is a link", *compare, tmp_path / "link")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    check_refused(f"{tmp_path / 'nowhere'} is a link", *compare, tmp_path / "nowhere")
    (tmp_path / "new.gpclml-work").symlink_to(old)
    check_refused(f"{tmp_path / 'new.gpclml-work'} is a link", *compare, tmp_path / "new")
    for name in ("report.json", "models", "models/linear/model.pt"):
        elsewhere = tmp_path / "elsewhere"
        shutil.move(old / name, elsewhere)
        (old / name).symlink_to(elsewhere)
        check_refused("Move it elsewhere", *compare, old)
        (old / name).unlink()
        shutil.move(elsewhere, old / name)


@pytest.mark.slow
def test_notes_in_the_folder_that_an_interrupted_run_left(gpclml, words, tmp_path, old):
    """They go along with it, and models that are not asked for do not."""
    work = tmp_path / "new.gpclml-work"
    shutil.copytree(old, work)
    (work / "report.json").unlink()
    (work / "notes.txt").write_text("mine")
    (work / "models" / "rbf" / "gpclml.0a1b.part").write_text("half")
    out = "--out", tmp_path / "new"
    assert gpclml("compare", *words, "--models", "linear", *out).exit_code == 0
    assert not work.exists()
    names = content(tmp_path / "new")
    assert names["notes.txt"] == b"mine"
    assert "models/rbf" not in names
    result = gpclml("compare", *words, "--models", "linear", *out)
    assert result.exit_code == 2
    assert "notes.txt is there and was not written by this command" in result.stderr


class KilledError(BaseException):
    """The process ends here."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_run_that_is_killed_leaves_one_result(
    gpclml, words, model, tmp_path, monkeypatch, number
):
    """The old one, or all of the new one in the work folder, from which the next run goes on."""
    before, replace, renamed = content(model), os.replace, itertools.count()

    def killed(source, target):
        if Path(source) in (model, model.with_name("m.gpclml-work")) and next(renamed) == number:
            raise KilledError
        replace(source, target)

    fit = "fit", *words, "--model", "rbf", "--out", model
    with monkeypatch.context() as patched:
        patched.setattr(folders.os, "replace", killed)
        with pytest.raises(KilledError):
            gpclml(*fit)
    assert model.exists() == (number == 0)
    assert not model.exists() or content(model) == before
    assert {"model.pt", "model.json"} == content(tmp_path / "m.gpclml-work").keys()
    assert gpclml(*fit).exit_code == 0
    assert json.loads((model / "model.json").read_text())["recipe"]["model"] == "rbf"
    assert not (tmp_path / "m.gpclml-work").exists()


def test_predictions_replace_predictions_and_no_other_file(
    gpclml, csv, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "predictions.csv"
    mine.write_text("id,mean\n1,2\n")
    result = gpclml("predict", model, csv)
    assert result.exit_code == 2
    assert "predictions.csv is there and holds no predictions of gpclml" in result.stderr
    assert mine.read_text() == "id,mean\n1,2\n"
    mine.unlink()
    assert gpclml("predict", model, csv).exit_code == 0
    written = mine.read_bytes()
    assert gpclml("predict", model, csv).exit_code == 0
    assert mine.read_bytes() == written


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
def command(csv, tmp_path):
    """The command of the report that was not interrupted, its models aside."""
    options = "--seed", 1, "--steps", 30, "--out", tmp_path / "report"
    return "compare", csv, "--target", "progression", *options


def models_of(folder):
    return json.loads((folder / "report.json").read_text())["models"]


@pytest.mark.slow
def test_fitted_models_are_kept_and_taken_up(
    gpclml, command, csv, tmp_path, interrupt_when, report
):
    work = tmp_path / "report.gpclml-work"
    linear = work / "models" / "linear"
    interrupt_when(linear / "model.json")
    result = gpclml(*command, "--models", "linear,sm")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert f"Fitted models are kept in {work}: linear." in result.stderr
    assert "--models linear" in result.stderr
    assert not (tmp_path / "report").exists()
    kept = (linear / "model.pt").stat().st_mtime_ns

    check_taken_only_for_the_same(linear, csv)
    result = gpclml(*command, "--models", "linear,rbf")
    assert result.exit_code == 0
    assert "linear (1 of 2): kept from before" in result.stderr
    assert "rbf (2 of 2): fitting" in result.stderr
    assert not work.exists()
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
