"""A module whose name begins with an underscore is imported by its own package alone."""

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
