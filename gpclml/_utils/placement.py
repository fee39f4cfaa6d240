"""Whether tensors that are to be computed with together have one type and one device."""

from __future__ import annotations

from torch import Tensor

from gpclml.errors import ArgumentError

__all__ = ["check_placement"]


def check_placement(
    argument: str, value: Tensor, like: Tensor, name: str = "the model's output"
) -> None:
    """Refuses a tensor of another type or on another device.

    Args:
        argument: Its name, as the caller writes it.
        value: The tensor.
        like: One that is as it should be.
        name: What that one is.

    Raises:
        ArgumentError: It is not so; with both.
    """
    if value.dtype != like.dtype or value.device != like.device:
        got, expected = f"{value.dtype} on {value.device}", f"{like.dtype} on {like.device}"
        mend = "Move data, model and likelihood to one dtype and device with .to(...)."
        raise ArgumentError(argument, got, f"{expected}, as {name}", mend)
