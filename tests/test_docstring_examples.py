"""Examples in docstrings run alone, as pasted, and give what they show."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest
from prompt import paste

import gpclml

MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(gpclml.__path__, "gpclml.")
    if not module.name.endswith("__main__")
]
EXAMPLES = [
    test
    for module in MODULES
    for test in doctest.DocTestFinder(exclude_empty=True).find(module)
    if test.examples
]


@pytest.mark.slow
@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_an_example_runs_alone(test, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    if "psis_loo" in test.name:
        pytest.importorskip("arviz_stats")
    names: dict = {}
    for example in test.examples:
        capsys.readouterr()
        paste(example.source, names)
        if example.want:
            assert capsys.readouterr().out == example.want


@pytest.mark.parametrize("name", gpclml.__all__)
def test_a_top_level_name_has_an_example(name):
    assert doctest.DocTestParser().get_examples(inspect.getdoc(getattr(gpclml, name)) or "")
