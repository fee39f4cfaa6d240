"""Examples of the documentation print what the pages show; snippets of the README run."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from gpytorch.mlls import ExactMarginalLogLikelihood
from prompt import paste, statements

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
GALLERY = sorted((ROOT / "docs" / "gallery").glob("*.py"))
SLOW = {"botorch_models", "few_shot", "laplace_botorch", "large", "neighbours", "outcomes", "swap"}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)

# Of each snippet of the README: what it shows, by a name that is in no other.
SNIPPETS = {
    "swap": "deep_bottleneck", "botorch": "SingleTaskGP", "compare": "score_models",
    "table": "Regressor", "laplace": "Laplace(network", "few-shot": "DeepKernelTransfer",
    "many rows": "NearestNeighbors",
}  # fmt: skip


def snippets(page: Path) -> list[tuple[str, str]]:
    """The code of a page, and below each piece what it prints, if that is shown."""
    return [block for block in BLOCK.findall(page.read_text()) if "--8<--" not in block[0]]


def snippet(name: str) -> tuple[str, str]:
    """A snippet of the README, and what a block below it or a comment says that it prints."""
    [(code, shown)] = [block for block in snippets(README) if SNIPPETS[name] in block[0]]
    return code, shown or "\n".join(re.findall(r"# prints: (.*)$", code, re.MULTILINE))


def assert_printed(printed: str, shown: str) -> None:
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    for now, then in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        # Fits end within 0.002 nats of LML or so; other scores may then differ by the root of it.
        assert float(now) == pytest.approx(float(then), rel=0.05, abs=0.05)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW), id=path.stem)
        for path in EXAMPLES
    ],
)
def test_an_example_prints_what_its_page_shows(script, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert_printed(capsys.readouterr().out, script.with_suffix(".txt").read_text())


def test_every_example_is_on_a_page():
    text = "".join(page.read_text() for page in GUIDES)
    for script in EXAMPLES:
        for kind in ("py", "txt"):
            assert f'--8<-- "examples/{script.stem}.{kind}"' in text


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in GUIDES if snippets(p)], ids=lambda page: page.name)
def test_snippets_of_a_page_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code, _ in snippets(page):
        paste(code, names)


@pytest.mark.parametrize("script", [*EXAMPLES, *GALLERY], ids=lambda path: path.name)
def test_code_of_a_page_can_be_pasted_at_the_prompt(script):
    assert statements(script.read_text())


def test_every_snippet_of_the_readme_has_a_test():
    assert len(snippets(README)) == len(SNIPPETS)
    assert all(snippet(name) for name in SNIPPETS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_of_the_readme_runs_in_a_process_of_its_own(name, tmp_path):
    code, shown = snippet(name)
    assert statements(code)  # it can be pasted at the prompt
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"MPLBACKEND": "agg"},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert_printed(done.stdout, shown)


def error_printed(code: str, capsys: pytest.CaptureFixture[str]) -> float:
    exec(compile(code, "README.md", "exec"), {})
    [number] = NUMBER.findall(capsys.readouterr().out)
    return float(number)


@pytest.mark.slow
def test_the_swap_of_the_readme_lowers_the_error(capsys):
    code, _ = snippet("swap")
    ours = "ConditionalMarginalLogLikelihood(model"
    assert code.count(ours) == 1
    swapped = code.replace(ours, "ExactMarginalLogLikelihood(model")
    lml_error = error_printed(
        f"from gpytorch.mlls import ExactMarginalLogLikelihood\n{swapped}", capsys
    )
    assert error_printed(code, capsys) < lml_error
    [told] = re.findall(r"in that line it is off by ([\d.]+) degrees", README.read_text())
    assert lml_error == pytest.approx(float(told), rel=0.05)


@pytest.mark.slow
def test_models_of_the_readme_predict_as_well_as_if_botorch_fitted_them():
    names: dict = {}
    exec(compile(snippet("compare")[0], "README.md", "exec"), names)
    x, y = map(torch.as_tensor, (names["x"], names["y"]))
    new_x, new_y = x[200:], y[200:]
    for kernel, model in names["gps"].items():
        refitted = type(model)(x[:200], y[:200], kernel)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(refitted.likelihood, refitted))
        ours, theirs = (
            (fitted.predict(new_x).mean - new_y).square().mean().sqrt()
            for fitted in (model, refitted)
        )
        assert ours <= 1.001 * theirs, kernel  # both searches end near the optimum, not at it


@pytest.mark.slow
def test_the_table_of_the_readme_is_predicted_as_well_as_by_botorch():
    names: dict = {}
    exec(compile(snippet("table")[0], "README.md", "exec"), names)
    x, y, mean = (torch.as_tensor(names[name]) for name in ("x", "y", "mean"))
    model = SingleTaskGP(x[:100], y[:100, None], input_transform=Normalize(x.shape[-1]))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    theirs = (model.posterior(x[300:]).mean[:, 0] - y[300:]).square().mean().sqrt()
    assert (mean - y[300:]).square().mean().sqrt() <= theirs


@pytest.mark.slow
def test_the_faster_fit_of_the_readme_predicts_as_well_as_that_of_botorch(capsys):
    code, _ = snippet("botorch")
    ours = ", optimizer=fit_gpytorch_mll_fused"
    assert code.count(ours) == 1
    theirs = error_printed(code.replace(ours, ""), capsys)
    assert error_printed(code, capsys) <= theirs + 0.1  # both are rounded to a digit
