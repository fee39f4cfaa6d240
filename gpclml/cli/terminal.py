"""What the command says: all of it goes through here."""

from __future__ import annotations

import typer

from gpclml._utils.files import printable

__all__ = ["give", "tell"]


def tell(*lines: str) -> None:
    """Says something on standard error: notes, progress, errors.

    Args:
        *lines: One or more lines; controls in them are shown as escapes.
    """
    for line in lines:
        typer.echo(printable(line), err=True)


def give(*lines: str) -> None:
    """Prints a result on standard output.

    Args:
        *lines: One or more lines; controls in them are shown as escapes.
    """
    for line in lines:
        typer.echo(printable(line))
