"""Importing BoTorch without its side effect on the settings of GPyTorch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import gpytorch.settings
import linear_operator.settings


def load_botorch() -> None:
    """Imports BoTorch, if it is not imported yet, and leaves GPyTorch's settings as they are.

    A first import of BoTorch turns off GPyTorch's fast solves and raises the sizes up to which
    matrices are factored, for the whole process. Nobody expects that of a fit that only uses
    BoTorch's optimizers. A later ``import botorch`` does not change them either, since Python runs
    a module once.
    """
    if "botorch" in sys.modules:
        return
    kept = list(_settings())
    try:
        importlib.import_module("botorch")
    finally:
        for kind, name, value in kept:
            if getattr(kind, name) != value:
                setattr(kind, name, value)


def _settings() -> Iterator[tuple[type, str, object]]:
    """The flags and numbers that the classes of settings hold."""
    for module in (gpytorch.settings, linear_operator.settings):
        for kind in vars(module).values():
            if isinstance(kind, type):
                for name in dir(kind):
                    value = getattr(kind, name)
                    simple = value is None or isinstance(value, bool | int | float)
                    if simple and not name.startswith("__"):
                        yield kind, name, value
