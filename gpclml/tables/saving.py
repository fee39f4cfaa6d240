"""Estimators and models that are saved as tensors and primitives in one file."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml.errors import DataError


class Saved:
    """An object with a state of tensors and primitives, from which it can be made again."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """All that predictions need."""

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`_state` gave."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted estimator and its training rows to one file, without pickled objects.

        Args:
            path: File to write; replaced if it is there.

        Raises:
            ArgumentError: The estimator is not fitted.
            DataError: The file cannot be written.
        """
        write_checkpoint(path, f"gpclml.{type(self).__name__}", self._state())

    @classmethod
    def load(cls, path: str | os.PathLike[str], map_location: Any = None) -> Self:
        """Reads an estimator that :meth:`save` wrote; its predictions are the same bit for bit.

        Args:
            path: File to read.
            map_location: Where its tensors go, as for ``torch.load``.

        Raises:
            DataError: The file is missing, damaged or not such a checkpoint.
        """
        made = object.__new__(cls)
        state = read_checkpoint(path, f"gpclml.{cls.__name__}", map_location)
        try:
            made._restore(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"path: {path} cannot be restored ({type(error).__name__}: {error}). Restore a "
                "copy of it, or save the estimator again."
            ) from error
        return made
