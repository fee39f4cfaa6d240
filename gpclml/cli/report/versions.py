"""Versions of what computed a result."""

from __future__ import annotations

import importlib
import platform
from importlib import metadata

__all__ = ["package_versions"]

_PACKAGES = (
    "gpclml", "torch", "gpytorch", "linear-operator", "botorch", "numpy", "scipy", "pandas",
    "matplotlib",
)  # fmt: skip


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute, by name."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return str(importlib.import_module(package).__version__)
