import torch

from gpclml.conditioning import RandomHoldout
from gpclml.fit import fit_mll
from gpclml.inference import IterativePosterior
from gpclml.linalg import ConjugateGradients
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

generator = torch.Generator().manual_seed(0)
x = torch.rand(3000, 4, generator=generator, dtype=torch.float64)
y = (5 * x).sin().sum(-1) + 0.2 * torch.randn(3000, generator=generator, dtype=torch.float64)
model = GPRegression(x[:2900], y[:2900])

# A step sees 600 points, drawn afresh: its cost does not grow with the data. Given one point, the
# score is nearly the LML of the 600, by which a plain kernel is trained.
some = RandomHoldout(599 / 2900, condition_on=1)
mll = ConditionalMarginalLogLikelihood(model.likelihood, model, some)
fit_mll(mll, "adam", steps=80, lr=0.1, progress=False)

# 58 points given all others, without a matrix of n x n.
solver = ConjugateGradients(tolerance=1e-3)
model.train()  # a fit ends in eval mode
every = RandomHoldout(0.02, seed=0)
mll = ConditionalMarginalLogLikelihood(model.likelihood, model, every, solver=solver)
value = mll(model(*model.train_inputs), model.train_targets)
value.backward()
[report] = mll.last_solve
print(f"{value.item():.2f} nats per point; exact to a thousandth: {report.error_bound <= 1e-3}")

# Predictions given all points.
posterior = IterativePosterior(model, solver)
error = (posterior.mean(x[2900:]) - y[2900:]).square().mean().sqrt()
print(
    f"RMSE {error:.2f}, mean of the standard deviations "
    f"{posterior.variance(x[2900:]).sqrt().mean():.2f}"
)
