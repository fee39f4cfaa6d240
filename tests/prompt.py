"""Python's own prompt, into which the code of pages and docstrings is pasted."""

from __future__ import annotations

import code
from typing import Any

__all__ = ["paste"]


class _Prompt(code.InteractiveConsole):
    """A prompt at which errors are raised."""

    def showtraceback(self) -> None:
        raise

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        raise


def paste(text: str, names: dict[str, Any]) -> None:
    """Enters a text line by line, with a last empty line; lines run one after the other.

    An indented block ends at an empty line, as at the prompt: one within it is an error, and so is
    a line without indentation that follows it directly.

    Args:
        text: Lines of code.
        names: What the code sees, and where its names go.
    """
    prompt = _Prompt(names)
    for line in [*text.splitlines(), ""]:
        is_open = prompt.push(line)
    assert not is_open, text
