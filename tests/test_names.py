"""What ``import gpclml`` offers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gpclml


def names_by_room() -> dict[str, str]:
    """The imports that type checkers see."""
    tree = ast.parse(Path(gpclml.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_the_names_are_those_of_their_rooms():
    rooms = names_by_room()
    assert sorted(rooms) == sorted(gpclml.__all__)
    assert set(gpclml.__all__) < set(dir(gpclml))
    for name, room in rooms.items():
        assert getattr(gpclml, name) is getattr(importlib.import_module(room), name), name


def test_importing_the_package_imports_nothing_else():
    code = "import gpclml, sys; print('torch' in sys.modules, gpclml.RandomHoldout.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "RandomHoldout"]


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'clml'"):
        gpclml.clml  # noqa: B018
