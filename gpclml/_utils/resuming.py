"""Resuming a training from a checkpoint: draws, the optimizer's state, and whether data fit.

Digests of data and settings tell whether a checkpoint is of the training that goes on.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpclml._utils.arguments import callers_level
from gpclml.errors import ArgumentError, DataError

__all__ = [
    "Course",
    "ResumableDraws",
    "check_fingerprint",
    "check_state",
    "digest",
    "load_optimizer_state",
    "module_classes",
]

_KEY = "_extra_state"  # under which torch stores what get_extra_state returns


@dataclass
class Course:
    """What has been done of a training; the names of the fields are those of its checkpoint."""

    objectives: list[float] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    best: int = 0
    seconds: float = 0.0

    def content(self) -> dict[str, Any]:
        """A copy of the fields by name."""
        return {name: own[:] if isinstance(own, list) else own for name, own in vars(self).items()}

    def restored(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """The stored fields; a TypeError where some are missing or of other types."""
        for name, own in vars(self).items():
            if not isinstance(stored.get(name), list if isinstance(own, list) else (int, float)):
                raise TypeError(f"no {name} of the training")
        return {name: stored[name] for name in vars(self)}


def check_fingerprint(
    path: str | os.PathLike[str], stored: Mapping[str, Any] | None, own: Mapping[str, Any]
) -> None:
    """Raises a DataError, which names all differences, where it is of another training.

    A checkpoint of version 1, which has no fingerprint, cannot be compared, of which it warns.
    """
    if stored is None:
        warnings.warn(
            f"{path} was written by an earlier release, which did not store what it was trained "
            "on. Make sure that data and settings are the same.",
            stacklevel=callers_level(),
        )
        return
    missing = object()
    unlike = [
        name
        for name in [*own, *(name for name in stored if name not in own)]
        if stored.get(name, missing) != own.get(name, missing)
    ]
    if unlike:
        told = ", ".join(
            f"{name} ({stored.get(name)!r} there, {own.get(name)!r} here)"
            if all(len(repr(part.get(name))) < 40 for part in (stored, own))
            else name
            for name in unlike
        )
        raise DataError(
            f"checkpoint: {path} is of a training that differs in {told}. Give data and settings "
            "as they were to resume it, with the release that wrote it if names of classes changed "
            "since, or another file to start again."
        )


def check_state(
    path: str | os.PathLike[str], module: torch.nn.Module, state: Mapping[str, Any]
) -> None:
    """Raises a DataError where a stored ``state_dict`` has other entries than a module's."""
    own = module.state_dict()
    unlike = sorted(own.keys() ^ state.keys()) or [
        f"{name}: {tuple(getattr(state[name], 'shape', ()))} stored, {tuple(value.shape)} here"
        for name, value in own.items()
        if isinstance(value, Tensor) and getattr(state[name], "shape", None) != value.shape
    ]
    if unlike:
        raise DataError(
            f"path: {path} is a checkpoint of another architecture or objective "
            f"({', '.join(unlike[:3])}). Build model and objective as they were when they were "
            "trained, or give another file."
        )


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the state of an optimizer; a ValueError, before any change, where its shapes differ."""
    groups = optimizer.param_groups
    stored = [group["params"] for group in state["param_groups"]]
    if [len(group["params"]) for group in groups] != [len(numbers) for numbers in stored]:
        raise ValueError("the optimizer has other groups of parameters")
    numbers = [number for group in stored for number in group]
    parameters = [parameter for group in groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, entry in state["state"].get(number, {}).items():
            if isinstance(entry, Tensor) and entry.ndim and entry.shape != parameter.shape:
                shapes = f"{tuple(entry.shape)} for {tuple(parameter.shape)}"
                raise ValueError(f"the optimizer's {name} has shape {shapes}")
    optimizer.load_state_dict(dict(state))


class ResumableDraws(torch.nn.Module):
    """Base class of modules that draw from ``self._generator`` and resume their draws.

    The state of the generator is part of ``state_dict()``. A ``state_dict`` without it, from
    another objective, can be loaded too; the draws then continue from the module's own generator.
    """

    _generator: torch.Generator

    def get_extra_state(self) -> Tensor:
        """The state of the generator, so that a resumed training draws the same numbers."""
        return self._generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restores the state of the generator; raises an ArgumentError for anything else."""
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


def digest(value: Any) -> str:
    """The SHA-256 of a value, the same in every process and on every device.

    Mappings enter in the order of their keys' texts, other objects by class and public attributes.
    """
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def module_classes(module: torch.nn.Module) -> list[str]:
    """The classes of a module and of all its parts, by name."""
    return [f"{name}: {type(part).__qualname__}" for name, part in module.named_modules()]


def _feed(found: Any, value: Any) -> None:
    # Each value comes with its type and length, so that no two sequences of values coincide.
    if isinstance(value, Tensor):
        own = value.detach().cpu().contiguous()
        _feed(found, f"{own.dtype} {tuple(own.shape)}")
        found.update(own.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, (str, bytes, int, float, bool, complex, type(None))):
        text = repr(value).encode()
        found.update(f"{type(value).__name__} {len(text)} ".encode() + text)
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)} ".encode())
        for key in sorted(value, key=repr):
            _feed(found, key)
            _feed(found, value[key])
    elif isinstance(value, (list, tuple, set, frozenset)):
        entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        found.update(f"sequence {len(entries)} ".encode())
        for entry in entries:
            _feed(found, entry)
    elif isinstance(value, torch.Generator):
        _feed(found, value.get_state())
    elif hasattr(value, "__dict__") and not callable(value):
        _feed(found, type(value).__qualname__)
        _feed(found, {name: own for name, own in vars(value).items() if name[0] != "_"})
    else:
        _feed(found, f"{type(value).__qualname__} {getattr(value, '__qualname__', value)}")
