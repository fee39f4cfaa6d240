"""The commands on pages of results are commands that their benchmarks take."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

ROOT = Path(__file__).parents[2] / "benchmarks"
COMMAND = re.compile(
    r"(?:^|`)python -m benchmarks\.(\w+) ((?:run|report)\b[^`>]*?)(?:[`>]|$)", re.MULTILINE
)


@pytest.mark.parametrize("name", ["bo", "dkt", "tables", "uci"])
def test_commands_of_pages_are_taken(name):
    app = get_command(importlib.import_module(f"benchmarks.{name}.study").STUDY.make_app())
    pages = [page.read_text() for page in (ROOT / name).glob("results/*.md")]
    found = {text for page in pages for study, text in COMMAND.findall(page) if study == name}
    assert found
    for text in sorted(found):
        words = shlex.split(text)
        words += [] if "--results" in words else ["--results", "a.sqlite"]
        _, command, rest = app.resolve_command(app.make_context(name, list(words)), words)
        command.make_context(name, rest)  # raises where an option is not known or has a bad value
