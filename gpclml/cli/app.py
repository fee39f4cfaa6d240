"""The commands and their options."""

from __future__ import annotations

import io
import sys
import traceback
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpclml.cli.errors import errors_as_text
from gpclml.cli.terminal import tell

if TYPE_CHECKING:
    from gpclml.cli.options import TableOptions

__all__ = ["app", "main"]

_HELP = (
    "Gaussian processes of a table: compare models, fit one, predict with it. Tables are CSV (any "
    "of the separators comma, semicolon, tab, bar) or Parquet. Exit codes: 0 done, 2 something is "
    "given wrong, 3 a computation failed, 1 a file or the memory failed, 130 Ctrl-C."
)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode=None, help=_HELP,
)  # fmt: skip

_OF_OUT = (
    "Replaced are files that this command wrote there, if they have not been changed since; all "
    "others stay."
)

Table = Annotated[Path, typer.Argument(help="The table: a CSV or Parquet file.")]
Target = Annotated[str, typer.Option(help="The column to predict.")]
Objective = Annotated[
    str,
    typer.Option(
        help="What fits maximize: lml (log marginal likelihood: the first choice for a table), "
        "clml (conditional: ten folds), loo (leave-one-out)."
    ),
]
Rows = Annotated[
    int, typer.Option(min=20, help="Rows to train on, at most; random ones where there are more.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of rows, starts and networks.")]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Most steps of a fit. If not given as many as it takes, for sm 50, for deep 300."
    ),
]
Restarts = Annotated[int, typer.Option(help="Further fits from other starts, not of deep.")]
Drop = Annotated[list[str] | None, typer.Option(help="A column to leave out; may be repeated.")]
Categories = Annotated[
    list[str] | None,
    typer.Option(help="A column whose values are categories, also if numbers; may be repeated."),
]
Missing = Annotated[
    list[str] | None,
    typer.Option(help="A text that stands for a missing value, such as ?; may be repeated."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no notes.")]


@app.command()
def compare(
    data: Table,
    target: Target,
    models: Annotated[
        str | None,
        typer.Option(
            help="Models, comma-separated: linear, rbf, rq, matern, sm (spectral mixture), deep. "
            "If not given those that the size of the table allows."
        ),
    ] = None,
    objective: Objective = "lml",
    out: Annotated[Path, typer.Option(help="Folder of the report. " + _OF_OUT)] = Path("report"),
    rows: Rows = 4000,
    seed: Seed = 0,
    steps: Steps = None,
    restarts: Restarts = 0,
    drop: Drop = None,
    categories: Categories = None,
    missing: Missing = None,
    quiet: Quiet = False,
) -> None:
    """Which model of the table to trust, and whether the criteria agree.

    Sets a random fifth of the rows apart to test on (1000 at most), fits each model on the others,
    prints LML, CLML, LOO and the test scores, and writes a page, the fitted models and a Python
    file that rebuilds the first. After Ctrl-C the same command goes on from the fitted models.
    """
    with errors_as_text():
        from gpclml.cli.comparing import compare_table
        from gpclml.cli.options import CompareOptions
        from gpclml.cli.report import Recipe

        options = CompareOptions(
            table=_table_options(data, target, rows, seed, drop, categories, missing),
            models=None if models is None else _model_names(models),
            recipe=Recipe("rbf", objective, seed, steps, restarts),
            out=out,
        )
        compare_table(options, quiet)


@app.command()
def fit(
    data: Table,
    target: Target,
    model: Annotated[str, typer.Option(help="linear, rbf, rq, matern, sm or deep.")] = "rbf",
    objective: Objective = "lml",
    out: Annotated[Path, typer.Option(help="Folder of the model. " + _OF_OUT)] = Path("model"),
    rows: Rows = 4000,
    seed: Seed = 0,
    steps: Steps = None,
    restarts: Restarts = 0,
    drop: Drop = None,
    categories: Categories = None,
    missing: Missing = None,
    quiet: Quiet = False,
) -> None:
    """Fit one model on all rows of a table, and save it."""
    with errors_as_text():
        from gpclml.cli.fitting import fit_table
        from gpclml.cli.options import FitOptions
        from gpclml.cli.report import Recipe

        options = FitOptions(
            table=_table_options(data, target, rows, seed, drop, categories, missing),
            recipe=Recipe(model, objective, seed, steps, restarts),
            out=out,
        )
        fit_table(options, quiet)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="Folder of a model that fit wrote.")],
    data: Table,
    out: Annotated[
        Path | None,
        typer.Option(
            help="CSV file to write, replaced only if it holds predictions; predictions.csv if "
            "not given."
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Predict the rows of a table: mean, standard deviation and 90 % interval of each."""
    with errors_as_text():
        from gpclml.cli.predicting import predict_table

        predict_table(model, data, out, quiet)


def main() -> None:
    """The command ``gpclml``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # ± and − are not in every code page
    warnings.showwarning = _show_warning
    try:
        sys.exit(app(prog_name="gpclml", standalone_mode=False))
    except Exception as error:
        shown = io.StringIO()
        if hasattr(error, "show"):  # of Click, of which newer typer has a copy: words misplaced
            error.show(file=shown)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            traceback.print_exception(error, file=shown)
        tell(*shown.getvalue().rstrip("\n").split("\n"))
        sys.exit(getattr(error, "exit_code", 1))


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    tell(f"Warning: {message}")


def _version(value: bool) -> None:
    if value:
        from gpclml import __version__

        typer.echo(f"gpclml {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Tell the version.")
    ] = False,
) -> None:
    pass


def _table_options(
    data: Path, target: str, rows: int, seed: int, *lists: list[str] | None
) -> TableOptions:
    from gpclml.cli.options import TableOptions, check_encodable

    drop, categories, missing = (tuple(dict.fromkeys(values or ())) for values in lists)
    for option, texts in (
        ("--target", (target,)), ("--drop", drop), ("--categories", categories),
        ("--missing", missing),
    ):  # fmt: skip
        check_encodable(option, *texts)
    return TableOptions(data, target, rows, seed, drop, categories, missing)


def _model_names(text: str) -> tuple[str, ...]:
    from gpclml.errors import ArgumentError

    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise ArgumentError("models", repr(text), "names separated by commas")
    return names
