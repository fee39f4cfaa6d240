"""What the command writes to the terminal: results, notes, warnings, errors and exit codes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

_OF_PACKAGES = DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning


def printable(text: str) -> str:
    r"""The text in one line, in which controls are written as escapes such as ``\x1b``.

    What names of files and columns hold can so neither colour, move nor forge anything. Escaped are
    also marks that turn the direction of what follows, separators of lines, and surrogates, which
    stand for the bytes of a name that is not UTF-8.
    """
    return "".join(
        character if character.isprintable() or character == "\N{NO-BREAK SPACE}"
        else character.encode("unicode_escape").decode()
        for character in text
    )  # fmt: skip


def tell(*lines: str) -> None:
    """Prints notes, progress or errors on standard error."""
    for line in lines:
        typer.echo(printable(line), err=True)


def give(*lines: str) -> None:
    """Prints a result on standard output."""
    for line in lines:
        typer.echo(printable(line))


def shows_progress(quiet: bool) -> bool:
    """Whether to show progress bars: on a terminal, but not in a file or a pipe."""
    return not quiet and sys.stderr.isatty()


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collects the texts of warnings within the block in a list, which is filled when it ends.

    Warnings of packages about their own code, such as deprecations, are left out.
    """
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    ours = (warning for warning in caught if not issubclass(warning.category, _OF_PACKAGES))
    said += dict.fromkeys(str(warning.message) for warning in ours)


FAILED, BAD_INPUT, NOT_COMPUTED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes: a file could not be read or written, a package is missing, or memory ran out; the
input is wrong; a computation failed, for example because a covariance is not positive definite;
Ctrl-C."""


class FitError(RuntimeError):
    """A model could not be fitted, or none could be scored."""


@contextmanager
def errors_as_text() -> Iterator[None]:
    """Prints expected errors within the block on standard error, without a traceback.

    Raises:
        typer.Exit: With code 2 for wrong input, 3 if a computation fails, 1 if a file fails, a
            package is missing or memory runs out, 130 on Ctrl-C.
    """
    # Imported here so that the help of a command does not wait for torch.
    import torch
    from linear_operator.utils.errors import NanError, NotPSDError

    from gpclml.errors import ArgumentError, DataError, NotConvergedError

    singular = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
    codes = {  # failed computations come first: some of these types are argument errors as well
        NOT_COMPUTED: (FitError, NanError, NotPSDError, NotConvergedError, singular),
        BAD_INPUT: (ArgumentError, DataError),
        FAILED: (OSError, MemoryError, ImportError),
    }
    try:
        yield
    except KeyboardInterrupt:
        tell("", "Interrupted; nothing was written.")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of a pipe has closed it: typer ends quietly
        raise
    except Exception as error:
        code = next((code for code, kinds in codes.items() if isinstance(error, kinds)), None)
        if code is None:
            raise
        tell(f"Error: {error_text(error)}")
        raise typer.Exit(code) from None


def error_text(error: BaseException) -> str:
    """The message of an error with its notes and those of its cause, in one line."""
    causes = error, error.__cause__
    notes = [note for cause in causes for note in getattr(cause, "__notes__", ())]
    return " ".join(dict.fromkeys([str(error) or type(error).__name__, *notes]))
