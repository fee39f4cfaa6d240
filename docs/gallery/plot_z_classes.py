"""
# Classes and counts

A Gaussian process of a latent function, for targets that are not normal.
"""

# %%
# Two classes: the probability is sure where there are points of one class. Far from all points the
# latent function is uncertain, and the probability near one half.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons

from gpclml import GPClassification, GPCounts, LaplaceMarginalLogLikelihood, fit_mll

x, y = make_moons(120, noise=0.25, random_state=0)
classes = GPClassification(x, y, "rbf")
fit_mll(LaplaceMarginalLogLikelihood(classes.likelihood, classes))
axis = torch.linspace(-3, 4, 80, dtype=torch.float64)
grid = torch.cartesian_prod(axis, axis)
prediction = classes.predict(grid)

# %%
# Counts: a rate that varies, with intervals of new counts.

generator = torch.Generator().manual_seed(0)
t = torch.linspace(0, 1, 60, dtype=torch.float64)
counts = torch.poisson((1.5 + 1.5 * (7 * t).sin()).exp(), generator=generator)
model = GPCounts(t, counts)
fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
new = model.predict(t)

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
for axes, values, title in (
    (left, prediction.probabilities, "probability of class 1"),
    (middle, prediction.latent_variance.sqrt(), "deviation of the latent function"),
):
    colors = axes.pcolormesh(axis, axis, values.reshape(80, 80).T, cmap="cividis")
    figure.colorbar(colors, ax=axes)
    axes.scatter(*x.T, c=y, s=12, cmap="gray", edgecolors="white", linewidths=0.4)
    axes.set_title(title, fontsize=10)

right.plot(t, counts, ".", color="black")
right.plot(t, new.mean, color="#0072b2")
right.fill_between(
    t, new.quantile(0.05), new.quantile(0.95), alpha=0.3, color="#0072b2", step="mid"
)
right.set_title("counts: mean and 90 % of new ones", fontsize=10)
plt.show()

# %%
# Calibration: of points with a predicted probability of about p, a share p should be of class 1.

test_x, test_y = make_moons(2000, noise=0.25, random_state=1)
probabilities = classes.predict(test_x).probabilities
bins = torch.bucketize(probabilities, torch.linspace(0.1, 0.9, 9, dtype=torch.float64))
shares = [(probabilities[bins == b].mean(), test_y[bins == b].mean()) for b in range(10)]
figure, axes = plt.subplots(figsize=(3.4, 3.4), layout="constrained")
axes.plot([0, 1], [0, 1], color="gray", linewidth=0.8)
axes.plot(*zip(*shares, strict=True), "o", color="#0072b2")
axes.set(xlabel="predicted probability", ylabel="share of class 1")
plt.show()

# %%
# Outliers: a Student-t likelihood gives them little weight. It is a model of one's own, written as
# an ``ExactGP`` is.

from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import StudentTLikelihood
from gpytorch.means import ConstantMean

from gpclml import ExactMarginalLogLikelihood, GPRegression
from gpclml.models import LatentGP


class RobustGP(LatentGP):
    def __init__(self, x, y):
        super().__init__(x, y, StudentTLikelihood().to(x))
        self.mean_module = ConstantMean().to(x)
        self.covar_module = ScaleKernel(MaternKernel()).to(x)


truth = (6 * t).sin()
noise = torch.randn(60, generator=generator, dtype=torch.float64)
targets = truth + 0.1 * noise
targets[::7] += 3 * noise[::7].sign()
robust, normal = RobustGP(t, targets), GPRegression(t, targets)
fit_mll(LaplaceMarginalLogLikelihood(robust.likelihood, robust))
fit_mll(ExactMarginalLogLikelihood(normal.likelihood, normal))
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(t, targets, ".", color="black")
axes.plot(t, truth, color="gray", label="truth")
axes.plot(t, robust.predict(t).mean, color="#0072b2", label="Student-t")
axes.plot(t, normal.predict(t).mean, "--", color="#d55e00", label="normal noise")
axes.legend(fontsize=9)
plt.show()
