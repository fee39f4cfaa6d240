"""# Many points

An exact GP needs n³ operations a step and memory for n² numbers. Two ways keep the exact model and
cost less: steps on random subsets, and conjugate gradients.
"""

# %%
# ## Steps that do not grow with the data
#
# Each step sees 500 points, drawn anew. Given one of them, the score of the others is nearly their
# log marginal likelihood (LML), by which a plain kernel is trained; for a deep kernel condition on
# more of them, `RandomHoldout(100 / 4500, condition_on=400)`. Over the draws a step's objective is
# an unbiased estimate of its mean.
import matplotlib.pyplot as plt
import torch

from gpclml import (
    ConditionalMarginalLogLikelihood,
    ConjugateGradients,
    GPRegression,
    IterativePosterior,
    RandomHoldout,
    fit_mll,
)

generator = torch.Generator().manual_seed(0)
x = torch.rand(5000, 2, generator=generator, dtype=torch.float64)
y = (8 * x).sin().prod(-1) + 0.1 * torch.randn(5000, generator=generator, dtype=torch.float64)
model = GPRegression(x[:4500], y[:4500])
some = RandomHoldout(499 / 4500, condition_on=1)
mll = ConditionalMarginalLogLikelihood(model.likelihood, model, some)
result = fit_mll(mll, "adam", steps=80, lr=0.1, progress=False)
fig, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(result.history)
axes.set(xlabel="steps", ylabel="LML of the step, nats a point")
# mkdocs_gallery_thumbnail_number = 2

# %%
# ## Predictions from all points
#
# Conjugate gradients solve with all 4500 points to a tolerance that is checked, without a matrix
# of 4500 x 4500.
posterior = IterativePosterior(model, ConjugateGradients(tolerance=1e-3))
mean = posterior.mean(x[4500:])
print(f"off by {float((mean - y[4500:]).square().mean().sqrt()):.3f}; the noise is 0.1")
side = torch.linspace(0, 1, 40, dtype=torch.float64)
grid = torch.cartesian_prod(side, side)
fig, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
for ax, (name, values) in zip(
    axes,
    {"predicted": posterior.mean(grid), "true": (8 * grid).sin().prod(-1)}.items(),
    strict=True,
):
    picture = values.reshape(40, 40).T.numpy()
    ax.imshow(picture, origin="lower", extent=(0, 1, 0, 1), vmin=-1, vmax=1)
    ax.set_title(name)
