"""``python -m benchmarks.uci``."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks._options import FigureFile, check_known, errors_as_text, names
from benchmarks._tables import read_rows, section, table
from benchmarks.uci.figure import draw_differences
from benchmarks.uci.study import STUDY, labelled
from benchmarks.uci.tables import JUDGED, difference_table, less_lml

app = STUDY.make_app()


@app.command()
def differences(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows, as report --csv writes them.")],
    kernel: Annotated[
        str | None, typer.Option(help="Kernels, comma-separated; all of the rows.")
    ] = None,
    figure: FigureFile = None,
) -> None:
    """Print what the CLML changes, less the LML of the same kernel, of several files together."""
    with errors_as_text():
        done = read_rows(rows)
        if kernel is not None:
            check_known("kernel", names(kernel, "kernel"), sorted(set(done["kernel"])))
            done = done[done["kernel"].isin(names(kernel, "kernel"))]
        done = labelled(done[done["objective"].isin(["lml", "clml"])])
        for metric in JUDGED:
            shown = table(difference_table(less_lml(done, metric), metric))
            print(section(f"{metric.upper()}, CLML less LML", shown), end="\n\n")
        if figure is not None:
            draw_differences(done, figure)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.uci")
