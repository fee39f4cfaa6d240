"""Conditioning strategies: which points are held out, and which are conditioned on.

A strategy returns blocks of row indices. Each block is scored jointly given every row outside it,
or given rows drawn beside it. Indices are on the CPU, so that a seed gives the same draw on every
device.
"""

from typing import TYPE_CHECKING

from gpclml._utils.lazy import lazy_names
from gpclml.conditioning.neighbours import NearestNeighbors
from gpclml.conditioning.strategies import (
    Conditioning,
    HeldOut,
    KFold,
    LastPoints,
    LeaveOneOut,
    RandomHoldout,
    RandomOrderings,
    Split,
)

if TYPE_CHECKING:
    from gpclml.conditioning.batches import as_orders, partition_at_random, partition_by_class

__all__ = [
    "Conditioning",
    "HeldOut",
    "KFold",
    "LastPoints",
    "LeaveOneOut",
    "NearestNeighbors",
    "RandomHoldout",
    "RandomOrderings",
    "Split",
    "as_orders",
    "partition_at_random",
    "partition_by_class",
]

# Objectives of GPs need no batches of data.
__getattr__ = lazy_names(__name__, __all__, ["strategies", "neighbours", "batches"])
