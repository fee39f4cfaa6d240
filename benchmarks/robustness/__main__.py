"""Command line: ``python -m benchmarks.robustness COMMAND``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from typer import Option

from benchmarks._tables import command_lines
from benchmarks.robustness import accuracy as exactness
from benchmarks.robustness import objectives as hard
from benchmarks.robustness.problems import draw_duplicates

app = typer.Typer(
    add_completion=False, no_args_is_help=True,
    help="What objectives and arguments do where they are hard.",
)  # fmt: skip

Seed = Annotated[int, Option(min=0, max=2**40, help="Seed of what is drawn.")]
Problems = Annotated[int, Option(min=1, help="Number of problems.")]
Csv = Annotated[Path | None, Option(help="Write a row a problem and method, or a call, there.")]


@app.command()
def objectives(problems: Problems = 500, seed: Seed = 0, csv: Csv = None) -> None:
    """Failures and float32 errors of objectives on hard random problems."""
    _print_header()
    results = hard.run(problems, seed)
    table = hard.summarize(results)
    counts = table.loc[:, :"jittered64"]
    errors = table[["method", *table.columns[table.columns.get_loc("value_median") :]]]
    print("Counts in float32; the last two in float64. failed: where float64 succeeds.\n")
    print(counts.to_string(index=False))
    print("\nRelative errors of float32 against float64.\n")
    print(errors.to_string(index=False, float_format="%.1e"))
    raised = results[results["raised"]]
    if len(raised):
        print("\nWhat was raised, by method:\n")
        kinds = raised["error"].str.partition(":")[0].rename("error")
        numbers = raised.groupby(["method", kinds], sort=False).size().rename("count")
        print(numbers.reset_index().to_string(index=False))
    _write(results, csv)


@app.command()
def fuzz(
    calls: Annotated[int, Option(min=1, help="Number of calls of each callable.")] = 64,
    seed: Seed = 0,
    limit: Annotated[float, Option(min=1.0, help="Seconds that a call may take.")] = 60.0,
    csv: Csv = None,
) -> None:
    """Public functions and classes called with wrong arguments: what is raised."""
    # Not at the top: it imports BoTorch, which changes GPyTorch's settings for all others.
    from benchmarks.robustness.fuzz import study as wrong

    _print_header()
    results = wrong.run(calls, seed, limit)
    print("Calls by the kind of what is wrong, and what came of them.\n")
    print(wrong.kinds_table(results).to_string())
    table = wrong.raw_table(results)
    if len(table):
        print("\nErrors that do not say what is wrong: the smallest call of each callable.\n")
        print(table.to_string(index=False))
    _write(results, csv)


@app.command()
def singular(problems: Problems = 300, seed: Seed = 0, csv: Csv = None) -> None:
    """What is said of covariances that are singular in float32."""
    results = hard.run(problems, seed, draw_duplicates)
    _print_header()
    print(hard.summarize_singular(results).to_string(index=False))
    _write(results, csv)


@app.command()
def accuracy(problems: Problems = 200, seed: Seed = 0, csv: Csv = None) -> None:
    """Value and gradient of the log marginal likelihood against extended precision."""
    results = exactness.run_accuracy(problems, seed)
    _print_header()
    table = exactness.summarize_accuracy(results)
    print(table.to_string(index=False, float_format="%.2e"))
    _write(results, csv)


def _print_header() -> None:
    print(f"{command_lines('benchmarks.robustness')}\n", flush=True)


def _write(results: pd.DataFrame, csv: Path | None) -> None:
    if csv:
        csv.write_text(f"{command_lines('benchmarks.robustness')}\n{results.to_csv(index=False)}")


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.robustness")
