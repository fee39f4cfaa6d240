"""Docstrings of the code, whose formulas and references are in Sphinx's notation, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["SphinxNotation", "as_markdown"]

_BLOCK = re.compile(r"^(?P<indent> *)\.\. math::(?P<rest>.*(?:\n(?P=indent) +\S.*)*)", re.MULTILINE)
_INLINE = re.compile(r":math:`([^`]+)`")
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`(?P<short>~?)(?P<path>[^`]+)`")
_CODE = re.compile(r"(?<!`)``(?!`)")
_OTHERS = re.compile(r"``(?P<path>(?:gpytorch|botorch|linear_operator|torch)(?:\.\w+)+)``")
_OPTIONAL = '<autoref identifier="{path}" optional><code>{name}</code></autoref>'


def as_markdown(text: str) -> str:
    """A docstring with formulas as fences and inline code of kind ``math``, and links.

    Args:
        text: With ``.. math::``, ``:math:`` and roles such as ``:func:``.
    """
    text = _BLOCK.sub(_fence, text)
    text = _INLINE.sub(lambda match: f"`#!math {' '.join(match[1].split())}`", text)
    text = _OTHERS.sub(lambda match: _OPTIONAL.format(path=match["path"], name=match["path"]), text)
    return _CODE.sub("`", _ROLE.sub(_link, text))


def _fence(match: re.Match[str]) -> str:
    indent = match["indent"]
    lines = [line.strip() for line in match["rest"].strip().splitlines()]
    return "\n".join(["", f"{indent}```math", *(indent + line for line in lines), f"{indent}```"])


def _link(match: re.Match[str]) -> str:
    path = match["path"]
    name = path.rsplit(".", 1)[-1] if match["short"] else path
    if path.startswith("gpclml"):
        return f"[`{name}`][{path}]"
    return _OPTIONAL.format(path=path, name=name)


class SphinxNotation(griffe.Extension):
    """Rewrites every docstring when it is collected."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
