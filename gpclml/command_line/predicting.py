"""The command ``predict``: a saved model on a new table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import typer
from torch import Tensor

from gpclml.command_line.folders import check_output_file, write_text
from gpclml.command_line.progress import shows_progress
from gpclml.command_line.saved_models import SavedModel, load_model
from gpclml.errors import ArgumentError
from gpclml.report import predicted, prediction_scores
from gpclml.report.headline import percent
from gpclml.report.predictions import half_width
from gpclml.tables import read_table

if TYPE_CHECKING:
    import pandas

__all__ = ["predict_table"]


def predict_table(folder: Path, data: Path, out: Path, quiet: bool = False) -> pandas.DataFrame:
    """Predicts the rows of a table and writes them as CSV.

    A line a row, in the order of the table: mean, standard deviation of a new observation, and the
    central 90 % interval. Rows without an input that the model cannot do without have empty cells.

    Args:
        folder: Of the model.
        data: The table.
        out: The file to write.
        quiet: Whether nothing is told.

    Returns:
        What was written.

    Raises:
        ArgumentError, DataError: Something is given wrong; nothing has been written.
    """
    import pandas

    saved = load_model(folder)
    check_output_file(out, data, *folder.iterdir())
    table = read_table(data, saved.encoding.missing)
    encoded = saved.encoding.encode(table)
    mean, deviation = predicted(saved.model, encoded.inputs, shows_progress(quiet))
    half = half_width(deviation)
    columns = {
        "mean": mean, "standard_deviation": deviation, "lower_90": mean - half,
        "upper_90": mean + half,
    }  # fmt: skip
    rows = encoded.rows.numpy()
    result = pandas.DataFrame(
        {name: _spread(values, rows, len(table)) for name, values in columns.items()}
    )
    write_text(out, result.to_csv(index=False))
    if not quiet:
        for note in encoded.notes:
            typer.echo(note, err=True)
        typer.echo(f"{len(rows)} of {len(table)} rows predicted: {out}", err=True)
        _tell_scores(saved, table, rows, mean, deviation)
    return result


def _spread(values: Tensor, rows: np.ndarray, count: int) -> np.ndarray:
    """Values at their rows, NaN elsewhere."""
    spread = np.full(count, np.nan)
    spread[rows] = values.numpy()
    return spread


def _tell_scores(
    saved: SavedModel, table: pandas.DataFrame, rows: np.ndarray, mean: Tensor, deviation: Tensor
) -> None:
    """How well the predictions are, where the table has the target."""
    target = saved.encoding.target
    if target not in table.columns:
        return
    try:
        targets = saved.encoding.targets(table)[rows]
    except ArgumentError:  # it is not asked for, and need not be one
        return
    known = ~targets.isnan()
    if bool(known.any()):
        scores = prediction_scores(targets[known], mean[known], deviation[known])
        typer.echo(
            f"The table has {target} in {int(known.sum())} of these rows: RMSE {scores.rmse:.4g}, "
            f"NLL {scores.nll:.3f}, {percent(scores.coverage)} in the 90 % intervals.",
            err=True,
        )
