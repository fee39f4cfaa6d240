"""# Five points of a new curve

Many tasks are alike: sine waves of unknown height and phase. A deep kernel that was trained on
such tasks predicts a new one from five points, better than a GP that is fitted to these five
points alone (Deep Kernel Transfer, Patacchiola et al. 2020).
"""

# %%
# ## Train on tasks
#
# Each task has five points to condition on and ten to predict. The CLML given the five scores the
# ten.
import warnings

import matplotlib.pyplot as plt
import torch

from gpclml import ConditionalMarginalLogLikelihood, DeepKernelTransfer, GPRegression, LastPoints
from gpclml.fit import FitWarning, fit_mll
from gpclml.meta import PeriodicTasks, train_on_tasks

torch.manual_seed(0)
backbone = torch.nn.Sequential(
    torch.nn.Linear(1, 40), torch.nn.ReLU(), torch.nn.Linear(40, 40), torch.nn.ReLU()
)
model = DeepKernelTransfer(backbone, "rbf")
mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=5))
tasks = PeriodicTasks(support=5, queries=10, seed=0)
train_on_tasks(model, mll, tasks, steps=600, tasks_per_step=8, progress=False)

# %%
# ## New tasks
#
# Above is the transferred kernel, below a GP fitted to the five points alone. The band should hold
# 95 % of the points.
new = PeriodicTasks(support=5, queries=200, seed=1).draw(range(3))
with torch.no_grad():
    predicted = model.eval().predict(new)

fig, axes = plt.subplots(2, 3, figsize=(9, 4.5), sharex=True, sharey=True, layout="constrained")
for k in range(3):
    x, y = new.support_x[k].double(), new.support_y[k].double()
    at, truth = new.query_x[k, :, 0], new.query_y[k]
    order = at.argsort()
    alone = GPRegression(x, y, "rbf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)  # five points may look like noise
        fit_mll(ConditionalMarginalLogLikelihood(alone.likelihood, alone, LastPoints(m=0)))
    plain = alone.predict(new.query_x[k].double(), marginal=True)
    ways = {
        "transferred": (predicted.mean[k].squeeze(), predicted.stddev[k].squeeze()),
        "alone": (plain.mean, plain.variance.sqrt()),
    }
    for ax, (name, (mean, deviation)) in zip(axes[:, k], ways.items(), strict=True):
        band = (mean - 2 * deviation)[order], (mean + 2 * deviation)[order]
        ax.fill_between(at[order], *band, alpha=0.3)
        ax.plot(at[order], mean[order])
        ax.plot(at[order], truth[order], "k:", lw=1)
        ax.plot(x[:, 0], y, "k.", ms=8)
        error = (mean - truth).square().mean().sqrt()
        ax.set_title(f"{name}: off by {float(error):.2f}", fontsize=9)

axes[0, 0].set_ylim(-7, 7)
