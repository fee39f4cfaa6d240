import torch

from gpclml.conditioning import RandomHoldout
from gpclml.fit.distributed import DistributedConditioning, SharedTraining
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

if torch.distributed.is_torchelastic_launched():  # by torchrun; without it there is one process
    torch.distributed.init_process_group("gloo")
generator = torch.Generator().manual_seed(0)  # the same data in every process
x = torch.rand(500, 3, generator=generator)
y = (6 * x).sin().sum(-1) + 0.3 * torch.randn(500, generator=generator)
model = GPRegression(x, y, "deep_bottleneck")
conditioning = DistributedConditioning(RandomHoldout(0.1))
mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=0)
optimizer = torch.optim.Adam(mll.parameters(), lr=0.02)
training = SharedTraining(mll, optimizer)  # one start for all, and a check that all do the same
for step in range(60):
    optimizer.zero_grad()
    objective = mll(model(*model.train_inputs), model.train_targets)
    (-objective).backward()
    objective = training.average_gradients(objective)
    optimizer.step()
    if conditioning.rank == 0 and step % 20 == 19:
        print(f"step {step + 1}: {objective:.2f} nats per point")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
