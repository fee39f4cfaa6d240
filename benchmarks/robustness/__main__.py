"""Command line: ``python -m benchmarks.robustness COMMAND``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from benchmarks.robustness.singular_study import (
    run_accuracy,
    run_singular,
    summarize_accuracy,
    summarize_singular,
)
from benchmarks.robustness.solver_study import run_solver, summarize_solver
from benchmarks.robustness.study import run, summarize
from benchmarks.runner import package_versions

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def robustness() -> None:
    """What objectives, solvers and arguments do where they are hard."""


@app.command("objectives")
def objectives(
    problems: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 500,
    seed: Annotated[int, typer.Option(min=0, max=2**40, help="Seed of the problems.")] = 0,
    csv: Annotated[
        Path | None, typer.Option(help="Write a row a problem and method there.")
    ] = None,
) -> None:
    """Failures and float32 errors of objectives on hard random problems."""
    header = _header()
    print(f"{header}\n", flush=True)
    results = run(problems, seed)
    table = summarize(results)
    counts = table.loc[:, :"jittered64"]
    errors = table[["method", *table.columns[table.columns.get_loc("value_median") :]]]
    print("Counts in float32; the last two in float64. failed: where float64 succeeds.\n")
    print(counts.to_string(index=False))
    print("\nRelative errors of float32 against float64; own: on the same float32 kernel.\n")
    print(errors.to_string(index=False, float_format="%.1e"))
    _print_errors(results)
    if csv:
        csv.write_text(f"{header}\n{results.to_csv(index=False)}")


@app.command("fuzz")
def fuzz(
    calls: Annotated[int, typer.Option(min=1, help="Number of calls.")] = 15_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the calls.")] = 0,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds that a call may take.")] = 60.0,
    csv: Annotated[Path | None, typer.Option(help="Write a row a call there.")] = None,
) -> None:
    """Public functions and classes called with wrong arguments: what is raised."""
    from benchmarks.robustness.fuzz import by_kind, raw_errors
    from benchmarks.robustness.fuzz import run as run_calls

    header = _header()
    print(f"{header}\n", flush=True)
    results = run_calls(calls, seed, limit)
    print("Calls by the kind of what is wrong, and what came of them.\n")
    print(by_kind(results).to_string())
    table = raw_errors(results)
    if len(table):
        print("\nErrors that do not say what is wrong, by callable.\n")
        print(table.to_string(index=False))
    if csv:
        csv.write_text(f"{header}\n{results.to_csv(index=False)}")


_Seed = Annotated[int, typer.Option(min=0, max=2**40, help="Seed of the problems.")]
_Csv = Annotated[Path | None, typer.Option(help="Write a row a problem there.")]


@app.command("solver")
def solver(
    problems: Annotated[int, typer.Option(min=1, help="Number of systems.")] = 1000,
    most: Annotated[int, typer.Option(min=20, help="Largest number of points.")] = 1500,
    seed: _Seed = 0,
    csv: _Csv = None,
) -> None:
    """Whether conjugate gradients end, and whether their error bounds are true."""
    from tqdm import tqdm

    rows = tqdm(run_solver(problems, seed, most), total=problems, desc="systems")
    results = pd.DataFrame(rows)
    table = summarize_solver(results).T
    _report(results, table.to_string(header=False), csv)


@app.command("singular")
def singular(
    problems: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 300,
    seed: _Seed = 0,
    csv: _Csv = None,
) -> None:
    """What is said of covariances that are singular in float32."""
    results = run_singular(problems, seed)
    _report(results, summarize_singular(results).to_string(index=False), csv)


@app.command("accuracy")
def accuracy(
    problems: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 200,
    seed: _Seed = 0,
    csv: _Csv = None,
) -> None:
    """Value and gradient of the log marginal likelihood against extended precision."""
    results = run_accuracy(problems, seed)
    table = summarize_accuracy(results).to_string(index=False, float_format="%.2e")
    _report(results, table, csv)


def _report(results: pd.DataFrame, table: str, csv: Path | None) -> None:
    header = _header()
    print(f"{header}\n\n{table}")
    if csv:
        csv.write_text(f"{header}\n{results.to_csv(index=False)}")


def _header() -> str:
    """The command and the versions, as comments above what it prints."""
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    command = f"python -m benchmarks.robustness {' '.join(sys.argv[1:])}".rstrip()
    return f"# {command}\n# {versions}"


def _print_errors(results: pd.DataFrame) -> None:
    raised = results[results["raised"]]
    if len(raised):
        print("\nWhat was raised, by method:\n")
        kinds = raised["error"].str.partition(":")[0].rename("error")
        counts = raised.groupby(["method", kinds], sort=False).size().rename("count")
        print(counts.reset_index().to_string(index=False))


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.robustness")
