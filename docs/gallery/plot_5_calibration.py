"""# Intervals one can believe

An interval that promises 90 % and holds 70 % is worse than none. This page fits a GP to targets
with heavy tails, shows that its intervals are wrong, and fits a calibrated mixture beside it.
"""

# %%
# ## Data with a few wild values
import matplotlib.pyplot as plt
import torch

generator = torch.Generator().manual_seed(0)
x = 6 * torch.rand(500, 1, generator=generator, dtype=torch.float64)
tails = torch.distributions.StudentT(torch.tensor(2.0, dtype=torch.float64))
torch.manual_seed(0)  # distributions of PyTorch take no generator
y = (2 * x[:, 0]).sin() + 0.1 * tails.sample((500,))
train, test = slice(0, 120), slice(120, 500)

# %%
# ## One GP
#
# The histogram shows where test targets fall in their predicted distributions; it should be flat.
# That of the GP has a hump: most targets are closer to the mean than it says, because a few wild
# values made it estimate too much noise.
from gpclml import ConditionalMarginalLogLikelihood, GPRegression, LastPoints, StackedGP, fit_mll

model = GPRegression(x[train], y[train], "matern")
fit_mll(ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0)))
gp = model.predict(x[test], marginal=True)
gp = torch.distributions.Normal(gp.mean, gp.variance.sqrt())
stack = StackedGP(seed=0).fit(x[train], y[train], progress=False).predict(x[test])
places = {"one GP": gp.cdf(y[test]), "calibrated stack": stack.cdf(y[test])}
fig, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
for ax, (name, values) in zip(axes, places.items(), strict=True):
    ax.hist(values.numpy(), bins=10, range=(0, 1), color="0.7")
    ax.axhline(38, color="k", lw=0.8)
    ax.set(title=name, xlabel="share of the prediction below the target")

axes[0].set_ylabel("test rows")

# %%
# ## Coverage, promised and kept
#
# The stack fits the scale and the tails of its components to residuals of rows that they have not
# seen. Its curve should lie on the diagonal.
levels = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
fig, axes = plt.subplots(figsize=(4.5, 4), layout="constrained")
for name, values in places.items():
    kept = [float(((values - 0.5).abs() < level / 2).double().mean()) for level in levels]
    axes.plot(levels, kept, "o-", ms=3, label=name)

axes.plot([0, 1], [0, 1], color="k", lw=0.8)
axes.set(xlabel="promised", ylabel="kept", aspect="equal")
axes.legend(frameon=False)
for name, scores in {"one GP": gp.log_prob(y[test]), "stack": stack.log_density(y[test])}.items():
    print(f"{name}: {float(scores.mean()):.3f} nats a test row")
