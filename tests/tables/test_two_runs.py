"""Two runs for one folder: one writes it, the other says so, and nothing is mixed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading

import pytest

from gpclml.errors import DataError
from gpclml.tables import fitting
from gpclml.tables.fitting import fit_table, load_model
from gpclml.tables.folders import MODEL, open_work_folder, sha256_of
from gpclml.tables.recipes import Recipe, RunOptions, TableOptions

# Takes a word a line: which seed to fit with. Answers with the exit code and what was said.
RUNS = """
import sys
from typer.testing import CliRunner
from gpclml.tables.command import app
print("ready", flush=True)
for seed in sys.stdin:
    words = [*sys.argv[1:], "--seed", seed.strip()]
    result = CliRunner().invoke(app, words)
    print(result.exit_code, " ".join(result.stderr.split()), flush=True)
"""


@pytest.mark.slow
def test_twenty_times_at_once(csv, tmp_path):
    """Two processes begin at the same time; whichever is first, the folder is that of one run."""
    out = tmp_path / "m"
    words = ["fit", csv, "--target", "progression", "--model", "linear", "--steps", "2", "--quiet"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-W", "ignore", "-c", RUNS, *words, "--out", out]
    runs = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        for run in runs:
            assert run.stdout.readline() == "ready\n"
        codes = []
        for turn in range(20):
            for number, run in enumerate(runs):
                run.stdin.write(f"{2 * turn + number}\n")
                run.stdin.flush()
            answers = [run.stdout.readline() for run in runs]
            ended = [int(answer.split()[0]) for answer in answers]
            codes += ended
            assert 0 in ended
            assert set(ended) <= {0, 2}
            for code, answer in zip(ended, answers, strict=True):
                assert code == 0 or f"another run of gpclml is writing {out}" in answer
            seeds = [2 * turn + number for number in range(2) if ended[number] == 0]
            assert load_model(out).fitted.recipe.seed in seeds
            record = json.loads((out / "model.json").read_text())
            assert {name: sha256_of(out / name) for name in record["files"]} == record["files"]
            assert sorted(os.listdir(out)) == ["model.json", "model.pt", "table.json"]
            assert sorted(os.listdir(tmp_path)) == sorted([csv.name, "m"])
    finally:
        for run in runs:
            run.communicate()
    assert all(run.returncode == 0 for run in runs)


def test_while_one_fits_the_other_is_told_so(csv, gpclml, tmp_path, monkeypatch):
    out = tmp_path / "m"
    options = RunOptions(TableOptions(csv, "progression", 4000), Recipe("linear", steps=2), out)
    fits, told = threading.Event(), threading.Event()
    fit = fitting.fit_recipe

    def slowly(*args, **kwargs):
        fits.set()
        assert told.wait(600)
        return fit(*args, **kwargs)

    monkeypatch.setattr(fitting, "fit_recipe", slowly)
    first = threading.Thread(target=fit_table, args=(options, True))
    first.start()
    try:
        assert fits.wait(600)
        result = gpclml("fit", csv, "--target", "progression", "--out", out)
    finally:
        told.set()
        first.join()
    assert result.exit_code == 2
    assert f"another run of gpclml is writing {out}. Wait until it has ended" in result.stderr
    assert load_model(out).fitted.recipe.steps == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([csv.name, "m"])


def test_other_names_of_the_folder_are_the_same_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with open_work_folder(tmp_path / "m", MODEL, ("model.pt",)):
        for other in (tmp_path / "link" / "m", tmp_path / "x" / ".." / "m"):
            (tmp_path / "x").mkdir(exist_ok=True)
            with pytest.raises(DataError, match="another run"), open_work_folder(other, MODEL, ()):
                pass
        with open_work_folder(tmp_path / "other", MODEL, ()):
            pass


def test_a_killed_run_holds_no_lock(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from gpclml.tables.folders import MODEL, open_work_folder\n"
        "with open_work_folder(Path(sys.argv[1]), MODEL, ()):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "m"], check=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.gpclml-lock", "m.part"]
    with open_work_folder(tmp_path / "m", MODEL, ()):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_written(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def without(handle, operation):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", without)
    with open_work_folder(tmp_path / "m", MODEL, ()), open_work_folder(tmp_path / "n", MODEL, ()):
        pass
    assert list(tmp_path.iterdir()) == []
