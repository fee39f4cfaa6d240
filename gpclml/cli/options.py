"""The options of a command as data, and the command line that gives these options."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpclml._utils.files import printable
from gpclml.cli.report.recipes import Recipe
from gpclml.errors import ArgumentError

__all__ = ["RunOptions", "TableOptions", "check_encodable"]


@dataclass(frozen=True)
class TableOptions:
    """Which table a command reads, and how; the options of the command have the same names."""

    data: Path
    target: str
    rows: int
    seed: int = 0
    drop: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    time_column: str | None = None

    @property
    def words(self) -> list[str]:
        """The words of a command line that give these options."""
        words = [str(self.data), "--target", self.target]
        for option, values in (
            ("--drop", self.drop), ("--categories", self.categories), ("--missing", self.missing),
        ):  # fmt: skip
            words += [word for value in values for word in (option, value)]
        if self.time_column is not None:
            words += ["--time-column", self.time_column]
        return [*words, "--rows", str(self.rows), "--seed", str(self.seed)]


@dataclass(frozen=True)
class RunOptions:
    """The options of ``compare``, which fits each of its models by the recipe, and of ``fit``."""

    table: TableOptions
    recipe: Recipe
    out: Path
    models: tuple[str, ...] | None = None

    def command(self, name: Literal["compare", "fit"]) -> str:
        """The command line that gives these options."""
        words = ["gpclml", name, *self.table.words]
        if name == "fit":
            words += ["--model", self.recipe.model]
        elif self.models is not None:
            words += ["--models", ",".join(self.models)]
        words += ["--objective", self.recipe.objective]
        if self.recipe.steps is not None:
            words += ["--steps", str(self.recipe.steps)]
        if self.recipe.restarts:
            words += ["--restarts", str(self.recipe.restarts)]
        return shlex.join([*words, "--out", str(self.out)])


def check_encodable(what: str, *texts: str) -> None:
    """Refuses texts of an option, or of what it names, that cannot be written as UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            shown = f"'{printable(text)}'"
            suggestion = "Rename it." if os.path.lexists(text) else ""
            raise ArgumentError(what, shown, "a text that is valid UTF-8", suggestion) from None
