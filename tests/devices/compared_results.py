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


def leaves(
    value: Any, path: str = "", seen: dict[int, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and words of a result, each with the way to it."""
    seen = {} if seen is None else seen  # kept, so that no number is given twice
    if isinstance(value, bool | int | float | str | None | torch.dtype):
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
            yield path, value.tolist()
    elif isinstance(value, pd.DataFrame | pd.Series):
        yield from leaves(value.to_dict(), path, seen)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from leaves(entry, f"{path}[{key!r}]", seen)
    elif isinstance(value, list | tuple | Iterator):
        yield from leaves(dict(enumerate(value)), path, seen)
    elif isinstance(value, torch.distributions.Distribution):
        yield f"{path}.mean", value.mean
        if hasattr(value, "variance"):
            yield f"{path}.variance", value.variance
    elif isinstance(value, nn.Module):
        yield from leaves(dict(value.state_dict()), path, seen)
        for name in ("train_inputs", "train_targets"):
            yield from leaves(getattr(value, name, None), f"{path}.{name}", seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}", seen)
    elif type(value).__module__.startswith("gpclml"):
        yield from leaves(vars(value), path, seen)


def differences(
    expected: Any, result: Any, device: torch.device | None, rtol: float, ignored: str = "seconds"
) -> list[str]:
    """How a device's result differs from the CPU's: values, shapes, and tensors left elsewhere.

    The tolerance is relative to the largest number of a tensor; paths that match ``ignored`` are
    left out.
    """
    here, there = (
        {path: leaf for path, leaf in leaves(value) if not re.search(ignored, path)}
        for value in (expected, result)
    )
    wrong = [f"{path}: on one device alone" for path in here.keys() ^ there.keys()]
    for path in here.keys() & there.keys():
        wanted, value = here[path], there[path]
        if isinstance(value, Tensor) and value.is_floating_point() and device is not None:
            wrong += [] if value.device.type == device.type else [f"{path}: on {value.device}"]
        if not _equal(wanted, value, rtol):
            wrong.append(f"{path}: {value!r} for {wanted!r}")
    return sorted(wrong)


def _equal(wanted: Any, value: Any, rtol: float) -> bool:
    if isinstance(wanted, list | float) and isinstance(value, type(wanted)):  # lists of numpy's
        return np.shape(wanted) == np.shape(value) and np.allclose(
            wanted, value, rtol=rtol, atol=rtol, equal_nan=True
        )
    if not (isinstance(wanted, Tensor) and isinstance(value, Tensor)):
        return bool(wanted == value)
    if wanted.shape != value.shape or wanted.dtype != value.dtype:
        return False
    wanted, value = wanted.detach(), value.detach().cpu()
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(wanted, value)
    largest = max([1.0, *wanted[wanted.isfinite()].abs().flatten().tolist()])
    return torch.allclose(wanted, value, rtol=rtol, atol=rtol * largest, equal_nan=True)
