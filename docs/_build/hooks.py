"""What the site is built with: formulas as MathML, which browsers draw without a script."""

from __future__ import annotations

import html
import re
from typing import Any

import latex2mathml.converter

__all__ = ["on_config"]

# An operator's name, unless a bracket follows: browsers set no space after it.
_OPERATOR = re.compile(r"<mi>(?:log|exp|det)</mi>(?!<mo)")


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
        drawn = latex2mathml.converter.convert(source, display=display)
        return _OPERATOR.sub(r'\g<0><mspace width="0.17em"/>', drawn)
    except Exception as error:
        raise ValueError(f"this formula cannot be drawn: {html.escape(source)}") from error
