"""What the command writes to the terminal: results, notes, warnings, errors and exit codes."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from gpclml._utils.files import printable

__all__ = [
    "BAD_INPUT",
    "FAILED",
    "INTERRUPTED",
    "NOT_COMPUTED",
    "FitError",
    "error_text",
    "errors_as_text",
    "give",
    "shows_progress",
    "tell",
    "warned",
]


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


def shows_progress(quiet: bool) -> bool:
    """Whether someone looks on: bars are for a terminal, and litter a file or a pipe.

    Args:
        quiet: Whether nothing is to be told.
    """
    return not quiet and sys.stderr.isatty()


@contextmanager
def warned() -> Iterator[list[str]]:
    """Gives a list that is filled, when the block ends, with what it warned of, each text once.

    Warnings of packages about their own code are left out.
    """
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    told = (one for one in caught if not issubclass(one.category, _OF_PACKAGES))
    said += dict.fromkeys(str(one.message) for one in told)


_OF_PACKAGES = DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning


FAILED, BAD_INPUT, NOT_COMPUTED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes: a file, the memory or the system failed; something is given wrong; a computation
failed, such as a covariance that is not positive definite; Ctrl-C."""


class FitError(RuntimeError):
    """A model could not be fitted, or none could be scored."""


@contextlib.contextmanager
def errors_as_text() -> Iterator[None]:
    """Within the block an expected error is printed alone, with its notes, on standard error.

    Raises:
        typer.Exit: With code 2 for what is given wrong, 3 for a computation that fails, 1 for a
            file or the memory, 130 on Ctrl-C.
    """
    # A command's help need not wait for torch.
    import torch
    import typer
    from linear_operator.utils.errors import NanError, NotPSDError

    from gpclml.errors import ArgumentError, DataError, NotConvergedError

    singular = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    except KeyboardInterrupt:
        tell("", "Interrupted; nothing was written.")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # who reads the output has read enough: typer ends quietly
        raise
    # First what a computation ends with: some of these are errors of an argument as well.
    except (FitError, NanError, NotPSDError, NotConvergedError, singular) as error:
        tell(f"Error: {error_text(error)}")
        raise typer.Exit(NOT_COMPUTED) from None
    except (ArgumentError, DataError) as error:
        tell(f"Error: {error_text(error)}")
        raise typer.Exit(BAD_INPUT) from None
    except (OSError, MemoryError) as error:
        tell(f"Error: {error_text(error)}")
        raise typer.Exit(FAILED) from None


def error_text(error: BaseException) -> str:
    """What an error says, with its notes and those of the error that caused it, in one line.

    Args:
        error: Any; its type stands for what says nothing.
    """
    parts = [str(error) or type(error).__name__]
    for one in (error, error.__cause__):
        parts += getattr(one, "__notes__", ())
    return " ".join(dict.fromkeys(parts))
