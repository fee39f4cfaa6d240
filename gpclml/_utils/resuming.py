"""States of modules: copied, compared with stored ones, and told apart by digests."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpclml.errors import ArgumentError, DataError


def copied_state(module: torch.nn.Module) -> dict[str, Any]:
    """A copy of the module's state, which training the module does not change."""
    state = module.state_dict()
    for name, value in state.items():
        state[name] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    return state


def check_state(
    path: str | os.PathLike[str], module: torch.nn.Module, state: Mapping[str, Any]
) -> None:
    """Raises a DataError where a stored ``state_dict`` has other entries than a module's."""
    expected = module.state_dict()
    unlike = sorted(expected.keys() ^ state.keys()) or [
        f"{name}: {tuple(getattr(state[name], 'shape', ()))} stored, {tuple(value.shape)} here"
        for name, value in expected.items()
        if isinstance(value, Tensor) and getattr(state[name], "shape", None) != value.shape
    ]
    if unlike:
        raise DataError(
            f"path: {path} is a checkpoint of another architecture or objective "
            f"({', '.join(unlike[:3])}). Build model and objective as they were when they were "
            "trained, or give another file."
        )


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
                "state_dict", f"_extra_state: a {type(state).__name__}{shape}",
                "the state of a torch.Generator of the CPU",
                "Leave the entry out to start the draws from the seed.",
            ) from error  # fmt: skip

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # By this name torch stores what get_extra_state returns.
        state_dict.setdefault(f"{prefix}_extra_state", self.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def versions_of(module: torch.nn.Module) -> tuple[tuple[int, int, int], ...]:
    """Which tensors parameters and buffers are, where they are stored, and how often they changed.

    Cheap, and another value wherever they may have changed, except by a write through ``.data``,
    which PyTorch does not count.
    """
    tensors = itertools.chain(module.parameters(), module.buffers())
    return tuple((id(p), p.data_ptr(), 0 if p.is_inference() else p._version) for p in tensors)


def module_classes(module: torch.nn.Module) -> list[str]:
    """The classes of a module and of all its parts, by name."""
    return [f"{name}: {type(child).__qualname__}" for name, child in module.named_modules()]


def content_digest(module: torch.nn.Module) -> str:
    """A digest of all that a module computes with: another one wherever that may have changed.

    It covers parameters, buffers, and attributes of all parts that are numbers, texts, tensors,
    arrays, or lists and mappings of these, by value: GPyTorch writes parameters in ways that a
    tensor's version does not count, and keeps data, fixed noise and settings of kernels in
    attributes. A change inside an object of any other kind is not seen.
    """
    internal = {"training", "_parameters", "_buffers", "_modules"}
    attributes = [
        {k: value for k, value in vars(child).items() if k not in internal and _is_plain(value)}
        for child in module.modules()
    ]
    return digest([module_classes(module), *module.parameters(), *module.buffers(), attributes])


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, Mapping)):
        return all(map(_is_plain, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, (Tensor, np.ndarray, str, bytes, int, float, complex, type(None)))


def digest(value: Any) -> str:
    """The SHA-256 of a value, the same in every process and on every device.

    Mappings enter in the order of their keys, other objects by class and public attributes.
    """
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Texts and tuples of them, of which no two kinds of values have the same."""
    if isinstance(value, Tensor):
        # Bytes alone would not tell a type or shape from another.
        entries = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return "tensor", str(value.dtype), tuple(value.shape), hashlib.sha256(entries).hexdigest()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return "mapping", *((repr(key), _plain(value[key])) for key in sorted(value, key=repr))
    if isinstance(value, (list, tuple)):
        return "sequence", *map(_plain, value)
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        return type(value).__name__, repr(value)
    if callable(value) or not hasattr(value, "__dict__"):
        return type(value).__qualname__, getattr(value, "__qualname__", str(value))
    public = {name: entry for name, entry in vars(value).items() if name[0] != "_"}
    return type(value).__qualname__, _plain(public)
