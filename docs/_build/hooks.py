"""What the site is built with: formulas as MathML, which browsers draw without a script."""

from __future__ import annotations

import html
from typing import Any

import latex2mathml.converter

__all__ = ["on_config"]


def on_config(config: Any) -> Any:
    """Registers the formats of formulas; mkdocs calls it."""
    fence = {"name": "math", "class": "math", "format": _block}
    inline = {"name": "math", "class": "math", "format": _inline}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    config.mdx_configs.setdefault("pymdownx.inlinehilite", {})["custom_inline"] = [inline]
    return config


def _block(source: str, *args: Any, **kwargs: Any) -> str:
    return f'<div class="formula">{_mathml(source, "block")}</div>'


def _inline(source: str, *args: Any, **kwargs: Any) -> str:
    return _mathml(source, "inline")


def _mathml(source: str, display: str) -> str:
    try:
        return latex2mathml.converter.convert(source, display=display)
    except Exception as error:
        raise ValueError(f"this formula cannot be drawn: {html.escape(source)}") from error
