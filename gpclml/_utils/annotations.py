"""Checks of values against type annotations, and annotations in words."""

from __future__ import annotations

import inspect
import numbers
import operator
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy
import torch
from torch import Tensor

FEW = 1000
"""Number of elements of a sequence that are checked."""


def fits(value: object, hint: Any) -> bool:
    """Whether a value has the type of an annotation, as far as a quick check can tell."""
    if hint is Any:
        return True
    check = _CHECKS.get(hint) if isinstance(hint, type) else None
    if check is not None:
        return check(value)
    if hint is None or hint is type(None):
        return value is None
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return isinstance(value, tuple({type(one) for one in get_args(hint)}))
    if origin is not None:
        return _fits_generic(value, origin, get_args(hint))
    if hint is Callable:
        return callable(value)
    if not inspect.isclass(hint):
        return True
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    return isinstance(value, hint)


def _fits_generic(value: object, origin: Any, arguments: tuple) -> bool:
    if origin in (Callable, type):
        return callable(value)
    if origin is os.PathLike:
        return isinstance(value, os.PathLike)
    if not inspect.isclass(origin):
        return True
    if issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return False
        keys, values = (*arguments, Any, Any)[:2]
        few = list(value.items())[:FEW]
        return all(fits(key, keys) and fits(one, values) for key, one in few)
    if origin is Sequence and not isinstance(value, Tensor | numpy.ndarray | list | tuple | range):
        if isinstance(value, str):
            return not arguments or arguments[0] in (str, Any)
        indexed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
        return indexed and not isinstance(value, Mapping | bytes) and not inspect.isclass(value)
    if origin in (Iterable, Sequence) and isinstance(value, list | tuple | dict | set):
        return not arguments or all(fits(one, arguments[0]) for one in list(value)[:FEW])
    if origin is Iterable:
        if isinstance(value, Tensor) and arguments:
            return arguments[0] in (int, float, Tensor, Any)
        if isinstance(value, str):
            return not arguments or arguments[0] in (str, Any)
        return isinstance(value, Iterable) and not isinstance(value, bytes)
    if origin is tuple and isinstance(value, tuple | list):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(fits(one, arguments[0]) for one in value[:FEW])
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin is Sequence:  # an array, or a range
        there = not isinstance(value, Tensor) or not value.is_meta
        return there and (not arguments or arguments[0] in (int, float, Any))
    return isinstance(value, origin)


def known_names(hint: Any) -> tuple[str, ...]:
    """The texts that an annotation allows, if it allows some alone."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) not in (Union, types.UnionType) or any(
        fits("", one) for one in get_args(hint) if get_origin(one) is not Literal
    ):
        return ()
    return tuple(name for one in get_args(hint) for name in known_names(one))


def first_unlike(name: str, value: Any, hint: Any) -> tuple[str, Any, Any]:
    """Name, value and annotation of the first element that does not fit, or of the value itself."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for one in arguments:
            found = first_unlike(name, value, one)
            if found[0] != name:
                return found
    elif inspect.isclass(origin) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        for key, one in list(value.items())[:FEW]:
            if not fits(key, arguments[0]):
                return f"{name}, a name in it", key, arguments[0]
            if not fits(one, arguments[1]):
                return f"{name}[{key!r}]", one, arguments[1]
    elif origin in (Sequence, Iterable) and isinstance(value, list | tuple) and arguments:
        for place, one in enumerate(value[:FEW]):
            if not fits(one, arguments[0]):
                return f"{name}[{place}]", one, arguments[0]
    return name, value, hint


def is_integer(value: Any) -> bool:
    """Whether Python takes a value as an index: also numbers of numpy, and of a tensor."""
    if isinstance(value, numbers.Integral):
        return True
    try:
        operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, numbers.Real):
        return True
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    return isinstance(value, numpy.ndarray) and value.ndim == 0 and value.dtype.kind in "fiu"


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool | numpy.bool_) or (isinstance(value, int) and value in (0, 1))


_CHECKS: dict[type, Callable[[Any], bool]] = {
    Tensor: lambda value: isinstance(value, Tensor) and not value.is_meta,
    int: is_integer,
    float: _is_number,
    bool: _is_truth,
    object: lambda value: True,
}
_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "text",
    Tensor: "a tensor",
    type(None): "None",
    torch.nn.Module: "a module",
}
_PLURALS = {int: "integers", float: "numbers", str: "texts", Tensor: "tensors"}


def describe(hint: Any) -> str:
    """An annotation in words."""
    if hint is None:
        return "None"
    if isinstance(hint, type) and hint in _WORDS:
        return _WORDS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        parts = [describe(one) for one in arguments]
        return f"{', '.join(parts[:-1])} or {parts[-1]}"
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is Callable or hint is Callable:
        return "a function"
    if origin is not None:
        inner = [_PLURALS.get(one) or describe(one) for one in arguments if one is not Ellipsis]
        name = getattr(origin, "__name__", str(origin)).lower()
        name = f"an {name}" if name[0] in "aeiou" else f"a {name}"
        if inspect.isclass(origin) and issubclass(origin, Mapping):
            return f"{name} of {' to '.join(inner)}"
        return f"{name} of {' and '.join(dict.fromkeys(inner))}" if inner else name
    if isinstance(hint, TypeVar) or hint is Any:
        return "anything"
    return getattr(hint, "__name__", str(hint))
