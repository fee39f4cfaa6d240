"""Python's own prompt, into which the code of pages and docstrings is pasted."""

from __future__ import annotations

import codeop
from types import CodeType
from typing import Any


def statements(text: str) -> list[CodeType]:
    """What the prompt runs one after the other, of lines that are followed by an empty one.

    An indented block ends at an empty line: one within it is a SyntaxError, as is a line without
    indentation that follows the block directly.
    """
    compiled, pending = [], ""
    for line in [*text.splitlines(), ""]:
        pending += line
        statement = codeop.compile_command(pending, "<stdin>", "single")
        if statement is None:
            pending += "\n"
        else:
            compiled.append(statement)
            pending = ""
    assert not pending, text
    return compiled


def paste(text: str, names: dict[str, Any]) -> None:
    """Runs lines as the prompt does, which prints the values of expressions."""
    for statement in statements(text):
        exec(statement, names)
