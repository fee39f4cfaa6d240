"""What the site is built from: names of other projects exist, and each package has a page."""

import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import gpclml

ROOT = Path(__file__).parents[1]
DESCRIBED = {
    package: page.name
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for package in re.findall(r"^::: (gpclml\.[\w.]+)$", page.read_text(), re.MULTILINE)
}


def test_the_readme_says_first_what_this_is_and_folds_nothing():
    """The same sentence opens the site and describes the package and its citation."""
    text = (ROOT / "README.md").read_text()
    paragraphs = [line for line in text.splitlines() if line and not line.startswith("#")]
    sentence = paragraphs[0].removesuffix(".")
    assert sentence.startswith("Kernel learning on GPyTorch")
    assert "<details" not in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["description"] == sentence
    for name in ("docs/index.md", "CITATION.cff", "mkdocs.yml", "conda/recipe.yaml"):
        assert sentence in (ROOT / name).read_text(), name


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    for link in links:
        name, _, anchor = link.partition("#")
        assert (ROOT / name).exists(), link
        if anchor:  # as GitHub makes them of headings
            headings = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
            assert anchor in slugs, link


def test_objects_of_other_projects_exist():
    projects = tomllib.loads((ROOT / "docs" / "_build" / "objects.toml").read_text())
    names = [name for pages in projects.values() for listed in pages.values() for name in listed]
    assert len(names) == len(set(names)) > 50
    for name in names:
        package, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(package), last), name


def test_every_public_name_is_in_the_reference():
    for name in gpclml.__all__:
        package = ".".join(getattr(gpclml, name).__module__.split(".")[:2])
        assert package in DESCRIBED, name
        assert name in importlib.import_module(package).__all__, name
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"reference/{page}" in navigation for page in DESCRIBED.values())


@pytest.mark.parametrize("package", sorted(DESCRIBED))
def test_every_described_name_begins_with_one_sentence(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        described = getattr(module, name)
        if inspect.isclass(described) or inspect.isroutine(described):
            first = " ".join((inspect.getdoc(described) or "").split("\n\n")[0].split())
            assert first.endswith("."), f"{package}.{name}: {first}"
