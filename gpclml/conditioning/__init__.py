"""Which points are held out, and hence which points each score is conditioned on.

A strategy is asked for blocks of row indices; each block is scored jointly given every row
outside it, or given rows drawn beside it. Indices live on the CPU, so that a seed means the same
draw on every device.
"""

from gpclml import explain_moved
from gpclml.conditioning.fixed_points import HeldOut, LastPoints, LeaveOneOut
from gpclml.conditioning.partitions import partition_at_random, partition_by_class
from gpclml.conditioning.random_draws import KFold, RandomHoldout, RandomOrderings
from gpclml.conditioning.strategy import Conditioning, Split

__all__ = [
    "Conditioning",
    "HeldOut",
    "KFold",
    "LastPoints",
    "LeaveOneOut",
    "RandomHoldout",
    "RandomOrderings",
    "Split",
    "partition_at_random",
    "partition_by_class",
]

explain_moved(__name__)
