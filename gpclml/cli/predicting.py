"""The command ``predict``: predicts the rows of a table with a saved model."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpclml._utils.files import write_atomically
from gpclml.cli.fitting import SavedModel, load_model
from gpclml.cli.report import predicted, prediction_scores
from gpclml.cli.report.predictions import PREDICTED_SHARE
from gpclml.cli.report.words import figure, percent
from gpclml.cli.tables import read_table
from gpclml.cli.terminal import shows_progress, tell
from gpclml.errors import ArgumentError, DataError
from gpclml.estimators import StackedPrediction

if TYPE_CHECKING:
    import pandas

__all__ = ["predict_table"]

_COLUMNS = "mean", "standard_deviation", "lower_90", "upper_90"


def predict_table(
    folder: Path, data: Path, out: Path | None = None, quiet: bool = False
) -> pandas.DataFrame:
    """Predicts the rows of a table and writes a line of CSV for each, in their order.

    The cells are empty if an input that the model needs is missing.
    """
    import pandas

    out = Path("predictions.csv") if out is None else out
    saved = load_model(folder)
    _check_output(out, data, *folder.iterdir())
    table = read_table(data, saved.encoding.missing)
    encoded = saved.encoding.encode(table)
    found = predicted(saved.model, encoded.inputs, shows_progress(quiet))
    parts = found.mean, found.std, *found.interval(PREDICTED_SHARE)
    columns = dict(zip(_COLUMNS, parts, strict=True))
    rows = encoded.rows.numpy()
    result = pandas.DataFrame({name: values.numpy() for name, values in columns.items()}, rows)
    result = result.reindex(range(len(table)))
    text = result.to_csv(index=False).encode()
    write_atomically(out, lambda file: file.write(text))
    if not quiet:
        for note in encoded.notes:
            tell(note)
        tell(f"{len(rows)} of {len(table)} rows predicted: {out}")
        _tell_scores(saved, table, rows, found)
    return result


def _check_output(path: Path, *others: Path) -> None:
    """Checks that predictions can be written and replace nothing but predictions."""
    folder = path.absolute().parent
    if path.is_symlink():
        raise DataError(f"--out: {path} is a link. Name the file itself.")
    if path.is_dir():
        raise DataError(f"--out: {path} is a folder. Name a file.")
    if (there := path.exists()) and not path.is_file():
        raise DataError(f"--out: {path} is not a regular file. Name one.")
    if not folder.is_dir():
        raise DataError(f"--out: there is no folder {folder}. Make it first.")
    if there and any(other.exists() and path.samefile(other) for other in others):
        raise DataError(f"--out: {path} is a file that is read. Name another.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
        writable = os.access(path, os.W_OK) or not there
    except OSError:  # only trying tells: permissions do not bind every user
        writable = False
    if not writable:
        raise DataError(f"--out: cannot write {path}. Name a file elsewhere.")
    if there and not _holds_predictions(path):
        said = f"{path} is there and holds no predictions of gpclml"
        raise DataError(f"--out: {said}. Name another file, or remove it first.")


def _holds_predictions(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline(1000).strip() == ",".join(_COLUMNS).encode()


def _tell_scores(
    saved: SavedModel, table: pandas.DataFrame, rows: np.ndarray, found: StackedPrediction
) -> None:
    """Prints how good the predictions are, if the table has the target."""
    target = saved.encoding.target
    if target not in table.columns:
        return
    try:
        targets = saved.encoding.targets(table)[rows]
    except ArgumentError:  # nobody asked for it, so a column of texts is no error
        return
    count = int((~targets.isnan()).sum())
    if count:
        scores = prediction_scores(targets, found)
        if not math.isfinite(scores.rmse) or not math.isfinite(scores.nll):
            tell(f"No scores: values of {target} are too far from the predictions to be squared.")
            return
        tell(
            f"The table has {target} in {count} of these rows: typical error (RMSE) "
            f"{figure(scores.rmse)}, {percent(scores.coverage)} in their 90 % intervals, negative "
            f"log density (NLL) {scores.nll:.3f} a row."
        )
