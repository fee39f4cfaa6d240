"""What gpclml compare prints and leaves behind: scores, the choice, the page, failures."""

import base64
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from scipy.stats import norm
from sklearn.ensemble import HistGradientBoostingRegressor

from gpclml import GPRegression, StackedGP, plot_compare
from gpclml.evaluation import score_models
from gpclml.tables import comparing, fitting
from gpclml.tables import methods as module
from gpclml.tables.comparing import answer, columns_in_words, figure, headline, score_table
from gpclml.tables.data import TableOptions, read_table_data
from gpclml.tables.encoding import fit_inputs, kind_of
from gpclml.tables.fitting import Recipe, load_model, normal_predictions
from gpclml.tables.methods import (
    PredictionScores,
    choose,
    clearly_smaller,
    column_effects,
    prediction_scores,
    yardsticks,
)


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
        plot_compare(score_models(models))


def test_scores_are_those_of_scipy():
    rng = np.random.default_rng(0)
    y, mean, deviation = rng.standard_normal((3, 50))
    deviation = np.abs(deviation) + 0.5
    normals = normal_predictions(torch.tensor(mean), torch.tensor(deviation))
    scores = prediction_scores(torch.tensor(y), normals)
    squares = (y - mean) ** 2
    logs = norm.logpdf(y, mean, deviation)
    low, high = norm.interval(0.9, mean, deviation)
    inside = (low <= y) & (y <= high)
    root, size = math.sqrt(squares.mean()), math.sqrt(50)
    expected = {
        "log loss": (-logs.mean(), logs.std(ddof=1) / size),
        "typical error": (root, squares.std(ddof=1) / size / 2 / root),
        "rows inside": (inside.mean(), inside.std(ddof=1) / size),
        "interval width": (np.sort(high - low)[24], 0.0),
    }
    assert scores.values == {name: pytest.approx(pair, rel=1e-6) for name, pair in expected.items()}
    np.testing.assert_allclose(scores.log_densities, logs)


def normals(targets, off, deviation):
    """Scores of predictions that are off by so much, up or down, and of one deviation."""
    signs = torch.arange(len(targets)) % 2 * 2 - 1.0
    spread = torch.linspace(0.9, 1.1, len(targets), dtype=targets.dtype)
    means = targets + off * spread * signs
    normal = normal_predictions(means, torch.full_like(targets, deviation))
    return prediction_scores(targets, normal)


@pytest.fixture
def targets():
    return torch.linspace(-3, 3, 40, dtype=torch.float64)


def test_the_pick_is_used_unless_another_is_clearly_better(targets):
    mean = prediction_scores(targets, torch.zeros_like(targets))
    stack, alike = normals(targets, 0.5, 0.5), normals(targets, 0.5, 0.5)
    closer, far = normals(targets, 0.4, 0.5), normals(targets, 0.6, 0.5)
    sure, both = normals(targets, 0.5, 5.0), normals(targets, 0.6, 0.7)
    assert choose(["rbf"], {"rbf": alike, "stack": stack, "mean": mean}) == (
        "stack", "stack", True, ("mean",)
    )  # fmt: skip
    assert choose(["rbf"], {"rbf": closer, "stack": stack})[:3] == ("rbf", "stack", True)
    assert choose(["rbf"], {"rbf": closer, "stack": stack}, failed=["rbf"]).name == "stack"
    assert choose(["rbf"], {"rbf": far, "stack": stack}).beaten == ("rbf",)
    # Densities decide where errors do not, and only there.
    assert choose(["rbf"], {"rbf": alike, "stack": sure}).name == "rbf"
    assert choose(["rbf"], {"rbf": both, "stack": sure}).name == "stack"
    trees = prediction_scores(targets, closer.means)
    assert choose(["rbf"], {"rbf": stack, "trees": trees, "mean": mean})[:2] == ("trees", "rbf")
    missing = PredictionScores.missing(targets)
    assert choose(["rq", "rbf"], {"rq": missing, "rbf": stack, "mean": stack}) == (
        "rbf", "rbf", False, ()
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "r2", "least"), [(5, 1.0, 1), (12, 0.98, 0.9), (20, 0.9, 0.9)])
def test_near_perfect_predictions_are_seen_in_few_test_rows(rows, r2, least):
    draws = torch.Generator().manual_seed(0)
    scatter, signal = torch.randn(2, 200, rows, generator=draws, dtype=torch.float64)
    errors = math.sqrt(1 - r2) * scatter
    clear = [
        clearly_smaller(error, other, 0.0125)
        for error, other in zip(errors, errors + math.sqrt(r2) * signal, strict=True)
    ]
    assert np.mean(clear) >= least
    scores = {
        "stack": prediction_scores(signal[0], signal[0] - errors[0]),
        "mean": prediction_scores(signal[0], torch.zeros_like(signal[0])),
        **{name: prediction_scores(signal[0], signal[0] - 1) for name in ("rbf", "trees")},
    }
    assert headline(choose(["rbf"], scores), "price") == "To predict price, use stack."


@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "skewed"])
def test_nothing_is_clear_where_there_is_nothing_to_predict(rows, kind):
    """Predictions that scatter at random, and constants: at most one in forty seem better."""
    draws = np.random.default_rng(0)
    shape = 1000, rows
    targets = {
        "normal": draws.standard_normal(shape), "heavy tails": draws.standard_t(3, shape),
        "skewed": np.exp(draws.standard_normal(shape)) - math.exp(0.5),
    }[kind]  # fmt: skip
    for predicted in (0.1 * draws.standard_normal(shape), 0.1 * draws.standard_normal((1000, 1))):
        clear = [
            clearly_smaller(torch.tensor(target - off), torch.tensor(target), 0.0125)
            for target, off in zip(targets, predicted, strict=True)
        ]
        assert np.mean(clear) <= 0.025


def test_the_answer_has_the_figures(targets):
    mean = prediction_scores(targets, torch.zeros_like(targets))
    scores = {
        "stack": normals(targets, 0.5, 0.5),
        "linear": normals(targets, 0.5, 0.5),
        "mean": mean,
    }
    choice = choose(["linear"], scores)
    assert headline(choice, "price") == "To predict price, use stack."
    said = " ".join(answer(choice, "a mixture", scores, "the 40 test rows"))
    assert said == (
        "stack is a mixture. On the 40 test rows its typical error is 0.501, where the mean has "
        "1.78 and a linear model 0.501. Its "
        "90\N{NO-BREAK SPACE}% intervals are about 1.64 wide and hold 100\N{NO-BREAK SPACE}% of "
        "the true values, so they are wider than needed. Its errors are clearly smaller than those "
        "of the mean. Between stack and linear the differences may be chance."
    )
    scores["trees"] = prediction_scores(targets, normals(targets, 0.1, 1.0).means)
    choice = choose(["linear"], scores)
    said = " ".join(answer(choice, "", scores, "the 40 test rows"))
    assert "no intervals; if you need them, use stack." in said
    assert "Before the test the choice was stack; on the test rows trees is clearly better." in said
    nothing = choose(["linear"], {"linear": mean, "mean": mean})
    assert "Nothing here predicts price clearly better" in headline(nothing, "price")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (math.nan, ""), (56.417, "56.4"), (1234.6, "1230"), (0.012345, "0.0123"),
        (-7.0, "-7.00"), (123456.0, "123000"), (2.5e9, "2.5e+09"),
        (3e-7, "3e-07"),
    ],
)  # fmt: skip
def test_figures_have_three_digits(value, text):
    assert figure(value) == text


def encoded(table):
    """The encoding of the columns of a table but y, and its rows."""
    kinds = {name: kind_of(table[name]) for name in table.columns if name != "y"}
    encoding = fit_inputs(table, kinds)
    x = torch.from_numpy(encoding.encode(table))
    return encoding, (x, torch.tensor(table["y"].to_numpy()))


def test_effects_are_those_of_shuffled_columns():
    """The typical error rises by what independent values of the column make of it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, 3, generator=generator, dtype=torch.float64)
    groups = ["left" if value < 0.5 else "right" for value in x[:, 2]]
    table = pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "side": groups})
    table["y"] = (
        3 * table.a
        + 2.0 * (table.side == "left")
        + 0.1 * np.random.default_rng(0).normal(size=2000)
    )
    encoding, test = encoded(table)

    def predict(points):
        names = encoding.names
        return 3 * points[:, names.index("a")] + 2 * points[:, names.index("side = left")]

    effects = {effect.column: effect for effect in column_effects(predict, encoding, test, seed=0)}
    assert list(effects) == ["side", "a", "b"]
    for column, variance in (("a", 9 / 12), ("side", 1.0)):
        expected = math.sqrt(2 * variance + 0.01) - 0.1
        assert effects[column].rise == pytest.approx(expected, rel=0.08)
        assert effects[column].is_clear
    assert effects["b"].rise == pytest.approx(0, abs=1e-12)
    assert not effects["b"].is_clear
    said = columns_in_words(list(effects.values()))
    assert said.startswith(
        "The columns that clearly matter are side and a: if the values of side are"
    )
    assert "No single column" in columns_in_words([effects["b"]])


def test_scores_are_rounded_to_two_digits_of_their_errors(targets):
    scores = {"rbf": normals(1e5 * targets, 64_805.0, 1e5)}
    shown = score_table(choose(["rbf"], scores), scores)
    assert shown.loc["rbf", ["typical error", "explained"]].tolist() == ["64920 ± 610", ""]


VOID = {"meta", "img", "source", "br", "hr", "link", "input"}

ODD = '<b>sex & "gender"</b>'


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)


@pytest.fixture(scope="module")
def html(report):
    return (report[0] / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_it_is_well_formed_and_asks_for_nothing(page, html):
    assert not page.open
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "base", "form", "a"}
    addresses = [
        value for _, attributes in page.tags for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data")
    ]  # fmt: skip
    assert len(addresses) == 4
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    text = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", html)
    assert len(text) < 30_000
    assert not re.search(r"url\(|@import|://", text)
    for address in addresses:
        with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
            assert image.width >= 1000


def test_names_of_the_table_are_text(page, html):
    assert ODD not in html
    assert "<i>f</i>" not in html
    assert "b" not in {tag for tag, _ in page.tags}
    assert ODD in page.texts
    assert any("levels: <i>f</i>, m" in text for text in page.texts)
    assert any("a <table> & more.csv has 130 rows." in text for text in page.texts)


def test_it_has_the_answer_the_table_and_how_it_was_made(page, record):
    text = " ".join(" ".join(page.texts).split())
    for name, scores in record["models"].items():
        assert name in page.texts
        assert f"{scores['lml']:.1f}" in page.texts
    for sentence in (*record["sentences"], *record["notes"]):
        assert " ".join(sentence.split()) in text
    assert record["command"] in text
    assert record["sha256"] in text
    for name, version in record["packages"].items():
        assert f"{name} {version}" in text
    assert "left out: the same value in all rows" in text  # clinic
    assert "left out: 103 different texts, more than 50" in text  # patient
    assert "gpclml fit" in text
    assert f"--model {record['recommended']}" in text
