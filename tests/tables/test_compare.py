"""What gpclml compare prints and leaves behind, also where models fail or a package is missing."""

import json
import math
import os
import shlex
import subprocess
import sys

import numpy as np
import pandas
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from gpclml import GPRegression, StackedGP, plot_compare
from gpclml.evaluation import score_models
from gpclml.tables import comparing, fitting
from gpclml.tables import methods as module
from gpclml.tables.comparing import figure
from gpclml.tables.data import TableOptions, read_table_data
from gpclml.tables.fitting import Recipe, load_model
from gpclml.tables.methods import prediction_scores, yardsticks


@pytest.fixture(scope="module")
def record(report):
    return json.loads((report[0] / "report.json").read_text())


@pytest.mark.slow
def test_it_prints_the_answer_the_table_and_where_the_page_is(report, record):
    folder, result = report
    lines = result.stdout.splitlines()
    name, scores = record["recommended"], {**record["models"], **record["others"]}
    assert lines[0] == f"To predict progression, use {name}."
    rows = [line.split()[0] for line in lines[4 : 4 + len(scores)]]
    assert rows[0] == name
    errors = [scores[row]["test_rmse"] for row in rows[1:]]
    assert errors == sorted(errors)
    assert set(rows) == set(scores) == {"linear", "rbf", "stack", "trees", "mean"}
    assert f"Report: {folder / 'index.html'}" == lines[-1]
    assert len(lines) < 18
    assert "On the 26 test rows, which no fit has seen, its typical error is" in result.stdout
    assert f" {figure(scores[name]['test_rmse'])}, where the mean has " in result.stdout
    assert "rbf (2 of 2): fitting" in result.stderr
    assert "\r" not in result.stderr  # bars are for terminals
    assert all(note in result.stderr for note in record["notes"])


def test_all_is_in_the_folder_and_nothing_beside_it(report):
    folder, _ = report
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = ["model.json", "model.pt"]
    assert names == sorted(
        ["index.html", "report.json"]
        + [f"models/{model}/{name}" for model in ("linear", "rbf") for name in files]
    )
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        "a <table> & more.csv", folder.name,
    ]  # fmt: skip


@pytest.mark.slow
def test_scores_are_those_of_the_library(report, record):
    options = TableOptions(report[0].parent / "a <table> & more.csv", "progression", 4000, seed=1)
    data = read_table_data(options, tests=True)
    (x, y), (test_x, test_y) = data.train, data.test
    models = {
        name: Recipe(name, seed=1, steps=30).fit(x, y, progress=False)[0]
        for name in ("linear", "rbf")
    }
    comparison = score_models(models, seed=1)
    assert list(record["models"]) == list(comparison.table.index)
    for name, line in comparison.table.to_dict("index").items():
        saved = record["models"][name]
        for criterion in ("lml", "clml", "loo", "weight"):
            assert saved[criterion] == pytest.approx(line[criterion], rel=1e-9)
        kept = load_model(report[0] / "models" / name)
        values = prediction_scores(test_y, kept.predict(test_x)).values
        assert saved["test_rmse"] == pytest.approx(values["typical error"][0], rel=1e-9)
        assert saved["test_nll"] == pytest.approx(values["log loss"][0], rel=1e-9)
        assert saved["test_coverage"] == values["rows inside"][0]
        assert kept.encoding == data.encoding
        torch.testing.assert_close(kept.model.predict(x).mean, models[name].predict(x).mean)


@pytest.mark.slow
def test_the_command_on_record_gives_the_same_report_until_another_is_finished(
    report, record, gpclml, tmp_path
):
    words = shlex.split(record["command"])
    assert words[:2] == ["gpclml", "compare"]
    out = tmp_path / "report"
    words[words.index("--out") + 1] = str(out)
    result = gpclml(*words[1:], "--quiet")
    assert result.exit_code == 0
    assert result.stderr == ""
    again = json.loads((out / "report.json").read_text())
    assert again["models"] == record["models"]
    assert again["chosen"] == record["chosen"]

    before = (out / "index.html").read_bytes()
    assert gpclml(*words[1:], "--models", "linear,rfb").exit_code == 2
    assert (out / "index.html").read_bytes() == before
    assert gpclml(*words[1:], "--models", "linear", "--objective", "loo").exit_code == 0
    other = json.loads((out / "report.json").read_text())
    assert other["fitted"]["linear"]["recipe"]["objective"] == "loo"
    assert list(other["models"]) == ["linear"]
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.slow
def test_bars_are_on_a_terminal_and_not_in_what_is_piped(csv, tmp_path):
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    words = [sys.executable, "-m", "gpclml", "fit", csv, "--target", "progression"]
    words += ["--model", "rbf", "--steps", "2", "--out", tmp_path / "Ω"]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=theirs, check=True,
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},  # has no Ω
    )  # fmt: skip
    os.close(theirs)
    told = os.read(terminal, 100_000).decode("cp1252")
    os.close(terminal)
    assert "fit: 100%" in told
    first, second, third = done.stdout.decode("cp1252").splitlines()
    assert first.startswith("rbf fitted to ")
    assert second == f"Model: {tmp_path / '?'}"
    assert third.startswith("Predict new rows: gpclml predict ")


def test_help_needs_no_torch():
    code = (
        "import sys; from gpclml.tables.command import app\n"
        "try: app(['compare', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert "--objective" in done.stdout


def test_the_module_is_the_command():
    words = [sys.executable, "-m", "gpclml", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gpclml", "0.1.0"]


OPTIONS = "--target", "progression", "--seed", 1, "--steps", 10


@pytest.fixture
def broken(monkeypatch):
    """Makes fits of these models end with a lengthscale that is no number."""

    def make(*names):
        fit = comparing.fit_recipe

        def spoiled(recipe, data, progress):
            saved = fit(recipe, data, progress)
            if recipe.model in names:
                for name, parameter in saved.model.named_parameters():
                    if "lengthscale" in name:
                        parameter.data.fill_(torch.nan)
            return saved

        monkeypatch.setattr(comparing, "fit_recipe", spoiled)
        monkeypatch.setattr(fitting, "fit_recipe", spoiled)

    return make


def no_constants(text):
    raise AssertionError(f"{text} is no JSON")


@pytest.mark.slow
def test_a_report_survives_a_model_without_scores(gpclml, csv, tmp_path, broken):
    broken("rbf")
    out = tmp_path / "out"
    result = gpclml("compare", csv, *OPTIONS, "--models", "rbf,linear,matern", "--out", out)
    assert result.exit_code == 0, result.output
    assert ["rbf"] in [line.split() for line in result.stdout.splitlines()]  # a row of no score
    assert "rbf has no LML, CLML, LOO, learning curves" in result.stdout
    record = json.loads((out / "report.json").read_text(), parse_constant=no_constants)
    assert record["chosen"] in ("linear", "matern")
    assert list(record["models"])[-1] == "rbf"
    line = record["models"]["rbf"]
    assert line["loo"] is line["weight"] is line["test_nll"] is None
    assert "not-scored" in line["findings"]
    assert line["failure"].startswith("no LML, CLML, LOO")
    weights = [record["models"][name]["weight"] for name in ("linear", "matern")]
    assert sum(weights) == pytest.approx(1)
    assert any(note.startswith("rbf could not predict the test rows: ") for note in record["notes"])
    page = (out / "index.html").read_text()
    assert page.count("data:image/png") == 4
    assert "rbf could not predict the test rows" in page
    assert ">nan" not in page


@pytest.mark.slow
def test_where_no_model_can_be_scored_the_command_says_why(gpclml, csv, tmp_path, broken):
    broken("rbf", "matern")
    out = tmp_path / "out"
    result = gpclml("compare", csv, *OPTIONS, "--models", "rbf,matern", "--out", out)
    assert result.exit_code == 3
    assert "Error: covariance: got" in result.stderr
    assert "This happened in the scores of models['rbf']." in result.stderr
    assert "Traceback" not in result.output
    assert not out.exists()


@pytest.mark.slow
def test_fits_that_failed_or_have_no_noise_are_said_so_in_table_terminal_and_note(gpclml, tmp_path):
    rng = np.random.default_rng(3)
    x = rng.uniform(size=(50, 10))
    y = np.sin(3 * x[:, :3]).sum(1) + 0.5 * rng.normal(size=50)
    table = pandas.DataFrame(np.c_[x, y], columns=[*"abcdefghij", "y"])
    csv, out = tmp_path / "noisy.csv", tmp_path / "out"
    table.to_csv(csv, index=False)
    words = "--target", "y", "--models", "linear,rbf", "--out", out
    result = gpclml("compare", csv, *words)
    assert result.exit_code == 0, result.output
    record = json.loads((out / "report.json").read_text())
    assert record["models"]["linear"]["rank"] is None
    assert record["models"]["rbf"]["rank"] == 0
    page = (out / "index.html").read_text()
    for said in ("linear (fit failed, predicts the mean)", "rbf (noise at its bound)"):
        assert said in result.stdout
        assert page.count(said) == 2  # the tables of test scores and of criteria
    for said in ("linear: The fit explains nothing", "rbf: The noise ended at its lower bound"):
        assert said in result.stdout
        assert said in page
    table[:40].to_csv(csv, index=False)
    fitted = gpclml("fit", csv, "--target", "y", "--model", "rbf", "--out", tmp_path / "model")
    assert fitted.exit_code == 0, fitted.output
    assert "The noise ended at its lower bound" in fitted.stderr


def halves(function, n=80, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2 * n, 2, generator=generator, dtype=torch.float64)
    y = function(x) + 0.05 * torch.randn(2 * n, generator=generator, dtype=torch.float64)
    return (x[:n], y[:n]), (x[n:], y[n:])


@pytest.mark.slow
def test_predictions_are_those_of_the_libraries():
    train, (x, y) = halves(lambda x: (6 * x[:, 0]).sin())
    predictors, failures = yardsticks(train, seed=3)
    assert list(predictors) == ["stack", "trees", "mean"]
    assert not failures
    stack = StackedGP(seed=3).fit(*train).predict(x)
    torch.testing.assert_close(predictors["stack"](x).mean, stack.mean)
    trees = HistGradientBoostingRegressor(random_state=3)
    trees.fit(train[0].numpy(), train[1].numpy())
    torch.testing.assert_close(predictors["trees"](x), torch.from_numpy(trees.predict(x.numpy())))
    assert bool((predictors["mean"](x) == train[1].mean()).all())
    assert 0.7 < prediction_scores(y, predictors["stack"](x)).values["rows inside"][0] <= 1
    assert not prediction_scores(y, predictors["trees"](x)).has_intervals
    # Missing inputs are predicted from the others.
    train[0][:, 1], x[:, 1] = train[0][:, 0], x[:, 0]
    lacking = torch.where(torch.arange(len(x))[:, None] % 3 > 0, x, x * torch.tensor([math.nan, 1]))
    predict = yardsticks(train, seed=3)[0]["trees"]
    torch.testing.assert_close(predict(lacking), predict(x), atol=0.1, rtol=0)


def test_what_fails_is_said_and_ends_nothing(monkeypatch):
    class Fails:
        def __init__(self, seed):
            raise RuntimeError("no such luck")

    monkeypatch.setattr(module, "StackedGP", Fails)
    predictors, failures = yardsticks(halves(lambda x: x[:, 0])[0], seed=0)
    assert failures == ["stack failed (no such luck)."]
    assert list(predictors) == ["trees", "mean"]
    monkeypatch.setattr(module, "_MOST_STACKED", 20)
    predictors, (said,) = yardsticks(halves(lambda x: x[:, 0])[0], seed=0)
    assert list(predictors) == ["trees", "mean"]
    assert said.startswith("stack is left out because it takes minutes with more than 20 training")


def run_without(package, *words):
    code = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "from gpclml.__main__ import main\n"
        f"sys.argv = ['gpclml', *{list(words)!r}]\n"
        "main()\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["typer", "matplotlib"])
def test_the_command_without_a_package(package, csv):
    done = run_without(package, "compare", str(csv), "--target", "progression")
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: This needs {package}, which is not installed. Install it by pip install "
        "'gpclml[tables]'.\n"
    )


@pytest.mark.slow
def test_fits_need_no_package_of_pages(csv, tmp_path):
    words = "fit", str(csv), "--target", "progression", "--model", "linear", "--quiet"
    done = run_without("jinja2", *words, "--out", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr


def test_a_plot_without_matplotlib(monkeypatch):
    x = torch.linspace(0, 1, 12, dtype=torch.float64).unsqueeze(-1)
    models = {name: GPRegression(x, x[:, 0].sin(), name) for name in ("rbf", "matern")}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib.*pip install 'gpclml\[plots\]'"):
        plot_compare(models)
