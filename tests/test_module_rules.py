"""Rules for modules: what they may import, and what their tests are called."""

from __future__ import annotations

import ast
from pathlib import Path

import gpclml

SHARED = {"_utils"}


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


def test_the_library_imports_nothing_that_only_the_benchmarks_have():
    for path in Path(gpclml.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            packages = {name.partition(".")[0] for name in names}
            assert not packages & {"PIL", "benchmarks", "pooch", "requests"}, path


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
