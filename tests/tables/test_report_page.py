"""The page of a report: whole in itself, and safe whatever the table says."""

from __future__ import annotations

import base64
import io
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from gpclml.tables.words import TEST_COLUMNS

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
    rest = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", html)
    assert len(rest) < 30_000
    assert not re.search(r"url\(|@import|://", rest)


def test_figures_are_images_with_a_sentence_each(page):
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert all(len(one["alt"]) > 60 for one in images)
    assert len({one["src"] for one in images}) == len(images)
    for one in images:
        with Image.open(io.BytesIO(base64.b64decode(one["src"].partition(",")[2]))) as image:
            assert image.format == "PNG"
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
        assert f"{scores['lml']:.1f}".replace("-", "\N{MINUS SIGN}") in page.texts
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


def test_the_answer_and_the_test_scores_come_first(page, html, record):
    name, count = record["recommended"], len(record["models"]) + len(record["others"])
    headings = [html.index(f"<h2>{title}") for title in (
        "How well", "Which columns", "What to know", "Use it", "For specialists", "How columns",
        "How this page",
    )]  # fmt: skip
    assert headings == sorted(headings)
    assert html.index(f"<h1>To predict progression, use {name}.</h1>") < headings[0]
    table = html[headings[0] : headings[1]]
    rows = re.findall("<tr>\\s*<th>(.*?)</th>", table)
    assert len(rows) == count
    assert rows[0] == name
    assert html.index('alt="Predictions of ') < headings[0]
    assert headings[4] < html.index("LOO less first")


def test_every_column_of_figures_has_a_key(html):
    """Terms of the lists of keys, and headers of the tables of figures."""
    keys = {text for part in html.split("<dl>")[1:] for text in re.findall("<dt>(.*?)</dt>", part)}
    tables = re.findall(
        r'<table class="dataframe numbers (?:tests|wide)">\s*<thead>(.*?)</thead>', html, re.S
    )
    headers = {text for head in tables for text in re.findall("<th>(.*?)</th>", head)}
    assert len(tables) == 2
    assert headers - {""} <= keys
    models = set(re.findall(r"<tr>\s*<th>(.*?)</th>", html.partition("<h2>Which")[0]))
    assert models <= keys


def test_columns_that_matter_are_listed_from_the_largest_effect_on(html, record):
    part = html.partition("<h2>Which columns matter")[2].partition("<h2>")[0]
    names = re.findall(r"<tr>\s*<th>(.*?)</th>", part)
    assert [unescape(name) for name in names] == [one["column"] for one in record["columns"]]
    rises = [one["rise"] for one in record["columns"]]
    assert rises == sorted(rises, reverse=True)


def test_it_reads_well_on_any_screen(page, html):
    metas = [attributes for tag, attributes in page.tags if tag == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    scrolled = [attributes for _, attributes in page.tags if attributes.get("class") == "scroll"]
    assert len(scrolled) == sum(tag == "table" for tag, _ in page.tags)
    assert html.count("<h1>") == 1


def test_the_guide_has_the_options_and_the_words_of_the_page(gpclml):
    guide = (Path(__file__).parents[2] / "docs" / "command.md").read_text(encoding="utf-8")
    known = " ".join(gpclml(name, "--help").stdout for name in ("compare", "fit", "predict"))
    options = set(re.findall(r"--[a-z][a-z-]+", guide))
    assert len(options) > 8
    assert {option for option in options if option not in known} == set()
    assert all(name in guide for name in TEST_COLUMNS)
