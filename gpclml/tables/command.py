"""The commands ``compare``, ``fit`` and ``predict``, and their options."""

from __future__ import annotations

import functools
import inspect
import io
import sys
import traceback
import warnings
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from gpclml._utils.extras import needs_extra
from gpclml.tables.terminal import errors_as_text, tell

_HELP = (
    "Kernel learning on GPyTorch: the marginal likelihood, the conditional marginal likelihood and "
    "their neighbours as objectives that replace one another in one line. Here Gaussian processes "
    "for a table: compare models, fit one, predict with it. Tables are CSV "
    "(with comma, semicolon, tab or bar as separator) or Parquet. Exit codes: 0 success, 2 wrong "
    "input, 3 a computation failed, 1 a file could not be written or memory ran out, 130 Ctrl-C."
)

app: typer.Typer = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode=None, help=_HELP,
)  # fmt: skip

_OUT = "The command replaces only a folder that it wrote and that has not been changed since."

Data = Annotated[Path, typer.Argument(help="The table: a CSV or Parquet file.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress and no notes.")]


def _run_options(
    model: str,
    out: Path,
    data: Data,
    target: Annotated[str, typer.Option(help="The column to predict.")],
    models: tuple[str, ...] | None = None,
    time_budget: float | None = None,
    objective: Annotated[
        str,
        typer.Option(
            help="What fits maximize: lml (log marginal likelihood: the first choice for a table), "
            "clml (conditional: ten folds), loo (leave-one-out)."
        ),
    ] = "lml",
    rows: Annotated[
        int,
        typer.Option(min=20, help="Train on at most so many rows; random ones if there are more."),
    ] = 4000,
    seed: Annotated[
        int, typer.Option(min=0, max=2**64 - 1, help="Seed of rows, starts and networks.")
    ] = 0,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Largest number of steps of a fit. If not given, 50 for sm, 300 for deep, and no "
            "limit for the others."
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(help="Further fits of a model from other starts, the best kept; not of deep."),
    ] = 0,
    drop: Annotated[
        list[str] | None, typer.Option(help="A column to leave out; may be repeated.")
    ] = None,
    categories: Annotated[
        list[str] | None,
        typer.Option(help="A column of categories, also if they are numbers; may be repeated."),
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(help="A text that stands for a missing value, such as ?; may be repeated."),
    ] = None,
    decimal: Annotated[
        str,
        typer.Option(
            help="What stands before decimals, a point or a comma; needed only if the table does "
            "not tell whether 1.234 is more than a thousand."
        ),
    ] = "",
    task: Annotated[
        str,
        typer.Option(
            help="regression, classification or counts. If not given, that of the target: texts, "
            "true and false, and two different values are classes; counts are asked for."
        ),
    ] = "",
    time_column: Annotated[
        str | None,
        typer.Option(
            help="A column of dates or numbers: compare tests on the latest rows instead of random "
            "ones; where --rows limits the rows, the latest are taken."
        ),
    ] = None,
) -> Any:
    """The options of a command, those that ``compare`` and ``fit`` share among them."""
    from gpclml.tables.data import TableOptions
    from gpclml.tables.fitting import Recipe, RunOptions

    dropped, grouped, absent = (
        tuple(dict.fromkeys(names or ())) for names in (drop, categories, missing)
    )
    table = TableOptions(
        data, target, rows, seed, dropped, grouped, absent, time_column, decimal, task
    )
    recipe = Recipe(model, objective, seed, steps, restarts, time_budget)
    return RunOptions(table, recipe, out, models)


def _add_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :func:`_run_options`, and prints errors as text.

    typer reads them from the signature; the command takes them as further keyword arguments.
    """
    parameters = {
        name: parameter
        for function in (_run_options, command)
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if get_origin(parameter.annotation) is Annotated
    }

    @functools.wraps(command)
    def run(**given: Any) -> None:
        with errors_as_text():
            command(**given)

    run.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    # What is required comes first, as Python wants it.
    run.__dict__["__signature__"] = inspect.Signature(
        sorted(
            (each.replace(kind=each.KEYWORD_ONLY) for each in parameters.values()),
            key=lambda each: each.default is not each.empty,
        )
    )
    return run


@app.command()
@_add_shared_options
def compare(
    models: Annotated[
        str | None,
        typer.Option(
            help="Models, comma-separated: linear, rbf, rq, matern, sm (spectral mixture), deep. "
            "If not given, those that the size of the table allows."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report. " + _OUT)] = Path("report"),
    quiet: Quiet = False,
    **shared: Any,
) -> None:
    """Compare models of a table: which one to use, and how well it predicts.

    Sets a fifth of the rows aside for testing (1000 at most; random rows, or the latest by
    --time-column), fits each model to the others, says which one to use, and writes a page and the
    fitted models. After Ctrl-C the same command goes on from the fitted models. A target of classes
    is predicted by an average of GP classifiers, beside logistic regression and trees; one of
    counts by an average of GPs of counts, beside a Poisson regression and trees.
    """
    from gpclml.errors import ArgumentError

    with needs_extra("tables"):
        from gpclml.tables.comparing import compare_table

    names = None
    if models is not None:
        names = tuple(dict.fromkeys(name.strip() for name in models.split(",") if name.strip()))
        if not names:
            raise ArgumentError("models", repr(models), "names separated by commas")
    compare_table(_run_options("rbf", out, models=names, **shared), quiet)


@app.command()
@_add_shared_options
def fit(
    model: Annotated[
        str,
        typer.Option(
            help="stack, a calibrated mixture of GPs; or one: linear, rbf, rq, matern, sm, deep. "
            "A target of classes or counts has an average of GPs of these, and no others."
        ),
    ] = "stack",
    time_budget: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds after which the stack begins no further GP; the first is fitted."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the model. " + _OUT)] = Path("model"),
    quiet: Quiet = False,
    **shared: Any,
) -> None:
    """Fit a model to all rows of a table, and save it for predict."""
    from gpclml.tables.fitting import fit_table

    fit_table(_run_options(model, out, time_budget=time_budget, **shared), quiet)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="Folder of a model that fit wrote.")],
    data: Data,
    out: Annotated[
        Path, typer.Option(help="CSV file to write, replaced only if it holds predictions.")
    ] = Path("predictions.csv"),
    quiet: Quiet = False,
) -> None:
    """Predict the rows of a table: mean, standard deviation and 90 % interval of each.

    Of a target of classes: the most probable class, and the probability of each.
    """
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
