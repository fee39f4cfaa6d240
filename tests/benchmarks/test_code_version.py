import functools
import importlib
import sys

import grid_cells
import pytest

from benchmarks.runner.code import (
    OtherCodeError,
    check_code,
    code_version,
    function_name,
    package_versions,
)
from gpclml.errors import ArgumentError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a cell function, a table and a report, importable during a test."""
    folder = tmp_path / "some_benchmark"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    text = "def cell(c):\n    return {}\n\ndef other(c):\n    return {}\n"
    (folder / "cells.py").write_text(text)
    (folder / "model.py").write_text("A = 1\n")
    (folder / "report.py").write_text("B = 1\n")
    (folder / "splits.csv").write_text("1,2\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("some_benchmark")]:
        del sys.modules[name]


def version(*sources, name="cell"):
    cells = importlib.import_module("some_benchmark.cells")
    return code_version(getattr(cells, name), sources)


@pytest.mark.parametrize(
    ("sources", "file", "changes"),
    [
        ((), "cells.py", True),
        ((), "model.py", False),
        ((), "report.py", False),
        (("some_benchmark.model",), "model.py", True),
        (("some_benchmark.model",), "report.py", False),
        (("some_benchmark",), "report.py", True),
        (("some_benchmark",), "splits.csv", True),
    ],
)
def test_only_named_sources_count(package, sources, file, changes):
    before = version(*sources)
    more = "3,4\n" if file.endswith(".csv") else "C = 1\n"
    (package / file).write_text((package / file).read_text() + more)
    assert (version(*sources) != before) == changes


def test_new_and_renamed_files_count(package):
    first = version("some_benchmark")
    (package / "more.py").write_text("")
    second = version("some_benchmark")
    (package / "more.py").rename(package / "less.py")
    assert len({first, second, version("some_benchmark")}) == 3


def test_library_counts(package, monkeypatch, tmp_path):
    before = version()
    copy = tmp_path / "gpclml"
    copy.mkdir()
    (copy / "__init__.py").write_text("")
    library = sys.modules.pop("gpclml")
    try:
        assert version() != before
    finally:
        sys.modules["gpclml"] = library
    assert version() == before


DOCUMENTED = '''"""A module."""


def cell(
    c,  # a configuration
):
    """Says what it does."""
    return {}


class Kept:
    """Has a docstring."""

    A = 1
    """So has an attribute."""
'''
PLAIN = "def cell(c):\n  return {}\n\nclass Kept:\n  A = 1\n"


def test_docstrings_comments_and_layout_do_not_count(package):
    (package / "cells.py").write_text(DOCUMENTED)
    before = version()
    (package / "cells.py").write_text(PLAIN)
    assert version() == before


@pytest.mark.parametrize(
    ("old", "new"),
    [("{}", "{'a': 1}"), ("A = 1", "A = 1.0"), ("A = 1", "A = None"), ("c):", "c, d=1):"),
     ("A = 1", "A = '1'"), ("Kept:", "Kept(int):"), ("A = 1", "A: int = 1")],
)  # fmt: skip
def test_a_change_of_the_code_counts(package, old, new):
    (package / "cells.py").write_text(PLAIN)
    before = version()
    assert old in PLAIN
    (package / "cells.py").write_text(PLAIN.replace(old, new))
    assert version() != before


def test_line_ends_do_not_count(package):
    before = version()
    text = (package / "cells.py").read_bytes()
    (package / "cells.py").write_bytes(text.replace(b"\n", b"\r\n"))
    assert version() == before


def test_an_edit_is_not_seen_by_a_worker_that_may_have_imported_the_file(package):
    cells = importlib.import_module("some_benchmark.cells")
    driver = {"code": version("some_benchmark.model"), **package_versions()}
    check_code(cells.cell, ["some_benchmark.model"], driver)
    (package / "model.py").write_text("A = 2\n")
    check_code(cells.cell, ["some_benchmark.model"], driver)
    edited = {**driver, "code": version("some_benchmark.model")}
    with pytest.raises(OtherCodeError, match="restart its workers"):
        check_code(cells.cell, ["some_benchmark.model"], edited)


def test_functions_of_one_module_differ(package):
    assert version(name="cell") != version(name="other")


@pytest.mark.parametrize("source", ["no_such_module", "gpclml.no_such", "sys", ".relative"])
def test_unknown_module_is_refused(source):
    with pytest.raises(ArgumentError, match="sources"):
        code_version(grid_cells.cholesky_cell, (source,))


def _in_main(cell):
    return {}


_in_main.__module__ = "__main__"


def _hidden(cell):
    return {}


@pytest.mark.parametrize(
    "function",
    [
        lambda cell: {},
        functools.partial(grid_cells.cholesky_cell),
        _in_main,
        functools.wraps(_hidden)(lambda cell: {}),
    ],
)
def test_functions_out_of_reach_are_refused(function):
    with pytest.raises(ArgumentError, match="import"):
        function_name(function)


def test_versions_are_those_installed():
    import torch

    versions = package_versions()
    assert set(versions) == {"python", "gpclml", "torch", "gpytorch", "botorch"}
    assert versions["torch"] == torch.__version__
