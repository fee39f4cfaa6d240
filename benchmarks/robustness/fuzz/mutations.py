"""Wrong arguments made of valid ones: of another shape, type, value or size."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

__all__ = ["KINDS", "Mutation", "mutations_of"]

KINDS = ("shape", "type", "dtype", "device", "non-finite", "magnitude", "number", "name", "empty")
"""Kinds of mutations."""

Mutation = tuple[str, str, Callable[[Random], Any]]
"""Kind, name, and what makes the wrong argument."""

_WRONG_TYPES = {
    "None": None, "a string": "x", "an integer": 3, "a number": 0.5, "a list": [1.0, 2.0],
    "a dictionary": {"a": 1}, "an object": object(), "a type": int,
    "a tensor": torch.ones(3, dtype=torch.float64), "a module": torch.nn.Linear(2, 2),
}  # fmt: skip


def mutations_of(value: object, is_size: bool) -> list[Mutation]:
    """All mutations of an argument; huge numbers are none of one that says how much is done."""
    found: list[Mutation] = [
        ("type", f"{name}", lambda _, wrong=wrong: wrong)
        for name, wrong in _WRONG_TYPES.items()
        # A function of the caller's may raise what it will: its errors are its own.
        if type(wrong) is not type(value) and not (inspect.isroutine(value) and callable(wrong))
    ]
    if isinstance(value, Tensor):
        return [*found, *_of_tensor(value)]
    if isinstance(value, bool):
        return [*found, _number("two", 2)]
    if isinstance(value, int):
        return [*found, *_of_integer(value, is_size)]
    if isinstance(value, float):
        return [*found, *_of_number()]
    if isinstance(value, str):
        names = ("another name", "no such name"), ("no name", ""), ("spaces", "  "), ("bytes", b"x")
        return [*found, *(("name", name, _constant(wrong)) for name, wrong in names)]
    if isinstance(value, Mapping):
        return [*found, *_of_mapping(value, is_size)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [*found, *_of_sequence(value, is_size)]
    return found


def _constant(value: object) -> Callable[[Random], Any]:
    return lambda _: value


def _number(name: str, value: object) -> Mutation:
    return "number", name, _constant(value)


def _of_integer(value: int, is_size: bool) -> list[Mutation]:
    found = [_number("minus one", -1), _number("zero", 0), _number("a fraction", value + 0.5)]
    found += [_number("NaN", math.nan), _number("minus 2^63 - 1", -(2**63) - 1)]
    found.append(("type", "an integer as text", _constant(str(value))))
    if not is_size:
        huge = {"2^31": 2**31, "2^63": 2**63, "2^64": 2**64, "infinity": math.inf}
        found += [("magnitude", name, _constant(wrong)) for name, wrong in huge.items()]
    return found


def _of_number() -> list[Mutation]:
    values = {"zero": 0.0, "minus one": -1.0, "two": 2.0, "NaN": math.nan}
    sizes = {"infinity": math.inf, "minus infinity": -math.inf, "1e300": 1e300, "1e-320": 1e-320}
    found = [_number(name, value) for name, value in values.items()]
    found += [("magnitude", name, _constant(value)) for name, value in sizes.items()]
    found.append(("type", "a complex number", _constant(1j)))
    found.append(("type", "a number as text", _constant("0.5")))
    return found


def _of_sequence(values: Sequence, is_size: bool) -> list[Mutation]:
    same = list if isinstance(values, list) else tuple
    found: list[Mutation] = [("empty", "no element", _constant(same()))]
    if len(values):
        found += [
            ("shape", "an element less", _constant(same(values[:-1]))),
            ("shape", "an element twice", _constant(same([*values, values[-1]]))),
            ("type", "an element None", _constant(same([*values[:-1], None]))),
            ("type", "an element of text", _constant(same([*values[:-1], "x"]))),
        ]
        for kind, name, make in mutations_of(values[0], is_size):
            found.append((kind, f"element: {name}", _first(values, make)))
    return found


def _first(values: Sequence, make: Callable[[Random], Any]) -> Callable[[Random], Any]:
    same = list if isinstance(values, list) else tuple
    return lambda random: same([make(random), *values[1:]])


def _of_mapping(values: Mapping, is_size: bool) -> list[Mutation]:
    found: list[Mutation] = [("empty", "no entry", _constant({}))]
    for key, value in list(values.items())[:1]:
        found.append(("name", "another key", _constant({"no such name": value})))
        for kind, name, make in mutations_of(value, is_size):
            entry = lambda random, key=key, make=make: {**values, key: make(random)}  # noqa: E731
            found.append((kind, f"entry: {name}", entry))
    return found


def _of_tensor(value: Tensor) -> list[Mutation]:
    value = value.detach()
    found: list[Mutation] = [
        ("shape", "a dimension before", _constant(value.unsqueeze(0))),
        ("shape", "three members before", _constant(value.expand(3, *value.shape).clone())),
        ("shape", "a dimension after", _constant(value.unsqueeze(-1))),
        ("shape", "no dimension", _constant(value.flatten()[0] if value.numel() else value)),
        ("shape", "flat, of prime length", _constant(value.new_ones(11))),
        ("type", "numbers as a list", _constant(value.tolist())),
        ("type", "a numpy array", _constant(value.numpy())),
        ("dtype", "integers", _constant(value.nan_to_num().long())),
        ("dtype", "booleans", _constant(value > 0)),
        ("dtype", "complex numbers", _constant(value.to(torch.complex128))),
        ("dtype", "half precision", _constant(value.to(torch.float16))),
        ("dtype", "single precision", _constant(value.to(torch.float32))),
        ("dtype", "bytes", _constant(value.nan_to_num().to(torch.uint8))),
        ("device", "no memory", _constant(value.to("meta"))),
        ("number", "zeros", _constant(torch.zeros_like(value))),
        ("number", "minus ones", _constant(-torch.ones_like(value))),
        ("number", "negated", _constant(-value)),
    ]
    for dim in range(value.ndim):
        size = value.shape[dim]
        found += [
            ("shape", f"without dimension {dim}", _constant(value.select(dim, 0).clone())),
            ("shape", f"one longer in {dim}", _constant(_longer(value, dim))),
            ("shape", f"one shorter in {dim}", _constant(value.narrow(dim, 0, size - 1).clone())),
            ("empty", f"empty in {dim}", _constant(value.narrow(dim, 0, 0).clone())),
        ]
    if value.ndim > 1:
        found.append(("shape", "transposed", _constant(value.transpose(-1, -2).clone())))
    if value.is_floating_point():
        for name, wrong in (("NaN", math.nan), ("infinity", math.inf), ("-infinity", -math.inf)):
            found.append(("non-finite", f"one {name}", _one(value, wrong)))
        found.append(("non-finite", "all NaN", _constant(torch.full_like(value, math.nan))))
        largest = torch.finfo(value.dtype).max / 4
        found += [
            ("magnitude", "near the largest", _constant(value / value.abs().max() * largest)),
            ("magnitude", "near zero", _constant(value * torch.finfo(value.dtype).tiny)),
            ("magnitude", "one is huge", _one(value, largest)),
        ]
    else:
        for name, wrong in (("-9", -9), ("2^40", 2**40 if value.dtype == torch.int64 else 255)):
            if not (value.dtype == torch.uint8 and wrong < 0):
                found.append(("magnitude", f"one is {name}", _one(value, wrong)))
    return found


def _longer(value: Tensor, dim: int) -> Tensor:
    return torch.cat([value, value.narrow(dim, value.shape[dim] - 1, 1)], dim)


def _one(value: Tensor, wrong: float) -> Callable[[Random], Tensor]:
    def make(random: Random) -> Tensor:
        changed = value.detach().clone()
        if changed.numel():
            changed.view(-1)[random.randrange(changed.numel())] = wrong
        return changed

    return make
