"""Rules for modules: who may import a private one, and how long a file may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gpclml

SHARED = {"_utils"}
MOST_LINES = 450


def test_no_private_module_is_imported_from_another_package():
    root = Path(gpclml.__file__).parent
    wrong = []
    for path in root.rglob("*.py"):
        package = ("gpclml", *path.relative_to(root).parent.parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            for alias in node.names:
                parts = (*node.module.split("."), alias.name)
                for depth, part in enumerate(parts[:-1]):
                    private = part.startswith("_") and part not in SHARED
                    if parts[0] == "gpclml" and private and package[:depth] != parts[:depth]:
                        wrong.append(f"{path.relative_to(root)}: {'.'.join(parts)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["gpclml", "tests", "benchmarks"])
def test_no_file_is_longer_than_its_topic_needs(folder):
    root = Path(gpclml.__file__).parents[1] / folder
    lengths = {str(path): len(path.read_text().splitlines()) for path in root.rglob("*.py")}
    assert lengths
    assert not {path: lines for path, lines in lengths.items() if lines > MOST_LINES}


def test_test_files_have_names_of_their_own():
    """Pytest imports them by name alone, so that two of one name cannot be collected together."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_every_seed_may_be_an_integer_of_numpy():
    """PyTorch's generators take those of Python alone, so one function converts them."""
    allowed = {"manual_seed(0)", "manual_seed(int("}
    for path in Path(gpclml.__file__).parent.rglob("*.py"):
        for line in path.read_text().splitlines():
            if ".manual_seed(" in line and ">>>" not in line and path.parent.name != "_utils":
                assert any(one in line for one in allowed), f"{path}: {line.strip()}"
