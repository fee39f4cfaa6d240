"""Text of others as it may be shown on a terminal."""

from __future__ import annotations

import re

__all__ = ["printable"]

# Controls (also those above ASCII), marks that turn the direction of what follows, separators of
# lines, and surrogates, which stand for the bytes of a name that is not UTF-8.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""The text in one line, in which controls are written as escapes such as ``\x1b``.

    What names of files and columns hold can so neither colour, move nor forge anything.

    Args:
        text: Any.

    Examples:
        >>> from gpclml._utils.printable import printable
        >>> printable("price\x1b[31m\n")
        'price\\x1b[31m\\n'
    """
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"  # the byte itself
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
