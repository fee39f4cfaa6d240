"""The options of a command as data, and the command line that gives these options."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from gpclml._utils.files import printable
from gpclml.cli.report.recipes import Recipe
from gpclml.errors import ArgumentError

__all__ = ["CompareOptions", "FitOptions", "TableOptions", "check_encodable"]


@dataclass(frozen=True)
class TableOptions:
    """Which table a command reads, and how.

    Attributes:
        data: Path of the table.
        target: Name of the column that is predicted.
        rows: Largest number of rows to train on.
        seed: Seed of the choice of rows, and of the fits.
        drop: Columns to leave out.
        categories: Columns whose values are categories.
        missing: Further texts that stand for a missing value.
    """

    data: Path
    target: str
    rows: int
    seed: int = 0
    drop: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The words of a command line that give these options."""
        words = [str(self.data), "--target", self.target]
        for option, values in (
            ("--drop", self.drop), ("--categories", self.categories), ("--missing", self.missing),
        ):  # fmt: skip
            words += [word for value in values for word in (option, value)]
        return [*words, "--rows", str(self.rows), "--seed", str(self.seed)]


@dataclass(frozen=True)
class FitOptions:
    """The options of ``fit``.

    Attributes:
        table: The table.
        recipe: The model and its fit.
        out: The folder to write.
    """

    table: TableOptions
    recipe: Recipe
    out: Path

    @property
    def command(self) -> str:
        """The command line that gives these options."""
        words = ["gpclml", "fit", *self.table.words, "--model", self.recipe.model]
        return shlex.join([*words, *_words_of_fit(self.recipe), "--out", str(self.out)])


@dataclass(frozen=True)
class CompareOptions:
    """The options of ``compare``.

    Attributes:
        table: The table.
        models: Names of models; None for those that the size of the table allows.
        recipe: How each model is fitted; the model that it names does not count.
        out: The folder to write.
    """

    table: TableOptions
    models: tuple[str, ...] | None
    recipe: Recipe
    out: Path

    @property
    def command(self) -> str:
        """The command line that gives these options."""
        words = ["gpclml", "compare", *self.table.words]
        if self.models is not None:
            words += ["--models", ",".join(self.models)]
        return shlex.join([*words, *_words_of_fit(self.recipe), "--out", str(self.out)])


def check_encodable(what: str, *texts: str) -> None:
    """Checks that texts can be written to a file as UTF-8.

    Args:
        what: Name of the option, or what the texts are.
        *texts: The texts.

    Raises:
        ArgumentError: A text holds bytes that are not UTF-8.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            shown = f"'{printable(text)}'"
            suggestion = "Rename it." if os.path.lexists(text) else ""
            raise ArgumentError(what, shown, "a text that is valid UTF-8", suggestion) from None


def _words_of_fit(recipe: Recipe) -> list[str]:
    words = ["--objective", recipe.objective]
    if recipe.steps is not None:
        words += ["--steps", str(recipe.steps)]
    return words + (["--restarts", str(recipe.restarts)] if recipe.restarts else [])
