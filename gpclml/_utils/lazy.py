"""Packages whose names are imported when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any


def lazy_names(package: str, names: Sequence[str], modules: Sequence[str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that imports its names when they are first asked for.

    A name is that of one of the modules, or of what the first of them has, in its ``__all__`` if
    there is one: those that take least to import come first.
    """

    def lazy(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name in names:
            for module in map(lazy, modules):
                if name in getattr(module, "__all__", vars(module)):
                    return getattr(module, name)
        message = f"module {package!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[package])

    return lazy
