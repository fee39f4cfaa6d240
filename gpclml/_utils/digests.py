"""Digests of data, settings and objects, by which files and processes are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["digest", "module_classes"]


def digest(value: Any) -> str:
    """The SHA-256 of a value, the same in every process.

    Tensors enter with dtype, shape and the bits of their entries, in C order, wherever they lie;
    mappings in the order of their keys' texts; other objects by their class and public attributes.

    Args:
        value: Tensors, primitives, objects of these, and sequences and mappings of all.

    Note:
        Costs a copy to the host of tensors that lie elsewhere, and about a second a gigabyte.
    """
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def module_classes(module: torch.nn.Module) -> list[str]:
    """The classes of a module and of all its parts, by name.

    Args:
        module: The module.
    """
    return [f"{name}: {type(part).__qualname__}" for name, part in module.named_modules()]


def _feed(found: Any, value: Any) -> None:
    # Each value with its type and its length before it, so that no two run together alike.
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
