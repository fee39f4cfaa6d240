"""The commands ``compare``, ``fit`` and ``predict``, and their options."""

from __future__ import annotations

import io
import sys
import traceback
import warnings
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpclml._utils.extras import needs_extra
from gpclml.tables.terminal import errors_as_text, tell

if TYPE_CHECKING:
    from gpclml.tables.data import TableOptions


_HELP = (
    "Gaussian processes for a table: compare models, fit one, predict with it. Tables are CSV "
    "(with comma, semicolon, tab or bar as separator) or Parquet. Exit codes: 0 success, 2 wrong "
    "input, 3 a computation failed, 1 a file could not be written or memory ran out, 130 Ctrl-C."
)

app: typer.Typer = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode=None, help=_HELP,
)  # fmt: skip

_OUT = "The command replaces only a folder that it wrote and that has not been changed since."

Data = Annotated[Path, typer.Argument(help="The table: a CSV or Parquet file.")]
Target = Annotated[str, typer.Option(help="The column to predict.")]
Objective = Annotated[
    str,
    typer.Option(
        help="What fits maximize: lml (log marginal likelihood: the first choice for a table), "
        "clml (conditional: ten folds), loo (leave-one-out)."
    ),
]
Rows = Annotated[
    int,
    typer.Option(min=20, help="Train on at most so many rows; random ones if there are more."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of rows, starts and networks.")]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Largest number of steps of a fit. If not given, 50 for sm, 300 for deep, and no "
        "limit for the others."
    ),
]
Restarts = Annotated[
    int,
    typer.Option(help="Further fits of a model from other starts, the best kept; not of deep."),
]
Drop = Annotated[list[str] | None, typer.Option(help="A column to leave out; may be repeated.")]
Categories = Annotated[
    list[str] | None,
    typer.Option(help="A column of categories, also if they are numbers; may be repeated."),
]
Missing = Annotated[
    list[str] | None,
    typer.Option(help="A text that stands for a missing value, such as ?; may be repeated."),
]
Decimal = Annotated[
    str,
    typer.Option(
        help="What stands before decimals, a point or a comma; needed only if the table does not "
        "tell whether 1.234 is more than a thousand."
    ),
]
TimeColumn = Annotated[
    str | None,
    typer.Option(
        help="A column of dates or numbers: compare tests on the latest rows instead of random "
        "ones; where --rows limits the rows, the latest are taken."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress and no notes.")]


def _table_options(given: Mapping[str, Any]) -> TableOptions:
    """The table and how it is read, of the arguments of a command."""
    from gpclml.tables.data import TableOptions

    drop, categories, missing = (
        tuple(dict.fromkeys(given[name] or ())) for name in ("drop", "categories", "missing")
    )
    return TableOptions(
        given["data"], given["target"], given["rows"], given["seed"], drop, categories, missing,
        given["time_column"], given["decimal"],
    )  # fmt: skip


@app.command()
def compare(
    data: Data,
    target: Target,
    models: Annotated[
        str | None,
        typer.Option(
            help="Models, comma-separated: linear, rbf, rq, matern, sm (spectral mixture), deep. "
            "If not given, those that the size of the table allows."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report. " + _OUT)] = Path("report"),
    objective: Objective = "lml",
    rows: Rows = 4000,
    seed: Seed = 0,
    steps: Steps = None,
    restarts: Restarts = 0,
    drop: Drop = None,
    categories: Categories = None,
    missing: Missing = None,
    decimal: Decimal = "",
    time_column: TimeColumn = None,
    quiet: Quiet = False,
) -> None:
    """Compare models of a table: which one to use, and how well it predicts.

    Sets a fifth of the rows aside for testing (1000 at most; random rows, or the latest by
    --time-column), fits each model to the others, says which one to use, and writes a page and the
    fitted models. After Ctrl-C the same command goes on from the fitted models.
    """
    given = locals()
    with errors_as_text():
        from gpclml.errors import ArgumentError
        from gpclml.tables.fitting import RunOptions
        from gpclml.tables.recipes import Recipe

        with needs_extra("tables"):
            from gpclml.tables.comparing import compare_table

        names = None
        if models is not None:
            names = tuple(dict.fromkeys(name.strip() for name in models.split(",") if name.strip()))
            if not names:
                raise ArgumentError("models", repr(models), "names separated by commas")
        recipe = Recipe("rbf", objective, seed, steps, restarts)
        compare_table(RunOptions(_table_options(given), recipe, out, names), quiet)


@app.command()
def fit(
    data: Data,
    target: Target,
    model: Annotated[
        str,
        typer.Option(
            help="stack, a calibrated mixture of GPs; or one: linear, rbf, rq, matern, sm, deep."
        ),
    ] = "stack",
    time_budget: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds after which the stack begins no further GP; the first is fitted."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the model. " + _OUT)] = Path("model"),
    objective: Objective = "lml",
    rows: Rows = 4000,
    seed: Seed = 0,
    steps: Steps = None,
    restarts: Restarts = 0,
    drop: Drop = None,
    categories: Categories = None,
    missing: Missing = None,
    decimal: Decimal = "",
    time_column: TimeColumn = None,
    quiet: Quiet = False,
) -> None:
    """Fit a model to all rows of a table, and save it for predict."""
    given = locals()
    with errors_as_text():
        from gpclml.tables.fitting import RunOptions, fit_table
        from gpclml.tables.recipes import Recipe

        recipe = Recipe(model, objective, seed, steps, restarts, time_budget)
        fit_table(RunOptions(_table_options(given), recipe, out), quiet)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="Folder of a model that fit wrote.")],
    data: Data,
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
        from gpclml.tables.fitting import predict_table

        predict_table(model, data, out, quiet)


def main() -> None:
    """The command ``gpclml``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # code pages without ± or − show ?
    warnings.showwarning = _show_warning
    try:
        sys.exit(app(prog_name="gpclml", standalone_mode=False))
    except Exception as error:
        shown = io.StringIO()
        if hasattr(error, "show"):  # an error of Click, or of its copy in newer typer
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
