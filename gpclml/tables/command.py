"""The commands ``compare``, ``fit`` and ``predict``, and their options."""

from __future__ import annotations

import functools
import inspect
import io
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpclml.tables.terminal import errors_as_text, tell

if TYPE_CHECKING:
    from gpclml.tables.recipes import Recipe, TableOptions

__all__ = ["app", "main"]

_HELP = (
    "Gaussian processes for a table: compare models, fit one, predict with it. Tables are CSV "
    "(with comma, semicolon, tab or bar as separator) or Parquet. Exit codes: 0 success, 2 wrong "
    "input, 3 a computation failed, 1 a file could not be written or memory ran out, 130 Ctrl-C."
)

app: typer.Typer = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode=None, help=_HELP,
)  # fmt: skip

_OF_OUT = (
    "The command replaces only files that it wrote there and that have not been changed since; all "
    "others stay."
)

Table = Annotated[Path, typer.Argument(help="The table: a CSV or Parquet file.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress and no notes.")]


@dataclass(frozen=True)
class _Common:
    """The options that ``compare`` and ``fit`` have in common."""

    data: Table
    target: Annotated[str, typer.Option(help="The column to predict.")]
    objective: Annotated[
        str,
        typer.Option(
            help="What fits maximize: lml (log marginal likelihood: the first choice for a "
            "table), clml (conditional: ten folds), loo (leave-one-out)."
        ),
    ] = "lml"
    rows: Annotated[
        int,
        typer.Option(min=20, help="Train on at most so many rows; random ones if there are more."),
    ] = 4000
    seed: Annotated[
        int, typer.Option(min=0, max=2**64 - 1, help="Seed of rows, starts and networks.")
    ] = 0
    steps: Annotated[
        int | None,
        typer.Option(
            help="Largest number of steps of a fit. If not given, 50 for sm, 300 for deep, and no "
            "limit for the others."
        ),
    ] = None
    restarts: Annotated[
        int,
        typer.Option(help="Further fits of a model from other starts, the best kept; not of deep."),
    ] = 0
    drop: Annotated[
        list[str] | None, typer.Option(help="A column to leave out; may be repeated.")
    ] = None
    categories: Annotated[
        list[str] | None,
        typer.Option(help="A column of categories, also if they are numbers; may be repeated."),
    ] = None
    missing: Annotated[
        list[str] | None,
        typer.Option(help="A text that stands for a missing value, such as ?; may be repeated."),
    ] = None
    decimal: Annotated[
        str,
        typer.Option(
            help="What stands before decimals, a point or a comma; needed only if the table does "
            "not tell whether 1.234 is more than a thousand."
        ),
    ] = ""
    time_column: Annotated[
        str | None,
        typer.Option(
            help="A column of dates or numbers: compare tests on the latest rows instead of random "
            "ones; where --rows limits the rows, the latest are taken."
        ),
    ] = None
    quiet: Quiet = False

    def table(self) -> TableOptions:
        """The table, and how it is read."""
        from gpclml.tables.recipes import TableOptions

        lists = self.drop, self.categories, self.missing
        drop, categories, missing = (tuple(dict.fromkeys(values or ())) for values in lists)
        return TableOptions(
            self.data, self.target, self.rows, self.seed, drop, categories, missing,
            self.time_column, self.decimal,
        )  # fmt: skip

    def recipe(self, model: str) -> Recipe:
        """A model and its fit."""
        from gpclml.tables.recipes import Recipe

        return Recipe(model, self.objective, self.seed, self.steps, self.restarts)


def _with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :class:`_Common` beside its own."""
    common = inspect.signature(_Common, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters
    options = [*(own[name] for name in own if name != "common"), *common.values()]
    options.sort(key=lambda option: option.default is not option.empty)  # required ones first

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in common}
        command(common=_Common(**given), **values)

    del run.__wrapped__  # typer would take the options of the command itself
    run.__signature__ = inspect.Signature(options)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


@app.command()
@_with_common_options
def compare(
    common: _Common,
    models: Annotated[
        str | None,
        typer.Option(
            help="Models, comma-separated: linear, rbf, rq, matern, sm (spectral mixture), deep. "
            "If not given, those that the size of the table allows."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report. " + _OF_OUT)] = Path("report"),
) -> None:
    """Compare models of a table: which one to use, and how well it predicts.

    Sets a fifth of the rows aside for testing (1000 at most; random rows, or the latest by
    --time-column), fits each model to the others, says which one to use, and writes a page, the
    fitted models and a Python file that rebuilds the best Gaussian process. After Ctrl-C the same
    command goes on from the fitted models.
    """
    with errors_as_text():
        from gpclml.tables.comparing import compare_table
        from gpclml.tables.recipes import RunOptions

        names = None if models is None else _model_names(models)
        options = RunOptions(common.table(), common.recipe("rbf"), out, names)
        compare_table(options, common.quiet)


@app.command()
@_with_common_options
def fit(
    common: _Common,
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
    out: Annotated[Path, typer.Option(help="Folder of the model. " + _OF_OUT)] = Path("model"),
) -> None:
    """Fit a model to all rows of a table, and save it for predict."""
    with errors_as_text():
        from gpclml.tables.fitting import fit_table
        from gpclml.tables.recipes import RunOptions

        recipe = replace(common.recipe(model), time_budget=time_budget)
        fit_table(RunOptions(common.table(), recipe, out), common.quiet)


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


def _model_names(text: str) -> tuple[str, ...]:
    from gpclml.errors import ArgumentError

    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise ArgumentError("models", repr(text), "names separated by commas")
    return names
