"""Modules whose ``state_dict`` holds the state of their random generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpclml.errors import ArgumentError

__all__ = ["ResumableDraws"]

_KEY = "_extra_state"  # under which torch stores what get_extra_state returns


class ResumableDraws(torch.nn.Module):
    """A module that draws from ``self._generator``, and whose draws go on after a reload.

    The state of the generator is part of ``state_dict()``. A ``state_dict`` without it, as one
    of another objective or of an earlier release, loads all the same: the draws then go on from
    where the module's own generator is, which for a module just built is its seed.
    """

    _generator: torch.Generator

    def get_extra_state(self) -> Tensor:
        """The state of the generator, so that a resumed training draws the same numbers."""
        return self._generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restores the state of the generator.

        Args:
            state: What :meth:`get_extra_state` returned.

        Raises:
            ArgumentError: It is no state of a generator.
        """
        try:
            self._generator.set_state(state.cpu())
        except (AttributeError, RuntimeError, TypeError) as error:
            shape = f" of shape {tuple(state.shape)}" if isinstance(state, Tensor) else ""
            raise ArgumentError(
                "state_dict", f"{_KEY}: a {type(state).__name__}{shape}",
                "the state of a torch.Generator of the CPU",
                "Leave the entry out to start the draws from the seed.",
            ) from error  # fmt: skip

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict.setdefault(prefix + _KEY, self.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
