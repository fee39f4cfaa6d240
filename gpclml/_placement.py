"""Whether tensors that are to be computed with together have one type and one device."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml.errors import ArgumentError

__all__ = ["check_module_device", "check_module_placement", "check_placement"]


def check_placement(argument: str, value: Tensor, like: Tensor) -> None:
    """Refuses a tensor of another type or on another device.

    Args:
        argument: Its name, as the caller writes it.
        value: The tensor.
        like: One that is as it should be.

    Raises:
        ArgumentError: It is not so; with both.
    """
    if value.dtype != like.dtype or value.device != like.device:
        got, expected = f"{value.dtype} on {value.device}", f"{like.dtype} on {like.device}"
        mend = "Move data, model and likelihood to one dtype and device with .to(...)."
        raise ArgumentError(argument, got, f"{expected}, as the model's output", mend)


def check_module_placement(argument: str, module: torch.nn.Module, like: Tensor) -> None:
    """Refuses a module with a parameter of another type or on another device.

    Args:
        argument: Its name, as the caller writes it.
        module: The module.
        like: As for :func:`check_placement`.

    Raises:
        ArgumentError: A parameter is not so; with its name.
    """
    for name, parameter in module.named_parameters():
        check_placement(f"{argument}.{name}", parameter, like)


def check_module_device(argument: str, module: torch.nn.Module, like: Tensor) -> None:
    """Refuses a module with a parameter on another device; types may differ within it.

    Args:
        argument: Its name, as the caller writes it.
        module: The module.
        like: As for :func:`check_placement`.

    Raises:
        ArgumentError: A parameter is elsewhere; with its name.
    """
    for name, parameter in module.named_parameters():
        if parameter.device != like.device:
            check_placement(f"{argument}.{name}", parameter, like)
