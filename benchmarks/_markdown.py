"""Tables and sections of a report as GitHub writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

__all__ = ["code", "section", "table"]


def table(frame: pandas.DataFrame) -> str:
    """A data frame as a Markdown table: its index as the first columns, numbers to the right.

    Args:
        frame: The table; each level of its index has a name.
    """
    rows = [tuple(map(_text, row)) for row in frame.reset_index().itertuples(index=False)]
    heads = [_text(name) for name in (*frame.index.names, *frame.columns)]
    marks = ["---"] * frame.index.nlevels + ["---:"] * len(frame.columns)
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, marks, *rows])


def section(heading: str, *paragraphs: str) -> str:
    """A heading and what stands below it."""
    return "\n\n".join([f"## {heading}", *paragraphs])


def code(lines: list[str]) -> str:
    """Lines shown as they are."""
    return "\n".join(["```", *lines, "```"])


def _text(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
