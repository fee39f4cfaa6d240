"""The report of a comparison: scores, the choice, and the page, safe whatever a table says."""

import base64
import io
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from scipy.stats import norm

from gpclml.tables.comparing import answer, columns_in_words, figure, headline, score_table
from gpclml.tables.encoding import fit_inputs, kind_of
from gpclml.tables.fitting import normal_predictions
from gpclml.tables.methods import (
    PredictionScores,
    choose,
    clearly_smaller,
    column_effects,
    prediction_scores,
)


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


@pytest.fixture(scope="module")
def record(report):
    return json.loads((report[0] / "report.json").read_text(encoding="utf-8"))


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
