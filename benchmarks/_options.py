"""Options that every ``run`` and ``report`` command has, and how a run ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from benchmarks.runner import GridSummary

__all__ = [
    "Address",
    "Backend",
    "CsvFile",
    "DataFolder",
    "Device",
    "Jobs",
    "Quiet",
    "ResultsFile",
    "RetryFailed",
    "data_variables",
    "end_run",
    "make_app",
]

ResultsFile = Annotated[Path, typer.Option("--results", help="The SQLite file of results.")]
CsvFile = Annotated[
    Path | None,
    typer.Option(help="Also write all cells to this CSV file; compressed as .csv.gz."),
]
Jobs = Annotated[int, typer.Option(help="Worker processes; -1 for one a core.")]
Backend = Annotated[str, typer.Option(help="Where several workers are: loky (this machine), dask.")]
Address = Annotated[
    str | None,
    typer.Option(help="Address of a running cluster; else one is started on this machine."),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        help="The data folder, on every machine; else $GPCLML_DATA, else the user's cache."
    ),
]
Device = Annotated[str, typer.Option(help="Where models are trained: cpu, cuda.")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Compute failed cells again.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no summary.")]


def make_app(about: str) -> typer.Typer:
    """A command line without commands yet.

    Args:
        about: Its help.
    """
    return typer.Typer(
        add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
        rich_markup_mode=None, help=about,
    )  # fmt: skip


def data_variables(folder: Path | None) -> dict[str, str]:
    """Environment variables of workers that read data from a folder.

    Args:
        folder: The folder; None for that of this process.
    """
    return {} if folder is None else {"GPCLML_DATA": str(folder.absolute())}


def end_run(*summaries: GridSummary, quiet: bool) -> None:
    """Says what a run computed.

    Args:
        *summaries: Of its sweeps.
        quiet: Whether only failures are told.

    Raises:
        typer.Exit: With code 1, if cells failed.
    """
    if not quiet:
        for summary in summaries:
            typer.echo(summary)
    failed = sum(summary.failed + summary.failed_before for summary in summaries)
    if failed:
        typer.echo(f"{failed} cells failed: the report lists them.", err=True)
        raise typer.Exit(1)
