"""The command ``fit``: one model of all rows of a table."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gpclml.cli.chosen_by_size import check_size
from gpclml.cli.errors import error_text
from gpclml.cli.fit_recipe import fit_recipe
from gpclml.cli.folders import open_work_folder
from gpclml.cli.options import FitOptions
from gpclml.cli.progress import shows_progress
from gpclml.cli.records import MODEL
from gpclml.cli.saved_models import MODEL_FILES, SavedModel, add_model, record_of
from gpclml.cli.table_data import read_table_data
from gpclml.cli.terminal import give, tell
from gpclml.cli.threads import threads_for
from gpclml.evaluation.scores import leave_one_out, log_marginal_likelihood

__all__ = ["fit_table"]


def fit_table(options: FitOptions, quiet: bool = False) -> SavedModel:
    """Fits a model of a table and saves it with the encoding of the table.

    Args:
        options: What to fit, and how.
        quiet: Whether nothing is told but the result.

    Returns:
        The model, as it was saved.

    Raises:
        ArgumentError, DataError: Something is given wrong; nothing has been written.
        FitError: The model could not be fitted; nothing has been written, nor is it on Ctrl-C.
    """
    data = read_table_data(options.table, tests=False)
    check_size((options.recipe.model,), *data.train[0].shape)
    for note in () if quiet else data.notes:
        tell(note)
    with open_work_folder(options.out, MODEL, MODEL_FILES) as work:
        try:
            with threads_for(len(data.train[1])):
                saved = fit_recipe(options.recipe, data, progress=shows_progress(quiet))
            add_model(work, saved)
            work.publish(record_of(saved))
        except BaseException:
            work.discard()
            raise
    count = len(data.train[1])
    if saved.fitted.note:
        tell(saved.fitted.note)
    lml = _score("LML", log_marginal_likelihood, saved)
    loo = _score("LOO", leave_one_out, saved)
    seconds = f"{saved.fitted.seconds:.1f} seconds"
    give(f"{options.recipe.model} of {count} rows: {lml}, {loo}; {seconds}")
    give(f"Model: {options.out}")
    return saved


def _score(name: str, score: Callable[..., Tensor], saved: SavedModel) -> str:
    """A score in words; the model is saved, and stays so, where it cannot be computed."""
    try:
        return f"{name} {float(score(saved.model, units='original').sum()):.1f} nats"
    except Exception as error:
        return f"no {name} ({error_text(error)})"
