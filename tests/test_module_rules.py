"""Rules for modules: what they may import, what ``import gpclml`` offers, names of test files."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gpclml

ROOT = Path(gpclml.__file__).parent


def imports(path: Path) -> list[tuple[str, ...]]:
    """What a file imports, each as the names on the way to it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return [
        *((alias.name,) for n in nodes if isinstance(n, ast.Import) for alias in n.names),
        *(
            (*(n.module or "").split("."), alias.name)
            for n in nodes
            if isinstance(n, ast.ImportFrom)
            for alias in n.names
        ),
    ]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path)[-30:])
def test_imports_are_of_public_modules_that_are_installed(path):
    package = ("gpclml", *path.relative_to(ROOT).parent.parts)
    for names in imports(path):
        assert names[0].partition(".")[0] not in {"PIL", "benchmarks", "pooch", "requests"}
        for depth, name in enumerate(names[:-1]):
            if names[0] == "gpclml" and name.startswith("_") and name != "_utils":
                assert package[:depth] == names[:depth], ".".join(names)


def test_the_names_are_those_of_their_rooms():
    tree = ast.parse(Path(gpclml.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]  # for type checkers
    rooms = {
        alias.name: node.module or ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(rooms) == sorted(gpclml.__all__)
    assert set(gpclml.__all__) < set(dir(gpclml))
    for name, room in rooms.items():
        assert getattr(gpclml, name) is getattr(importlib.import_module(room), name), name
    with pytest.raises(AttributeError, match="no attribute 'clml'"):
        gpclml.clml  # noqa: B018


@pytest.mark.slow
def test_importing_the_package_imports_nothing_else():
    code = "import gpclml, sys; print('torch' in sys.modules, gpclml.RandomHoldout.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "RandomHoldout"]


def test_test_files_have_names_of_their_own():
    """Pytest imports them by name alone, so that two of one name cannot be collected together."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names))
