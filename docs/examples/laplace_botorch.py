import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf

from gpclml import Laplace


def objective(x):  # to be maximized on the unit square
    return -((x - torch.tensor([0.3, 0.7], dtype=x.dtype)) ** 2).sum(-1, keepdim=True).sqrt()


torch.manual_seed(0)
x = torch.rand(10, 2, dtype=torch.float64)
y = objective(x)
print(f"best of ten at random {y.max().item():.3f}")
for _ in range(5):
    scale = Standardize(1)
    targets = scale(y)[0]
    # Of a smooth activation: the covariance has the kinks of the network's gradient.
    layers = torch.nn.Linear(2, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)
    network = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(500):
        optimizer.zero_grad()
        (network(x) - targets).square().mean().backward()
        optimizer.step()
    posterior = Laplace(network, "regression", weights="all", structure="full")
    model = posterior.fit((x, targets), progress=False).to_botorch(outcome_transform=scale.eval())
    acquisition = LogExpectedImprovement(model, best_f=y.max())
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    new, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=64)
    x, y = torch.cat([x, new]), torch.cat([y, objective(new)])

print(f"best after five more {y.max().item():.3f}")
