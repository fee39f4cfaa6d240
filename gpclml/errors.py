"""Typed errors: each names the argument, what came, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from linear_operator.utils.errors import NanError

__all__ = [
    "ArgumentError",
    "DataError",
    "MissingError",
    "ModelModeError",
    "NonFiniteError",
    "NotConvergedError",
    "ShapeError",
    "UnknownNameError",
    "UnsupportedError",
]

# A checker that does not read upstream's source knows this base.
assert issubclass(NanError, RuntimeError)


class ArgumentError(ValueError):
    """An argument has a value that cannot be used.

    Args:
        argument: Name of the argument, as the caller writes it.
        got: What came; shown with ``str``.
        expected: What would have been accepted.
        suggestion: One sentence saying what to do about it.
    """

    def __init__(self, argument: str, got: object, expected: str, suggestion: str = "") -> None:
        super().__init__(f"{argument}: got {got}, expected {expected}. {suggestion}".rstrip())
        self.argument = argument

    def __reduce__(self) -> tuple[Any, ...]:
        # From its finished message, not from what that was made of.
        return BaseException.__new__, (type(self), *self.args), self.__dict__


class ShapeError(ArgumentError):
    """A tensor has the wrong shape."""


class NonFiniteError(ArgumentError, NanError):
    """A tensor holds NaN or infinite values.

    It is also a ``linear_operator`` ``NanError``, so that BoTorch's line search steps
    back from hyperparameters whose covariance overflows instead of giving up the fit.
    """


class UnsupportedError(ArgumentError, TypeError, RuntimeError):
    """A model, distribution or operation that the callee does not handle.

    It is a ``TypeError`` as Python's own are, and a ``RuntimeError`` as GPyTorch's are.
    """


class MissingError(UnsupportedError, AttributeError):
    """What another library asks an object for, and this kind of object does not have.

    It is an ``AttributeError``, so that ``hasattr`` is False as usual.
    """


class NotConvergedError(ArgumentError, NanError):
    """An iterative solver did not reach its tolerance, or an approximation fails.

    It is also a ``linear_operator`` ``NanError`` and so a ``RuntimeError``: a line search steps
    back from hyperparameters whose covariance cannot be solved with, and goes on.
    """


class ModelModeError(ArgumentError, RuntimeError):
    """A model is in eval mode where train mode is needed, or the reverse."""


class UnknownNameError(ArgumentError):
    """A name that is not known; the message lists the nearest known names.

    Args:
        argument: Name of the argument, as the caller writes it.
        name: The unknown name.
        known: All names that are known.
    """

    def __init__(self, argument: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        nearest = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
        suggestion = f"Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
        super().__init__(argument, repr(name), f"one of {', '.join(known)}", suggestion)


class DataError(OSError):
    """A data file is missing, corrupt or cannot be fetched."""
