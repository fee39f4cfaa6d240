"""``python -m benchmarks.dkt``."""

from pathlib import Path
from typing import Annotated

import pandas
import typer

from benchmarks._options import check_known, errors_as_text
from benchmarks._tables import table
from benchmarks.dkt.study import STUDY, paired_differences
from gpclml.errors import DataError

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
        done = pandas.concat([_rows(path) for path in rows], ignore_index=True)
        if less is None:
            print(table(paired_differences(done)))
        else:
            check_known("less", (less,), sorted(set(done["kernel"])))
            print(table(paired_differences(done, "kernel", less)))


def _rows(path: Path) -> pandas.DataFrame:
    try:
        return pandas.read_csv(path, comment="#").astype({"objective": object})
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: no rows of cells ({error}). Give a file that report --csv wrote."
        ) from error


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.dkt")
