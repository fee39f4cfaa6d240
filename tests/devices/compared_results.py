"""What a call returned, taken apart into tensors and numbers that another device's can equal."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from linear_operator import LinearOperator
from torch import Tensor, nn

_SIMPLE = (bool, int, float, str, type(None), torch.dtype)


def parts(
    value: Any, path: str = "", seen: dict[int, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and words of a result, each with the way to it."""
    seen = {} if seen is None else seen  # kept, so that no number is given twice
    if isinstance(value, _SIMPLE):
        yield path, value
        return
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, LinearOperator):
        yield path, value.to_dense()
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            yield path, value
    elif isinstance(value, pd.DataFrame | pd.Series):
        yield from parts(value.to_dict(), path, seen)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from parts(one, f"{path}[{key!r}]", seen)
    elif isinstance(value, list | tuple | Iterator):
        for place, one in enumerate(value):
            yield from parts(one, f"{path}[{place}]", seen)
    elif isinstance(value, torch.distributions.Distribution):
        yield f"{path}.mean", value.mean
        if hasattr(value, "variance"):
            yield f"{path}.variance", value.variance
    elif isinstance(value, nn.Module):
        yield from parts(dict(value.state_dict()), path, seen)
        for name in ("train_inputs", "train_targets"):
            yield from parts(getattr(value, name, None), f"{path}.{name}", seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name), f"{path}.{field.name}", seen)
    elif type(value).__module__.startswith("gpclml"):
        yield from parts(vars(value), path, seen)


def differences(
    expected: Any, found: Any, device: torch.device | None, rtol: float, ignored: str = "seconds"
) -> list[str]:
    """How a device's result differs from the CPU's: values, shapes, and tensors left elsewhere.

    Args:
        expected: Of the CPU.
        found: Of the device.
        device: Where the floating-point tensors of ``found`` are expected.
        rtol: Tolerance, relative to the largest number of a tensor.
        ignored: A regular expression for paths that are left out.
    """
    here, there = (
        {path: part for path, part in parts(result) if not re.search(ignored, path)}
        for result in (expected, found)
    )
    wrong = [f"{path}: only there" for path in there.keys() - here.keys()]
    wrong += [f"{path}: not there" for path in here.keys() - there.keys()]
    for path in here.keys() & there.keys():
        one, other = here[path], there[path]
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            wrong += [f"{path}: {fault}" for fault in _tensors(one, other, device, rtol)]
        elif isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            same = one.shape == other.shape and (
                np.allclose(one, other, rtol=rtol, atol=rtol, equal_nan=True)
            )
            wrong += [] if same else [f"{path}: {other.ravel()[:5]} for {one.ravel()[:5]}"]
        elif isinstance(one, float) and isinstance(other, float):
            close = np.isclose(one, other, rtol=rtol, atol=rtol, equal_nan=True)
            if not close:
                wrong.append(f"{path}: {other!r} for {one!r}")
        elif one != other:
            wrong.append(f"{path}: {other!r} for {one!r}")
    return sorted(wrong)


def _tensors(one: Tensor, other: Tensor, device: torch.device | None, rtol: float) -> Iterator[str]:
    if other.is_floating_point() and device is not None and other.device.type != device.type:
        yield f"on {other.device}"
    if one.shape != other.shape or one.dtype != other.dtype:
        yield f"{tuple(other.shape)} of {other.dtype} for {tuple(one.shape)} of {one.dtype}"
        return
    if not one.numel():
        return
    one, other = one.detach(), other.detach().cpu()
    if one.is_floating_point():
        size = max(1.0, one[one.isfinite()].abs().max().item() if one.isfinite().any() else 0.0)
        if not torch.allclose(one, other, rtol=rtol, atol=rtol * size, equal_nan=True):
            yield f"differs by {(one - other).abs().max().item():.2g} of {size:.2g}"
    elif not torch.equal(one, other):
        yield f"{other.flatten()[:5].tolist()} for {one.flatten()[:5].tolist()}"
