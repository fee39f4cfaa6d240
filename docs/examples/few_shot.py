import torch

from gpclml.conditioning import LastPoints
from gpclml.meta import DeepKernelTransfer, PeriodicTasks, evaluate_tasks, train_on_tasks
from gpclml.mlls import ConditionalMarginalLogLikelihood

tasks = PeriodicTasks(support=5, queries=10, seed=0)  # sine waves of unknown height and phase
new = PeriodicTasks(support=5, queries=50, seed=1)
for name, m in (("LML", 0), ("CLML", 5)):
    torch.manual_seed(0)
    backbone = torch.nn.Sequential(
        torch.nn.Linear(1, 40), torch.nn.ReLU(), torch.nn.Linear(40, 40), torch.nn.ReLU()
    )
    model = DeepKernelTransfer(backbone, "rbf")
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=m))
    train_on_tasks(model, mll, tasks, steps=500, tasks_per_step=5, progress=False)
    scores = evaluate_tasks(model, new, 200)
    error, half = scores.values.mean(), scores.interval(scores.values)
    print(f"{name}: squared error {error:.2f} ± {half:.2f} over 200 new tasks, 95 % interval")
