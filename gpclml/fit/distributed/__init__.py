"""Steps whose held-out blocks are shared out among processes, their gradients averaged.

Each process holds the data and the model, scores a block of its own and steps with the mean of all
gradients: what one process does that averages the objective over the same blocks. Processes
are those of ``torch.distributed``, as ``torchrun`` starts them; without it there is one.
"""

from gpclml.fit.distributed.averaging import average_gradients, broadcast_parameters
from gpclml.fit.distributed.conditioning import DistributedConditioning
from gpclml.fit.distributed.shared_training import SharedTraining

__all__ = [
    "DistributedConditioning",
    "SharedTraining",
    "average_gradients",
    "broadcast_parameters",
]
