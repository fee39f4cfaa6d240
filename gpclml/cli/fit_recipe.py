"""Fitting a named model of a table, with what it warns of as part of the result."""

from __future__ import annotations

import time
from dataclasses import asdict

from linear_operator.utils.errors import NanError, NotPSDError

from gpclml.cli.errors import FitError
from gpclml.cli.report import FittedModel, Recipe, package_versions
from gpclml.cli.saved_models import SavedModel
from gpclml.cli.table_data import TableData
from gpclml.cli.warned import warned

__all__ = ["fit_recipe", "made_from"]


def fit_recipe(recipe: Recipe, data: TableData, progress: bool) -> SavedModel:
    """The model fitted on the training rows.

    Args:
        recipe: Which model, and how.
        data: The table.
        progress: Whether to show progress bars on standard error.

    Raises:
        FitError: Its start cannot be evaluated.
    """
    start = time.perf_counter()
    with warned() as said:
        try:
            fit = recipe.fit(*data.train, progress=progress)
        except (NanError, NotPSDError) as error:
            raise FitError(f"{recipe.model} could not be fitted: {error}") from error
    told = " ".join(filter(None, (fit.note, *said)))
    fitted = FittedModel(recipe, time.perf_counter() - start, told, fit.problem)
    return SavedModel(fit.model, data.encoding, fitted, made_from(recipe, data))


def made_from(recipe: Recipe, data: TableData) -> dict[str, object]:
    """What decides the fitted model: data, rows, recipe, packages."""
    return {**data.made_from, "recipe": asdict(recipe), "packages": package_versions()}
