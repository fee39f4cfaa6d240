"""``python -m benchmarks.dkt``."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks._options import check_known, errors_as_text
from benchmarks._tables import read_rows, table
from benchmarks.dkt.study import STUDY, paired_differences

app = STUDY.make_app()


@app.command()
def differences(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows, as report --csv writes them.")],
    less: Annotated[
        str | None,
        typer.Option(help="A kernel: print other kernels less this one, under each objective."),
    ] = None,
) -> None:
    """Print what the CLML changes, or another kernel, of the rows of several files together."""
    with errors_as_text():
        done = read_rows(rows)
        if less is None:
            print(table(paired_differences(done)))
        else:
            check_known("less", (less,), sorted(set(done["kernel"])))
            print(table(paired_differences(done, "kernel", less)))


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.dkt")
