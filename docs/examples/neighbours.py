import torch

from gpclml import ConditionalMarginalLogLikelihood, GPRegression, fit_mll
from gpclml.conditioning import NearestNeighbors

generator = torch.Generator().manual_seed(0)
x = torch.rand(50_000, 3, generator=generator)
y = (9 * x).sin().prod(-1) + 0.1 * torch.randn(50_000, generator=generator)
new, truth = x[49_000:], (9 * x[49_000:]).sin().prod(-1)

model = GPRegression(x[:49_000], y[:49_000])
mll = ConditionalMarginalLogLikelihood(model.likelihood, model, NearestNeighbors())
fit_mll(mll, "adam", steps=100, lr=0.1, progress=False)

predicted = model.predict(new, neighbors=128)
inside = ((predicted.mean - y[49_000:]).abs() < 1.645 * predicted.stddev).float().mean()
print(f"error {(predicted.mean - truth).square().mean().sqrt():.3f} of a noise of 0.1")
print(f"90 % intervals hold {100 * inside:.0f} %")
