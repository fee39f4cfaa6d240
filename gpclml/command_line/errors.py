"""Errors of commands as text, with exit codes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "FitError", "errors_as_text"]

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit codes: something failed on the way, nothing could start, Ctrl-C."""


class FitError(RuntimeError):
    """A model could not be fitted."""


@contextlib.contextmanager
def errors_as_text() -> Iterator[None]:
    """Within the block an error that names its mend is printed alone, on standard error.

    Raises:
        typer.Exit: With code 2 for what is given wrong, 1 for what fails on the way, 130 on Ctrl-C.
    """
    import typer

    # Imports torch, for which a command's help need not wait.
    from linear_operator.utils.errors import NanError, NotPSDError

    from gpclml.errors import ArgumentError, DataError

    try:
        yield
    except KeyboardInterrupt:
        typer.echo("\nInterrupted; nothing was written.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (ArgumentError, DataError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    except BrokenPipeError:  # who reads the output has read enough: typer ends quietly
        raise
    except (FitError, NanError, NotPSDError, OSError, MemoryError) as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        typer.echo(f"Error: {str(error) or type(error).__name__} {notes}".rstrip(), err=True)
        raise typer.Exit(FAILED) from None
