"""What is packaged says one version and one list of requirements, and the sdist can test itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import gpclml

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def recipe() -> dict:
    return yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())


def requirement(text: str) -> tuple[str, str]:
    """Name and versions, names spelled alike."""
    name, versions = re.fullmatch(r"([\w-]+)\s*(.*)", text).groups()
    return name.lower().replace("_", "-"), versions


def test_every_file_says_the_version_of_the_package():
    assert pyproject()["tool"]["hatch"]["version"]["path"] == "gpclml/__init__.py"
    assert "version" in pyproject()["project"]["dynamic"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == gpclml.__version__
    assert recipe()["context"]["version"] == gpclml.__version__


def test_the_conda_recipe_asks_for_what_the_package_asks_for():
    project = pyproject()["project"]
    tables = project["optional-dependencies"]["tables"]  # conda has no extras
    wanted = dict(map(requirement, [*project["dependencies"], *tables]))
    wanted = {CONDA_NAMES.get(name, name): versions for name, versions in wanted.items()}
    wanted["python"] = project["requires-python"]
    assert dict(map(requirement, recipe()["requirements"]["run"])) == wanted


def test_the_conda_recipe_builds_what_the_package_says():
    project, built = pyproject(), recipe()
    host = dict(map(requirement, built["requirements"]["host"]))
    (backend,) = map(requirement, project["build-system"]["requires"])
    assert host[backend[0]] == backend[1]
    scripts = [f"{name} = {target}" for name, target in project["project"]["scripts"].items()]
    assert built["build"]["python"]["entry_points"] == scripts
    assert built["about"]["summary"] == project["project"]["description"]
    assert built["about"]["license"] == project["project"]["license"]


@pytest.mark.parametrize(
    "name", ["Makefile", "constraints.txt", "mkdocs.yml", "CITATION.cff", ".ci/run", "conda"]
)
def test_the_sdist_has_what_make_test_needs(name):
    included = pyproject()["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert f"/{name.split('/')[0]}" in included
    assert (ROOT / name).exists()


def test_continuous_integration_runs_every_version_that_is_supported():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    runs = jobs["range"]["strategy"]["matrix"]["include"]
    oldest = pyproject()["project"]["requires-python"].removeprefix(">=")
    pythons = {run["python"] for run in runs}
    assert oldest in pythons
    assert len(pythons) >= 3
    lower = dict(map(requirement, pyproject()["project"]["dependencies"]))
    pinned = next(run["packages"] for run in runs if run["python"] == oldest)
    for package in pinned.split():
        name, version = package.split("==")
        assert lower[name] == f">={version.removesuffix('.*')}"
