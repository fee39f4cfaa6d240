"""What the site is built with: formulas as MathML, and a check of how examples are rendered."""

from __future__ import annotations

import html
import re
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError

__all__ = [
    "on_config", "on_page_content", "on_page_markdown", "on_post_build", "unrendered_examples",
]  # fmt: skip

# Markdown reads ">>> " outside a code block as a quotation in a quotation in a quotation.
_QUOTED = re.compile(r"<blockquote>\s*<blockquote>")
_PROMPT = re.compile(r"&gt;&gt;&gt;|>>>")
_HIGHLIGHTED_PROMPT = re.compile(r'<span class="gp">(?:&gt;&gt;&gt;|>>>)')
_FIRST_PROMPT = '<code><span class="gp">'
_FEWEST_EXAMPLES = 20
_blocks_of_pages: dict[str, int] = {}

# What mkdocs-gallery puts above the title, of a link that is at the end of each page too.
_DOWNLOAD = re.compile(r"^!!! note\n\n +Click \[here\].*\n +to download.*\n", re.MULTILINE)

# An operator's name, unless a bracket follows: browsers set no space after it.
_OPERATOR = re.compile(r"<mi>(?:log|exp|det)</mi>(?!<mo)")


def on_config(config: Any) -> Any:
    """Registers the formats of formulas; mkdocs calls it."""
    fence = {"name": "math", "class": "math", "format": _block}
    inline = {"name": "math", "class": "math", "format": _inline}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    config.mdx_configs.setdefault("pymdownx.inlinehilite", {})["custom_inline"] = [inline]
    return config


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Begins a page of the gallery with its title; mkdocs calls it."""
    return _DOWNLOAD.sub("", markdown) if page.file.src_uri.startswith("generated/") else markdown


def on_page_content(html: str, page: Any, **kwargs: Any) -> None:
    """Refuses a page whose examples are not code blocks; mkdocs calls it."""
    wrong = unrendered_examples(html)
    if wrong:
        raise PluginError(
            f"{page.file.src_uri}: {wrong} examples are not code blocks. Write them under "
            "'Examples:' in a docstring; 'Example:' is read as a plain paragraph."
        )
    _blocks_of_pages[page.file.src_uri] = html.count(_FIRST_PROMPT)


def on_post_build(**kwargs: Any) -> None:
    """Refuses a site with few examples; mkdocs calls it."""
    found = sum(_blocks_of_pages.values())
    if found < _FEWEST_EXAMPLES:
        raise PluginError(f"{found} examples are code blocks, expected {_FEWEST_EXAMPLES} or more.")


def unrendered_examples(page: str) -> int:
    """How many examples of a page are quotations or plain text in place of highlighted code.

    Args:
        page: Its HTML.
    """
    prompts, highlighted = _PROMPT.findall(page), _HIGHLIGHTED_PROMPT.findall(page)
    return len(_QUOTED.findall(page)) + len(prompts) - len(highlighted)


def _block(source: str, *args: Any, **kwargs: Any) -> str:
    return f'<div class="formula">{_mathml(source, "block")}</div>'


def _inline(source: str, *args: Any, **kwargs: Any) -> str:
    return _mathml(source, "inline")


def _mathml(source: str, display: str) -> str:
    try:
        drawn = latex2mathml.converter.convert(source, display=display)
        return _OPERATOR.sub(r'\g<0><mspace width="0.17em"/>', drawn)
    except Exception as error:
        raise ValueError(f"this formula cannot be drawn: {html.escape(source)}") from error
