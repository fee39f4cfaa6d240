"""A benchmark as one object, which has the commands ``run`` and ``report`` for free."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import pandas
import typer
from pandas.api.types import is_numeric_dtype

from benchmarks._options import (
    CsvFile,
    DataFolder,
    FigureFile,
    ResultsFile,
    errors_as_text,
    extend_options,
    options_of,
    read_options,
)
from benchmarks._tables import code, describe_cells, read_csv, section, write_rows
from benchmarks.data.files import VARIABLE
from benchmarks.runner import Batches, load_commands, load_failures, load_results, run_grid
from gpclml.errors import DataError

Cells = list[dict[str, Any]]

_OF_THE_MACHINE = {"jobs", "address", "folder", "retry_failed", "quiet"}
EarlierRows = Annotated[
    Path | None, typer.Option("--rows", help="Add cells of this CSV file of an earlier report.")
]
_RUN_HELP = (
    "Compute the cells that the results file lacks.\n\n{}\n\nEach result is saved as it comes: "
    "after an interruption the same command goes on. Exit code 1 if cells failed, 2 if nothing "
    "could run."
)


class Sweep(NamedTuple):
    """Cells that one function computes; the other fields are as in :class:`Study`."""

    cells: Iterable[Mapping[str, Any]]
    cell: Callable[..., Mapping[str, Any]]
    batches: Batches | None = None


@dataclass(frozen=True)
class Study:
    """A benchmark: what it computes and how that is told.

    Attributes:
        name: Of the package, as in ``python -m benchmarks.NAME``, and of the command in it where
            that has several studies.
        about: What it is, one line.
        title: Heading of the report.
        running: What ``run`` does, for its help.
        reporting: What ``report`` prints, for its help.
        grid: Gives the cells. Its arguments are the options of ``run``: their annotations hold a
            ``typer.Option``, and a function that reads lists (:func:`names` and so on). It gets
            ``quiet`` if it asks for that.
        cell: Importable function of one cell.
        tables: Sections of the report, in Markdown, from finished cells.
        needed: Columns that results of this benchmark have.
        label: How a failed cell is called, a format string of its columns.
        batches: How cells are computed several at a time, if they are.
        sweeps: Parts the cells by their functions, where there are several.
        choose: Gives the rows to be told of finished or failed cells; its further arguments are
            options of ``report``.
        prepare: Adds columns to finished cells, which no CSV file shows.
        figure: Draws finished cells in a file.
        caption: Of the figure.
        apart: Columns that tell cells apart, first the one, such as the method, whose values are
            computed anew as a whole when the code changes. With them a report may take the cells
            that the results file does not have from the CSV file of an earlier report.
        data: Whether it reads the data folder.
        stand_in: What to run where its files are missing and cannot be downloaded.
    """

    name: str
    about: str
    title: str
    running: str
    reporting: str
    grid: Callable[..., Cells]
    cell: Callable[..., Mapping[str, Any]]
    tables: Callable[[pandas.DataFrame], Iterable[str]]
    needed: Sequence[str]
    label: str
    batches: Batches | None = None
    sweeps: Callable[[Cells], Iterable[Sweep]] | None = None
    choose: Callable[..., pandas.DataFrame] | None = None
    prepare: Callable[[pandas.DataFrame], pandas.DataFrame] | None = None
    figure: Callable[[pandas.DataFrame, Any], None] | None = None
    caption: str = ""
    apart: Sequence[str] = ()
    data: bool = True
    stand_in: str = ""

    def make_app(self, report: Callable | None = None) -> typer.Typer:
        """The command line.

        Args:
            report: Another command in the place of ``report``.
        """
        app = typer.Typer(
            add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
            rich_markup_mode=None, help=self.about,
        )  # fmt: skip
        app.command("run", help=_RUN_HELP.format(self.running))(self._run_command())
        app.command("report", help=None if report else f"Print the report in Markdown: "
                    f"{self.reporting}")(report or self._report_command())  # fmt: skip
        return app

    def sections(
        self,
        path: str | os.PathLike[str],
        csv: str | os.PathLike[str] | None = None,
        figure: str | os.PathLike[str] | None = None,
        rows: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> str:
        """The report of a results file, in Markdown.

        Args:
            path: The SQLite file.
            csv: Also write all cells to this file; compressed where its name ends in ``.gz``.
            figure: Also draw in this image file.
            rows: CSV file of an earlier report. Its cells are added, except those that the results
                file has too. If both were computed by one version of the code, two cells are the
                same when all columns of :attr:`apart` are; otherwise when the first one is.
            **options: Of ``choose``.

        Raises:
            DataError: There is no such file, no finished cell of this benchmark in it, or an
                output cannot be written.
        """
        done, failed = self.load(path, **options)
        failures = [f"- {self._failure(row)}" for row in failed.to_dict("records")]
        about = [*load_commands(path), *describe_cells(done, len(failed))]
        if rows is not None:
            done, lines = self._add_rows(done, rows, options)
            about += lines
        if csv is not None:
            write_rows(done, csv, about)
        cells = done if self.prepare is None else self.prepare(done)
        blocks = [f"# {self.title}", code(about)]
        if figure is not None and self.figure is not None:
            self.figure(cells, figure)
            blocks.append(f"![{self.caption}]({os.path.basename(figure)})")
        blocks += self.tables(cells)
        if failures:
            text = f"{len(failures)} failed cells:"
            blocks.append(section("Failed cells", text, "\n".join(failures)))
        return "\n\n".join(blocks)

    def load(
        self, path: str | os.PathLike[str], **options: Any
    ) -> tuple[pandas.DataFrame, pandas.DataFrame]:
        """Finished cells with their provenance, and failed ones.

        Args:
            path: The SQLite file.
            **options: Of ``choose``.

        Raises:
            DataError: There is no such file, or no finished cell of this benchmark in it.
        """
        done, failed = load_results(path, provenance=True), load_failures(path)
        if self.choose is not None:
            done, failed = self.choose(done, **options), self.choose(failed, **options)
        if done.empty:
            told = [self._failure(row) for row in failed.head(1).to_dict("records")]
            first = "".join(f" The first of {len(failed)} failed: {text}" for text in told)
            raise DataError(f"{path}: no finished cell.{first}")
        if not set(self.needed) <= set(done.columns):
            raise DataError(
                f"{path}: results of another benchmark or of an earlier form of this one. "
                "Name another results file."
            )
        return done, failed

    def _add_rows(
        self, done: pandas.DataFrame, path: str | os.PathLike[str], options: Mapping[str, Any]
    ) -> tuple[pandas.DataFrame, list[str]]:
        """The cells with those of an earlier CSV file, and the lines at the head of that."""
        try:
            earlier, lines = read_csv(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: no rows of an earlier report ({error}).") from error
        if not set(self.needed) <= set(earlier.columns):
            raise DataError(f"{path}: rows of another benchmark.")
        versions = {line.rpartition("; code ")[2] for line in lines if "; code " in line}
        # Of another version only whole methods may stand beside those of this one.
        same = versions == set(done["_code_version"])
        columns = list(self.apart if same else self.apart[:1])
        known = pandas.MultiIndex.from_frame(done[columns])
        earlier = earlier[~pandas.MultiIndex.from_frame(earlier[columns]).isin(known)]
        if self.choose is not None:
            earlier = self.choose(earlier, **options)
        said = f"with {len(earlier)} cells of an earlier run:"
        merged = pandas.concat([done, earlier], ignore_index=True)
        # An empty text is no missing value: a failure that did not happen.
        texts = [name for name in merged if not is_numeric_dtype(merged[name])]
        merged = merged.fillna(dict.fromkeys(texts, ""))
        return merged, [said, *lines]

    def _failure(self, row: Mapping[Any, Any]) -> str:
        message = row["_error_message"].splitlines() or [""]
        return f"{self.label.format_map(row)}: {row['_error_type']}: {message[0]}"

    def _run_command(self) -> Callable[..., None]:
        def run(
            ctx: typer.Context,
            results: ResultsFile,
            jobs: Annotated[int, typer.Option(help="Worker processes; -1 for one a core.")] = 1,
            address: Annotated[
                str | None,
                typer.Option(help="Address of a Dask scheduler whose workers compute instead."),
            ] = None,
            folder: DataFolder = None,
            retry_failed: Annotated[
                bool, typer.Option("--retry-failed", help="Compute failed cells again.")
            ] = False,
            quiet: Annotated[
                bool, typer.Option("--quiet", help="No progress, no summary.")
            ] = False,
            **options: Any,
        ) -> None:
            # Absolute: workers have other working directories.
            environment = {VARIABLE: str(folder.absolute())} if folder else {}
            if "quiet" in signature(self.grid).parameters:
                options["quiet"] = quiet
            sweep = partial(
                run_grid, results_path=results, jobs=jobs, address=address,
                environment=environment, retry_failed=retry_failed, progress=not quiet,
                command=self._command_of(ctx),
            )  # fmt: skip
            with errors_as_text(), mock.patch.dict(os.environ, environment):
                try:
                    cells = self.grid(**read_options(self.grid, options))
                except DataError as error:
                    raise DataError(f"{error} {self.stand_in}".rstrip()) from error
                several = self.sweeps or (lambda c: [Sweep(c, self.cell, self.batches)])
                summaries = [
                    sweep(each.cells, each.cell, batches=each.batches) for each in several(cells)
                ]
            for summary in [] if quiet else summaries:
                typer.echo(summary)
            failed = sum(summary.failed + summary.failed_before for summary in summaries)
            if failed:
                typer.echo(f"{failed} cells failed: the report lists them.", err=True)
                raise typer.Exit(1)

        left_out = [] if self.data else ["folder"]
        return extend_options(run, options_of(self.grid).values(), left_out)

    def _report_command(self) -> Callable[..., None]:
        def report(
            results: ResultsFile,
            csv: CsvFile = None,
            figure: FigureFile = None,
            rows: EarlierRows = None,
            **options: Any,
        ) -> None:
            with errors_as_text():
                chosen = read_options(self.choose, options)
                typer.echo(self.sections(results, csv, figure, rows, **chosen))

        further = options_of(self.choose).values()
        left_out = [] if self.figure else ["figure"]
        return extend_options(report, further, left_out + ([] if self.apart else ["rows"]))

    def _command_of(self, ctx: typer.Context) -> str:
        """What was asked for: the options given, but for those of the machine."""
        words = ["python", "-m", *f"benchmarks.{self.name} run".split()]
        for parameter in ctx.command.params:
            name = str(parameter.name)
            source = ctx.get_parameter_source(name)
            if source and source.name == "COMMANDLINE" and name not in _OF_THE_MACHINE:
                value, option = ctx.params[name], parameter.param_type_name == "option"
                words += [max(parameter.opts, key=len)] if option else []
                words += [] if value is True else [str(value)]
        return shlex.join(words)
