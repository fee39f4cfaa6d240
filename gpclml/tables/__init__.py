"""Regression and classes for tables: estimators in Python, and the command ``gpclml``.

Names are imported when they are first asked for, so that the command's help waits for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpclml.tables.candidates import (
        CANDIDATES,
        DEFAULT_CANDIDATES,
        DEFAULT_MANY_ROWS_CANDIDATES,
        MANY_ROWS_CANDIDATES,
        THOUSANDS_CANDIDATES,
        Calibration,
        Candidate,
        Component,
        fit_calibration,
    )
    from gpclml.tables.estimators import Classifier, Regressor
    from gpclml.tables.mixture import StackedPrediction
    from gpclml.tables.stacked import StackedGP

__all__ = [
    "CANDIDATES",
    "DEFAULT_CANDIDATES",
    "DEFAULT_MANY_ROWS_CANDIDATES",
    "MANY_ROWS_CANDIDATES",
    "THOUSANDS_CANDIDATES",
    "Calibration",
    "Candidate",
    "Classifier",
    "Component",
    "Regressor",
    "StackedGP",
    "StackedPrediction",
    "fit_calibration",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        rooms = ("candidates", "mixture", "stacked", "estimators")
        for module in rooms:
            names = vars(importlib.import_module(f"gpclml.tables.{module}"))
            if name in names:
                return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
