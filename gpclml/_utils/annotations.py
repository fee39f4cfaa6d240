"""Checks of values against type annotations, and annotations in words."""

from __future__ import annotations

import inspect
import itertools
import numbers
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy
import torch
from torch import Tensor

FEW = 1000
"""Number of elements of a sequence that are checked."""


def mismatch(name: str, value: Any, hint: Any) -> tuple[str, Any, Any] | None:
    """Name, value and annotation of what does not fit, of an element where it is one; or None."""
    if hint is Any:
        return None
    check = _CHECKS.get(hint) if isinstance(hint, type) else None
    origin, arguments = get_origin(hint), get_args(hint)
    if check is not None:
        return None if check(value) else (name, value, hint)
    if origin in (Union, types.UnionType):
        results = [mismatch(name, value, argument) for argument in arguments]
        if None in results:
            return None
        # An element of the one kind of container that came says more than the union.
        inner = (result for result in results if result is not None and result[0] != name)
        return next(inner, (name, value, hint))
    if isinstance(value, Mapping) and inspect.isclass(origin) and issubclass(origin, Mapping):
        keys, values = (*arguments, Any, Any)[:2]
        for key, entry in itertools.islice(value.items(), FEW):
            if not fits(key, keys):
                return f"{name}, a name in it", key, keys
            if not fits(entry, values):
                return f"{name}[{key!r}]", entry, values
        return None
    if origin in (Sequence, Iterable) and isinstance(value, list | tuple):
        for index, entry in enumerate(value[:FEW] if arguments else ()):
            if not fits(entry, arguments[0]):
                return f"{name}[{index}]", entry, arguments[0]
        return None
    fit = _fits_generic(value, origin, arguments) if origin else _fits_class(value, hint)
    return None if fit else (name, value, hint)


def fits(value: object, hint: Any) -> bool:
    """Whether a value has the type of an annotation, as far as a quick check can tell."""
    return mismatch("", value, hint) is None


def _fits_class(value: object, hint: Any) -> bool:
    if hint is None:
        return value is None
    if hint is Callable:
        return callable(value)
    if not inspect.isclass(hint):  # the variable of a generic
        return True
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    return isinstance(value, hint)


def _fits_generic(value: Any, origin: Any, arguments: tuple) -> bool:
    """Whether it fits ``origin[arguments]``, where that is no union and no container above."""
    first = arguments[0] if arguments else Any
    # By type alone: of a name that is not known, the names nearest to it are told elsewhere.
    if origin is Literal:
        return isinstance(value, tuple({type(name) for name in arguments}))
    if origin in (Callable, type):
        return callable(value)
    if not inspect.isclass(origin):
        return True
    # A text is a sequence of texts, which callers rarely mean where numbers are asked for.
    if isinstance(value, str) and origin in (Sequence, Iterable):
        return first in (str, Any)
    # Arrays and ranges hold numbers, which need not be looked at one by one.
    if isinstance(value, Tensor | numpy.ndarray | range) and origin is Sequence:
        is_meta = isinstance(value, Tensor) and value.is_meta
        return not is_meta and first in (int, float, Any)
    if origin is Sequence:
        indexed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
        return indexed and not isinstance(value, Mapping | bytes) and not inspect.isclass(value)
    if origin is Iterable and isinstance(value, dict | set):
        return all(fits(entry, first) for entry in itertools.islice(value, FEW))
    if origin is Iterable and isinstance(value, Tensor):
        return first in (int, float, Tensor, Any)
    if origin is tuple and isinstance(value, tuple | list):
        if arguments[1:] == (Ellipsis,):
            return all(fits(entry, first) for entry in value[:FEW])
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    return isinstance(value, origin) and not isinstance(value, bytes)


def known_names(hint: Any) -> tuple[str, ...]:
    """The texts that an annotation allows, if it allows some alone."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) not in (Union, types.UnionType):
        return ()
    literals = [argument for argument in get_args(hint) if get_origin(argument) is Literal]
    others = [argument for argument in get_args(hint) if argument not in literals]
    if any(fits("", argument) for argument in others):
        return ()
    return tuple(name for literal in literals for name in get_args(literal))


def is_integer(value: Any) -> bool:
    """Whether Python takes a value as an index: also numbers of numpy, and of a tensor."""
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


_CHECKS: dict[type, Callable[[Any], bool]] = {
    Tensor: lambda value: isinstance(value, Tensor) and not value.is_meta,
    int: is_integer,
    float: _is_number,
    bool: lambda value: isinstance(value, bool | int | numpy.bool_) and value in (0, 1),
    object: lambda value: True,
    type(None): lambda value: value is None,
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
    if isinstance(hint, type) and hint in _WORDS:
        return _WORDS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        *others, last = map(describe, arguments)
        return f"{', '.join(others)} or {last}"
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is Callable or hint is Callable:
        return "a function"
    if origin is not None:
        inner = [_PLURALS.get(kind) or describe(kind) for kind in arguments if kind is not Ellipsis]
        name = getattr(origin, "__name__", str(origin)).lower()
        name = f"an {name}" if name[0] in "aeiou" else f"a {name}"
        if inspect.isclass(origin) and issubclass(origin, Mapping):
            return f"{name} of {' to '.join(inner)}"
        return f"{name} of {' and '.join(dict.fromkeys(inner))}" if inner else name
    if isinstance(hint, TypeVar) or hint is Any:
        return "anything"
    return getattr(hint, "__name__", str(hint))
