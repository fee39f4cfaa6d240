"""Whether values of a tensor may be looked at in the middle of a computation."""

from __future__ import annotations

import torch

__all__ = ["reads_are_free"]


def reads_are_free(device: torch.device) -> bool:
    """Whether a value is there when asked for; a GPU first does all that is queued.

    Args:
        device: Where the values are.
    """
    return device.type == "cpu"
