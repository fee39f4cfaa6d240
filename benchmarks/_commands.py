"""What command lines share: lists as text, devices, errors without a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpclml.errors import ArgumentError, DataError

__all__ = [
    "check_device",
    "errors_as_text",
    "listed",
    "names",
    "numbers",
    "refuse_options",
]


@contextlib.contextmanager
def errors_as_text() -> Iterator[None]:
    """Within the block an error that names its mend is printed alone, with exit code 2."""
    import typer

    try:
        yield
    except (ArgumentError, DataError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


def listed(text: str | None, read: Callable[..., tuple], *arguments: Any) -> tuple | None:
    """What a reader makes of a text; None for none."""
    return None if text is None else read(text, *arguments)


def names(text: str, argument: str) -> tuple[str, ...]:
    """The names in a comma-separated list, each once.

    Args:
        text: The list.
        argument: What it is an argument of, for the error.

    Raises:
        ArgumentError: There is none.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ArgumentError(argument, repr(text), "names separated by commas")
    return tuple(dict.fromkeys(found))


def numbers(text: str, argument: str, kind: type[int] | type[float]) -> tuple:
    """The numbers in a comma-separated list, each once.

    Args:
        text: The list.
        argument: What it is an argument of, for the error.
        kind: ``int`` or ``float``.

    Raises:
        ArgumentError: There is none, or something else among them.
    """
    try:
        return tuple(kind(name) for name in names(text, argument))
    except ValueError:
        what, such = ("whole numbers", "100,200") if kind is int else ("numbers", "0.1,0.5")
        expected = f"{what} separated by commas"
        raise ArgumentError(argument, repr(text), expected, f"Write e.g. {such}.") from None


def refuse_options(command: str, given: Mapping[str, object]) -> None:
    """Raises where options are given to what takes none.

    Args:
        command: What takes none.
        given: Options by name; None for those that are not given.

    Raises:
        ArgumentError: One is given.
    """
    for name, value in given.items():
        if value is not None:
            mend = f"Leave out --{name.replace('_', '-')}."
            raise ArgumentError(name, value, f"nothing: {command} has its own", mend)


def check_device(device: str) -> None:
    """Raises where torch cannot put a tensor.

    Args:
        device: Name of a device.

    Raises:
        ArgumentError: It is not at hand.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        mend = f"Use 'cpu'. ({reason})"
        raise ArgumentError("device", repr(device), "a device at hand", mend) from None
