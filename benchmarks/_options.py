"""Options of commands: their types, lists as text, checks, and functions that take them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from gpclml.errors import ArgumentError, DataError, UnknownNameError

ResultsFile = Annotated[Path, typer.Option("--results", help="The SQLite file of results.")]
Csv = Annotated[Path | None, typer.Option(help="Write the table there as well.")]
CsvFile = Annotated[
    Path | None, typer.Option(help="Also write all cells to this CSV file; compressed as .csv.gz.")
]
FigureFile = Annotated[Path | None, typer.Option(help="Also draw a figure in this PNG file.")]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        help="The data folder, on every machine; else $GPCLML_DATA, else the user's cache."
    ),
]
Device = Annotated[str, typer.Option(help="Where models are trained: cpu, cuda.")]

_INFOS = (typer.models.OptionInfo, typer.models.ArgumentInfo)


@contextlib.contextmanager
def errors_as_text() -> Iterator[None]:
    """Within the block an error that says what to do is printed alone, with exit code 2."""
    try:
        yield
    except (ArgumentError, DataError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


def names(text: str, argument: str) -> tuple[str, ...]:
    """The names in a comma-separated list, each once.

    Raises:
        ArgumentError: There is none.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ArgumentError(argument, repr(text), "names separated by commas")
    return tuple(dict.fromkeys(words))


def whole_numbers(text: str, argument: str) -> tuple[int, ...]:
    """The same of whole numbers."""
    return _numbers(text, argument, int, "whole numbers", "100,200")


def real_numbers(text: str, argument: str) -> tuple[float, ...]:
    """The same of numbers."""
    return _numbers(text, argument, float, "numbers", "0.1,0.5")


def _numbers(text: str, argument: str, kind: type, what: str, such: str) -> tuple:
    try:
        return tuple(kind(name) for name in names(text, argument))
    except ValueError:
        expected = f"{what} separated by commas"
        raise ArgumentError(argument, repr(text), expected, f"Write e.g. {such}.") from None


def check_known(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises :class:`gpclml.errors.UnknownNameError` where a name is not among the known ones."""
    for name in given:
        if name not in known:
            raise UnknownNameError(argument, name, known)


def check_positive(**numbers: float) -> None:
    """Raises :class:`gpclml.errors.ArgumentError` where a count is below 1, a rate not positive."""
    for name, number in numbers.items():
        if isinstance(number, int) and number < 1:
            raise ArgumentError(name, number, "at least 1")
        if not 0 < number < float("inf"):
            raise ArgumentError(name, number, "a positive number")


def check_device(device: str) -> None:
    """Raises :class:`gpclml.errors.ArgumentError` where torch cannot put a tensor."""
    import torch

    try:
        # Only torch knows which devices it was built for.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        fix = f"Use 'cpu'. ({reason})"
        raise ArgumentError("device", repr(device), "a device at hand", fix) from None


def options_of(function: Callable | None) -> dict[str, Parameter]:
    """Arguments of a function that are options of a command, by name."""
    if function is None:
        return {}
    hints = get_type_hints(function, include_extras=True)
    return {
        name: parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
        for name, parameter in signature(function).parameters.items()
        # Arguments without an option are those of callers in Python.
        if any(isinstance(entry, _INFOS) for entry in get_args(hints.get(name)))
    }


def _reader(parameter: Parameter) -> Callable | None:
    return next((entry for entry in get_args(parameter.annotation)[1:] if callable(entry)), None)


def read_options(function: Callable | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, lists read."""
    values = dict(options)
    for name, parameter in options_of(function).items():
        read = _reader(parameter)
        if read is not None and values[name] is not None:
            values[name] = read(values[name], name)
    return values


def extend_options(
    command: Callable, parameters: Iterable[Parameter], left_out: Sequence[str] = ()
) -> Callable:
    """The command with further options before its own, in the place of its ``**options``.

    Args:
        command: The command.
        parameters: From :func:`options_of`; what has a reader is taken as text.
        left_out: Its own options that it shall not have.
    """
    hints = get_type_hints(command, include_extras=True)
    own_options = [
        parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
        for name, parameter in signature(command).parameters.items()
        if name != "options" and name not in left_out
    ]
    every = [*map(_text_option, parameters), *own_options]
    command.__signature__ = Signature(every)
    command.__annotations__ = {option.name: option.annotation for option in every}
    return command


def _text_option(parameter: Parameter) -> Parameter:
    """A list as the text that a command takes."""
    if _reader(parameter) is None:
        return parameter
    info = next(entry for entry in get_args(parameter.annotation) if isinstance(entry, _INFOS))
    default = parameter.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    kind = str | None if default is None else str
    return parameter.replace(annotation=Annotated[kind, info], default=default)
