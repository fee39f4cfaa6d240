"""# A figure of a paper: training speed

Models that learn fast generalize well. The evidence explains it: the log evidence is the sum of the
log densities of each point given the points before it. Lyle et al. (2020, Figure 1) estimate it
from below by draws from the posterior while data come in. This page repeats their comparison for
a linear model in Fourier features.
"""

# %%
# ## Evidence and its lower bounds
#
# With one draw at each point the estimate is L, which is a lower bound in expectation. The mean
# density of k draws gives a tighter bound. All of it is in closed form; nothing is trained.
import matplotlib.pyplot as plt
import torch

from gpclml import BayesianLinearModel, log_marginal_likelihood
from gpclml.evidence.training_speed import training_speed
from gpclml.kernels import FourierFeatures

generator = torch.Generator().manual_seed(0)
x = 10 * torch.rand(1000, generator=generator, dtype=torch.float64)
y = x.sin() + (4 * x).cos() / 2 + 0.3 * torch.randn(1000, generator=generator, dtype=torch.float64)
orders = range(1, 13)
rows = []
for order in orders:
    model = BayesianLinearModel(x, y, FourierFeatures(order), noise=0.09)
    speed = training_speed(model, 10, seed=0)
    with torch.no_grad():
        evidence = float(log_marginal_likelihood(model))
    rows.append([evidence, float(speed.multi_sample.value), float(speed.expected.value)])

evidences, ten, one = zip(*rows, strict=True)

# %%
# ## They rank models alike
#
# The data have the frequencies 1 and 4. All three curves are largest at four frequencies.
fig, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
for name, values in {"log evidence": evidences, "ten draws": ten, "L, one draw": one}.items():
    axes.plot(orders, values, "o-", label=name)
    print(
        f"{name:13s} is largest with {orders[max(range(12), key=values.__getitem__)]} frequencies"
    )

axes.set(xlabel="number of frequencies", ylabel="nats")
axes.legend(frameon=False)
