import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gpclml.conditioning import NearestNeighbors
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression


def average(tensors):
    """Replaces tensors by their means over the processes, with one all-reduce."""
    if dist.is_initialized():
        vector = parameters_to_vector(tensors)
        dist.all_reduce(vector)
        vector_to_parameters(vector / dist.get_world_size(), tensors)


if dist.is_torchelastic_launched():  # by torchrun; without it there is one process
    dist.init_process_group("gloo")

rank = dist.get_rank() if dist.is_initialized() else 0
generator = torch.Generator().manual_seed(0)  # the same data in every process
x = torch.rand(2000, 3, generator=generator)
y = (6 * x).sin().sum(-1) + 0.3 * torch.randn(2000, generator=generator)
model = GPRegression(x, y, "deep_joint", seed=0)  # and the same start
# Each process draws batches of its own.
mll = ConditionalMarginalLogLikelihood(model.likelihood, model, NearestNeighbors(), seed=rank)
optimizer = torch.optim.Adam(mll.parameters(), lr=0.02)
for step in range(60):
    optimizer.zero_grad()
    objective = mll.redrawn_objective()  # of a batch and its neighbours alone
    (-objective).backward()
    objective = objective.detach()
    average([objective, *(parameter.grad for parameter in mll.parameters())])
    optimizer.step()
    if rank == 0 and step % 20 == 19:
        print(f"step {step + 1}: {objective:.2f} nats per point")

if dist.is_initialized():
    dist.destroy_process_group()
