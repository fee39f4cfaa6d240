"""# Choose among kernels, or mix them

Several kernels fit about equally well. Which one should you take, how certain is that, and what
does a mixture gain?
"""

# %%
# ## Fit the candidates
import torch
from sklearn.datasets import load_diabetes

from gpclml import ConditionalMarginalLogLikelihood, GPRegression, LastPoints, fit_mll

inputs, targets = map(torch.tensor, load_diabetes(return_X_y=True, scaled=False))
x, y, new_x, new_y = inputs[:150], targets[:150], inputs[150:], targets[150:]
models = {}
for kernel in ("rbf", "rq", "matern", "spectral_mixture"):
    model = GPRegression(x, y, kernel)
    fit_mll(ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0)), steps=100)
    models[kernel] = model

# %%
# ## Compare them
#
# Three criteria are computed, each with the error of its estimate. The sentences below the table
# say what follows from them.
from gpclml import score_models

comparison = score_models(models)
comparison

# %%
# Dots are scores with their standard errors. Triangles are the same distances from the first-ranked
# model with the standard errors of paired differences, which are far smaller: the rows that are
# hard for one model are hard for the others.
import matplotlib.pyplot as plt

from gpclml import plot_compare

fig, axes = plt.subplots(3, 1, figsize=(7, 6.5), layout="constrained")
for criterion, ax in zip(("lml", "clml", "loo"), axes, strict=True):
    plot_compare(comparison, criterion, ax=ax)

# %%
# ## Learning curves: where the models differ
#
# The upper curves are the log density of the next point given the points before it. The LML is the
# sum of all of these terms; predictions from all data are like the terms at the right.
from gpclml.evaluation import plot_learning_curves

fig, axes = plt.subplots(2, 1, figsize=(7, 5), layout="constrained")
plot_learning_curves(comparison, ax=axes)

# %%
# ## Mix them
#
# Where models are close, choosing one of them is a gamble. Stacking mixes their predictive
# densities, with the weights that give held-out rows the most density.
from gpclml import StackedGP, marginal_log_predictive

for name, model in models.items():
    print(f"{name:17s} {float(marginal_log_predictive(model, new_x, new_y).mean()):.4f}")

stack = StackedGP(seed=0).fit(x, y, progress=False)
print(f"{'stack':17s} {float(stack.predict(new_x).log_density(new_y).mean()):.4f} nats a test row")
