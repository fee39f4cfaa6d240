"""The command replaces and removes nothing but files that it wrote, as it wrote them."""

from __future__ import annotations

import json
import os
import shutil
import stat

import pytest

from gpclml.tables import fitting, folders
from gpclml.tables.folders import MODEL, write_record

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
    (other / "model.json").write_text('{"weights": [1, 2, 3]}')
    monkeypatch.chdir(other / "src" if out == ".." else other)
    check_refused("was not written by this command", "fit", *words, "--out", out)


def test_the_current_folder_may_be_filled_if_it_is_empty(gpclml, words, tmp_path, monkeypatch):
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    assert gpclml("fit", *words, "--model", "linear", "--out", ".").exit_code == 0
    assert sorted(os.listdir(".")) == ["model.json", "model.pt", "table.json"]
    assert gpclml("fit", *words, "--model", "rbf", "--out", ".").exit_code == 0
    assert json.loads((tmp_path / "new" / "model.json").read_text())["recipe"]["model"] == "rbf"


def test_a_folder_with_the_table(check_refused, words, csv):
    check_refused("was not written by this command", "fit", *words, "--out", csv.parent)


@pytest.mark.parametrize("again", [False, True], ids=["other models", "the same"])
def test_what_lies_in_a_report_survives_the_next(gpclml, csv, words, tmp_path, old, again):
    table = old / "table of houses.csv"
    shutil.move(csv, table)
    others = {
        "notes.txt": b"mine", "predictions.csv": b"1\n", "models/rbf/notes.txt": b"mine",
        "models/mine/model.pt": b"mine", "figures/a.png": b"\x89PNG", "report.part/x": b"mine",
    }  # fmt: skip
    for name, data in others.items():
        (old / name).parent.mkdir(exist_ok=True, parents=True)
        (old / name).write_bytes(data)
    others[table.name] = table.read_bytes()
    (old / "empty").mkdir()
    models = ("--models", "linear,rbf") if again else ("--models", "linear")
    result = gpclml("compare", table, *words[1:], *models, "--out", old)
    assert result.exit_code == 0, result.output
    now = content(old)
    assert {name: now[name] for name in others} == others
    assert now["empty"] is None
    record = json.loads((old / "report.json").read_text())
    assert set(record["fitted"]) == ({"rbf", "linear"} if again else {"linear"})
    files = {name for name, data in now.items() if data is not None}
    assert files == {*others, *record["files"], "report.json"}
    assert ("models/rbf/model.pt" in files) == again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


@pytest.mark.parametrize(
    "name", ["index.html", "model.py", "report.json", "models/linear/table.json"]
)
def test_a_file_that_was_edited_is_named_and_stays(check_refused, words, old, name):
    text = (old / name).read_text()
    edited = text.replace('"chosen"', '"chosen, I say"') if name == "report.json" else f"{text} "
    (old / name).write_text(edited)
    said = f"{old / name} "
    check_refused(said, "compare", *words, "--models", "linear", "--out", old)


def test_a_file_that_was_edited_may_be_removed(gpclml, words, model):
    (model / "table.json").unlink()
    assert gpclml("fit", *words, "--model", "rbf", "--out", model).exit_code == 0
    assert (model / "table.json").is_file()


@pytest.mark.parametrize("name", ["models/matern/model.pt", "models/matern"])
def test_a_file_in_the_place_of_a_new_one(check_refused, words, old, name):
    (old / name).parent.mkdir(exist_ok=True)
    (old / name).write_text("mine")
    said = f"{old / name} is there and"
    check_refused(said, "compare", *words, "--models", "matern", "--out", old)


def test_a_folder_in_the_place_of_a_file(check_refused, words, old):
    (old / "model.py").unlink()
    (old / "model.py").mkdir()
    said = f"{old / 'model.py'} is there and"
    check_refused(said, "compare", *words, "--models", "linear", "--out", old)


def test_a_file_that_comes_while_the_model_is_fitted(gpclml, words, model, monkeypatch, tmp_path):
    fit = fitting.fit_recipe

    def slowly(*args, **kwargs):
        (model / "table.json").write_text("mine")
        return fit(*args, **kwargs)

    monkeypatch.setattr(fitting, "fit_recipe", slowly)
    before = content(model) | {"table.json": b"mine"}
    result = gpclml("fit", *words, "--model", "linear", "--out", model)
    assert result.exit_code == 2
    assert f"{model / 'table.json'} has been changed since gpclml wrote it" in result.stderr
    assert content(model) == before
    assert {path.name for path in tmp_path.iterdir()} == {words[0].name, "m"}


def test_folders_of_earlier_releases_stay(check_refused, words, model):
    record = json.loads((model / "model.json").read_text())
    for name in ("files", "checksum", "written_by"):
        del record[name]
    (model / "model.json").write_text(json.dumps(record | {"version": 1}))
    said = f"{model / 'model.json'} was written by another release"
    check_refused(said, "fit", *words, "--out", model)


@pytest.mark.parametrize("name", ["../thesis.tex", "thesis.tex", "/thesis.tex", "models/../../x/y"])
def test_a_record_that_names_files_of_others(check_refused, words, model, name, monkeypatch):
    (model / "thesis.tex").write_text("mine")
    monkeypatch.setattr(folders, "sha256_of", lambda path: "0" * 64)
    write_record(model, MODEL, {}, [name])
    said = f"names the file {name!r}, which gpclml does not write"
    check_refused(said, "fit", *words, "--out", model)


def test_no_link_is_followed(check_refused, words, old, tmp_path):
    compare = "compare", *words, "--models", "linear", "--out"
    (tmp_path / "link").symlink_to(old)
    check_refused(f"{tmp_path / 'link'} is a link", *compare, tmp_path / "link")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    check_refused(f"{tmp_path / 'nowhere'} is a link", *compare, tmp_path / "nowhere")
    (tmp_path / "new.part").symlink_to(old)
    check_refused(f"{tmp_path / 'new.part'} is a link", *compare, tmp_path / "new")
    precious = tmp_path / "precious"
    precious.write_text("")
    (tmp_path / ".other.gpclml-lock").symlink_to(precious)
    check_refused(".other.gpclml-lock is there and was not", *compare, tmp_path / "other")
    for name in ("report.json", "index.html", "models", "models/linear", "models/linear/model.pt"):
        elsewhere = tmp_path / "elsewhere"
        shutil.move(old / name, elsewhere)
        (old / name).symlink_to(elsewhere)
        check_refused("Move it elsewhere" if name != "report.json" else "a link", *compare, old)
        (old / name).unlink()
        shutil.move(elsewhere, old / name)


def test_a_link_on_the_way_is_as_the_folder_that_it_names(gpclml, words, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    out = tmp_path / "home" / "m"
    assert gpclml("fit", *words, "--model", "linear", "--out", out).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["m"]


@pytest.mark.parametrize("name", ["m.part", ".m.gpclml-lock", "m.old", "m.part.part"])
def test_files_beside_the_folder_stay(gpclml, words, tmp_path, name):
    (tmp_path / name).write_text("mine")
    result = gpclml("fit", *words, "--model", "linear", "--out", tmp_path / "m")
    assert (tmp_path / name).read_text() == "mine"
    if result.exit_code:
        assert f"{tmp_path / name} is there and was not written by this command" in result.stderr
    assert (result.exit_code == 0) == (name in ("m.old", "m.part.part"))


def test_notes_in_the_folder_that_an_interrupted_run_left(gpclml, words, tmp_path, old):
    """They stay where they are, also where the folder is filled for the second time."""
    part = tmp_path / "new.part"
    shutil.copytree(old, part)
    (part / "report.json").unlink()
    (part / ".gpclml-work").touch()
    (part / "notes.txt").write_text("mine")
    out = "--out", tmp_path / "new"
    assert gpclml("compare", *words, "--models", "linear", *out).exit_code == 0
    assert content(part) == {"notes.txt": b"mine"}
    assert "models/rbf" not in content(tmp_path / "new")
    result = gpclml("compare", *words, "--models", "linear", *out)
    assert result.exit_code == 2
    assert f"{part} is there and was not written by this command" in result.stderr


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


@pytest.mark.parametrize("name", ["model.pt", "table.json"])
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
