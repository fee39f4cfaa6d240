"""# Many points

An exact GP needs n³ operations a step and memory for n² numbers. Here each point is conditioned on
its nearest neighbours alone: a step costs the same for any number of points, and all of them help
to predict.
"""

# %%
# ## A function with many hills
#
# 20,000 points with noise. 1,500 of them, which an exact GP takes in a few seconds, are three or
# four on each hill.
import matplotlib.pyplot as plt
import torch

from gpclml import ConditionalMarginalLogLikelihood, GPRegression, LastPoints, fit_mll
from gpclml.conditioning import NearestNeighbors

generator = torch.Generator().manual_seed(0)
x = torch.rand(20_000, 2, generator=generator, dtype=torch.float64)


def truth(points):
    return (60 * points).sin().prod(-1)


y = truth(x) + 0.2 * torch.randn(20_000, generator=generator, dtype=torch.float64)

exact = GPRegression(x[:1500], y[:1500])
exact.covar_module.base_kernel.lengthscale = 0.3  # where it starts, it takes hills for noise
lml = ConditionalMarginalLogLikelihood(exact.likelihood, exact, LastPoints(m=0))
fit_mll(lml, progress=False)

# %%
# ## Steps that do not grow with the data
#
# Each step scores 128 points, drawn anew, each given its 32 nearest neighbours. Over the draws it
# is an unbiased estimate of the mean over all points.
model = GPRegression(x, y)
model.covar_module.base_kernel.lengthscale = 0.3
mll = ConditionalMarginalLogLikelihood(model.likelihood, model, NearestNeighbors(), seed=0)
result = fit_mll(mll, "adam", steps=100, lr=0.1, progress=False)
fig, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(result.history)
axes.set(xlabel="steps", ylabel="objective of the step, nats a point")
# mkdocs_gallery_thumbnail_number = 2

# %%
# ## Predictions from all points
#
# New points are given their 64 nearest neighbours among all 20,000.
side = torch.linspace(0, 1, 100, dtype=torch.float64)
grid = torch.cartesian_prod(side, side)
means = {
    "exact GP, 1,500 points": exact.predict(grid, marginal=True).mean,
    "given neighbours, 20,000 points": model.predict(grid, neighbors=64).mean,
    "true function": truth(grid),
}
fig, axes = plt.subplots(1, 3, figsize=(9, 3.3), sharey=True, layout="constrained")
for ax, (name, values) in zip(axes, means.items(), strict=True):
    picture = values.reshape(100, 100).T.numpy()
    ax.imshow(picture, origin="lower", extent=(0, 1, 0, 1), vmin=-1, vmax=1)
    ax.set_title(name, fontsize=10)
    error = (values - truth(grid)).square().mean().sqrt()
    print(f"{name}: off by {float(error):.2f}")

# %%
# [Many points](../large.md) has the other ways: conjugate gradients, random subsets, low rank, deep
# kernels given neighbours, several processes.
