"""The commands on pages are commands that their benchmarks take."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from typer.main import get_command

from benchmarks.dkt.studies import STUDIES as FEW_SHOT
from benchmarks.evidence.cells import STUDIES as NETWORKS
from benchmarks.evidence.ledger.page import EXPERIMENTS
from benchmarks.uci.grid import STUDIES as GRIDS

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"(?:^|`)python -m benchmarks\.(\w+) ((?:run|report)\b[^`>]*?)(?:[`>]|$)", re.MULTILINE
)


def app_of(name: str):
    study = importlib.import_module(f"benchmarks.{name}.study")
    return get_command(study.STUDY.make_app(getattr(study, "report", None)))


@pytest.mark.parametrize("name", ["bo", "dkt", "evidence", "tables", "uci"])
def test_commands_of_pages_are_taken(name):
    app = app_of(name)
    results = sorted((ROOT / "benchmarks" / name).glob("results/*.md"))
    pages = [page.read_text() for page in [*results, *GUIDES]]
    commands = {text for page in pages for study, text in COMMAND.findall(page) if study == name}
    assert commands
    for text in sorted(commands):
        words = shlex.split(text)
        words += [] if "--results" in words else ["--results", "a.sqlite"]
        _, command, options = app.resolve_command(app.make_context(name, list(words)), words)
        # Raises where an option is not known or has a bad value.
        command.make_context(name, options)


def test_every_experiment_is_on_the_page_of_papers():
    page = (ROOT / "docs" / "reproduce.md").read_text()
    named = re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| `[^|]*", page, re.MULTILINE)))
    assert sorted(named) == sorted([*GRIDS, *FEW_SHOT, *NETWORKS, *EXPERIMENTS])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpclml.fit.FitWarning")  # of a noise at its lower bound
def test_the_table_of_the_guide_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "extend.md").read_text()
    [code] = re.findall(r"^load_diabetes\(as_frame.*$", page, re.MULTILINE)
    exec(f"from sklearn.datasets import load_diabetes\n{code}")
    for _, text in COMMAND.findall(page):
        answer = CliRunner().invoke(app_of("uci"), shlex.split(text))
        assert answer.exit_code == 0, answer.output
    assert "patients.csv:target" in answer.stdout


def test_the_readme_names_the_runners():
    studies = {study for study, _ in COMMAND.findall((ROOT / "README.md").read_text())}
    assert studies >= {"uci", "dkt", "evidence"}
