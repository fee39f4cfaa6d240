import torch
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel

from gpclml import ExactMarginalLogLikelihood, GPRegression, decompose, fit_mll

generator = torch.Generator().manual_seed(0)
years = torch.arange(96, dtype=torch.float64) / 12
noise = torch.randn(96, generator=generator, dtype=torch.float64)
sales = 0.3 * years**1.5 + (2 * torch.pi * years).sin() + 0.2 * noise

trend, season = ScaleKernel(RBFKernel()), ScaleKernel(PeriodicKernel())
model = GPRegression(years, sales, trend + season, standardize=False)
trend.base_kernel.lengthscale, season.base_kernel.period_length = 5.0, 1.0
fit_mll(ExactMarginalLogLikelihood(model.likelihood, model))

components = decompose(model, years, center=True, names=["trend", "season"])
for k, name in enumerate(["trend", "season"]):
    mean, error = components.mean[k], components.stddev[k].mean()
    print(f"{name}: from {mean.min():.1f} to {mean.max():.1f}, give or take {error:.2f}")

next_year = years[-12:] + 1
forecast = decompose(model, next_year).mean
assert torch.allclose(forecast.sum(0), model.predict(next_year).mean)
