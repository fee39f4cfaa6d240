"""The command replaces and removes nothing but files that it wrote, as it wrote them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from gpclml.tables import fitting, folders
from gpclml.tables.folders import MODEL

MODELS = "--models", "linear,rbf"


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


@pytest.mark.parametrize(("command", "record"), [("fit", MODEL.record), ("compare", "report.json")])
@pytest.mark.parametrize("text", ['{"weights": [1, 2, 3]}', '{"format": "Keras"}', "no JSON", "[]"])
def test_the_folder_of_another_program(check_refused, words, tmp_path, command, record, text):
    other = tmp_path / "network"
    (other / "layers").mkdir(parents=True)
    (other / record).write_text(text)
    (other / "layers" / "1.bin").write_bytes(bytes(100))
    said = f"{other} is there and was not written by this command (its {record} is of another"
    check_refused(said, command, *words, "--out", other)


@pytest.mark.parametrize("out", [".", "..", "../network"])
def test_the_current_folder(check_refused, words, tmp_path, monkeypatch, out):
    other = tmp_path / "network"
    (other / "src").mkdir(parents=True)
    monkeypatch.chdir(other / "src" if out == ".." else other)
    said = f"{other} is the current folder, or holds it. Name a new one."
    check_refused(said, "fit", *words, "--out", out)


def test_a_folder_with_the_table(check_refused, words, csv):
    check_refused("was not written by this command", "fit", *words, "--out", csv.parent)


@pytest.mark.parametrize(
    "name", ["notes.txt", "models/rbf/notes.txt", "models/mine/model.pt", "report.part/x"]
)
def test_a_report_with_files_of_others_is_refused(check_refused, words, old, name):
    (old / name).parent.mkdir(exist_ok=True, parents=True)
    (old / name).write_text("mine")
    said = f"{old / name} is there and was not written by this command. Move it elsewhere"
    check_refused(said, "compare", *words, *MODELS, "--out", old)


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


def test_a_file_that_was_edited_may_be_removed(gpclml, words, model):
    (model / "model.pt").unlink()
    assert gpclml("fit", *words, "--model", "rbf", "--out", model).exit_code == 0
    assert (model / "model.pt").is_file()


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
    assert {path.name for path in tmp_path.iterdir()} == {words[0].name, "m", "m.part"}


def test_folders_of_earlier_releases_stay(check_refused, words, model):
    record = json.loads((model / "model.json").read_text())
    for name in ("files", "checksum", "written_by"):
        del record[name]
    (model / "model.json").write_text(json.dumps(record | {"version": 1}))
    said = f"{model / 'model.json'} was written by another release"
    check_refused(said, "fit", *words, "--out", model)


def test_no_link_is_followed(check_refused, words, old, tmp_path):
    compare = "compare", *words, "--models", "linear", "--out"
    (tmp_path / "link").symlink_to(old)
    check_refused(f"{tmp_path / 'link'} is a link", *compare, tmp_path / "link")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    check_refused(f"{tmp_path / 'nowhere'} is a link", *compare, tmp_path / "nowhere")
    (tmp_path / "new.part").symlink_to(old)
    check_refused(f"{tmp_path / 'new.part'} is a link", *compare, tmp_path / "new")
    for name in ("report.json", "index.html", "models", "models/linear", "models/linear/model.pt"):
        elsewhere = tmp_path / "elsewhere"
        shutil.move(old / name, elsewhere)
        (old / name).symlink_to(elsewhere)
        check_refused("Move it elsewhere", *compare, old)
        (old / name).unlink()
        shutil.move(elsewhere, old / name)


def test_a_link_on_the_way_is_as_the_folder_that_it_names(gpclml, words, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    out = tmp_path / "home" / "m"
    assert gpclml("fit", *words, "--model", "linear", "--out", out).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["m"]


@pytest.mark.parametrize("name", ["m.part", "m.old", "m.part.part"])
def test_files_beside_the_folder_stay(gpclml, words, tmp_path, name):
    (tmp_path / name).write_text("mine")
    result = gpclml("fit", *words, "--model", "linear", "--out", tmp_path / "m")
    assert (tmp_path / name).read_text() == "mine"
    if result.exit_code:
        assert f"{tmp_path / name} is there and was not written by this command" in result.stderr
    assert (result.exit_code == 0) == (name in ("m.old", "m.part.part"))


def test_notes_in_the_folder_that_an_interrupted_run_left(gpclml, words, tmp_path, old):
    """They go along with it, and models that are not asked for do not."""
    part = tmp_path / "new.part"
    shutil.copytree(old, part)
    (part / "report.json").unlink()
    (part / ".gpclml-work").touch()
    (part / "notes.txt").write_text("mine")
    (part / "models" / "rbf" / f"model.pt.{'0' * 32}.part").write_text("half")
    out = "--out", tmp_path / "new"
    assert gpclml("compare", *words, "--models", "linear", *out).exit_code == 0
    assert not part.exists()
    names = content(tmp_path / "new")
    assert names["notes.txt"] == b"mine"
    assert "models/rbf" not in names
    result = gpclml("compare", *words, "--models", "linear", *out)
    assert result.exit_code == 2
    assert "notes.txt is there and was not written by this command" in result.stderr


class KilledError(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("number", [0, 1])
def test_a_run_that_is_killed_leaves_one_result(
    gpclml, words, model, tmp_path, monkeypatch, number
):
    """The old one, or all of the new one in the work folder, from which the next run goes on."""
    before, replace, renamed = content(model), os.replace, itertools.count()

    def killed(source, target):
        if Path(source) in (model, model.with_name("m.part")) and next(renamed) == number:
            raise KilledError
        replace(source, target)

    fit = "fit", *words, "--model", "rbf", "--out", model
    with monkeypatch.context() as patched:
        patched.setattr(folders.os, "replace", killed)
        with pytest.raises(KilledError):
            gpclml(*fit)
    assert model.exists() == (number == 0)
    assert not model.exists() or content(model) == before
    assert {"model.pt", "model.json"} < content(tmp_path / "m.part").keys()
    assert gpclml(*fit).exit_code == 0
    assert json.loads((model / "model.json").read_text())["recipe"]["model"] == "rbf"
    assert not (tmp_path / "m.part").exists()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_modes_of_the_umask(gpclml, words, csv, tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        assert gpclml("fit", *words, "--model", "linear", "--out", tmp_path / "m").exit_code == 0
        assert gpclml("predict", tmp_path / "m", csv, "--out", tmp_path / "mean.csv").exit_code == 0
    finally:
        os.umask(before)
    paths = [*(tmp_path / "m").iterdir(), tmp_path / "mean.csv"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {mode}
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == mode | (mode & 0o444) >> 2


@pytest.mark.parametrize("named", [False, True])
def test_predictions_replace_predictions_and_no_other_file(
    gpclml, csv, model, tmp_path, monkeypatch, named
):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "predictions.csv"
    mine.write_text("id,mean\n1,2\n")
    (tmp_path / "predictions.csv.part").write_text("mine")
    out = ["--out", mine] if named else []
    result = gpclml("predict", model, csv, *out)
    assert result.exit_code == 2
    assert "predictions.csv is there and holds no predictions of gpclml" in result.stderr
    assert mine.read_text() == "id,mean\n1,2\n"
    mine.unlink()
    assert gpclml("predict", model, csv, *out).exit_code == 0
    written = mine.read_bytes()
    assert gpclml("predict", model, csv, *out).exit_code == 0
    assert mine.read_bytes() == written
    assert (tmp_path / "predictions.csv.part").read_text() == "mine"


@pytest.mark.parametrize("name", ["model.pt"])
def test_files_of_two_models_are_no_model(gpclml, csv, words, model, tmp_path, name):
    other = tmp_path / "other"
    drop = "--drop", "bmi"
    assert gpclml("fit", *words, "--model", "linear", *drop, "--out", other).exit_code == 0
    shutil.copy(other / name, model / name)
    result = gpclml("predict", model, csv, "--out", tmp_path / "mean.csv")
    assert result.exit_code == 2, result.output
    assert (
        f"{model / name} is not the file that {model / 'model.json'} was written" in result.stderr
    )


@pytest.mark.parametrize("there", [False, True], ids=["alone", "beside"])
def test_a_model_whose_name_ends_as_that_of_a_work_folder(
    gpclml, check_refused, csv, words, model, tmp_path, there
):
    """A backup, say: it is never taken for what an interrupted run left."""
    part = tmp_path / "m.part"
    shutil.copytree(model, part)
    shutil.rmtree(model) if not there else None
    before = content(part)
    said = f"{part} is there and was not written by this command (it has no .gpclml-work)"
    check_refused(said, "fit", *words, "--out", model)
    result = gpclml("predict", model, csv, "--out", tmp_path / "mean.csv")
    assert result.exit_code == (0 if there else 2)
    assert content(part) == before
    assert gpclml("predict", part, csv, "--out", tmp_path / "mean.csv").exit_code == 0
