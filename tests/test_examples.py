"""Examples of the documentation print what the pages show; snippets of the README run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW = {"botorch_models", "few_shot", "large"}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def snippets(page: Path) -> list[str]:
    return [code for code in BLOCK.findall(page.read_text()) if "--8<--" not in code]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(one, marks=[pytest.mark.slow] * (one.stem in SLOW), id=one.stem)
        for one in EXAMPLES
    ],
)
def test_an_example_prints_what_its_page_shows(script, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    printed, shown = capsys.readouterr().out, script.with_suffix(".txt").read_text()
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    for now, then in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        # Fits end within 0.002 nats of LML or so; other scores may then differ by the root of it.
        assert float(now) == pytest.approx(float(then), rel=0.05, abs=0.05)


def test_every_example_is_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    for script in EXAMPLES:
        for kind in ("py", "txt"):
            assert f'--8<-- "examples/{script.stem}.{kind}"' in text


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda page: page.name)
def test_snippets_of_a_page_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in snippets(page):
        exec(compile(code, page.name, "exec"), names)
