"""# What the marginal likelihood gets wrong

The log marginal likelihood (LML) is the log probability of all data under the prior, before any
point was seen. A flexible model with a vague prior loses on the first points, and may predict best
after them all the same. This page shows such a case (after Lotfi et al. 2022, section 4).
"""

# %%
# ## Two models of a wave
#
# Both models are linear in sines and cosines, with prior variance 1 for each weight; one has three
# frequencies, the other nine. The data have nine frequencies, with weights that fall with the
# square of the frequency (the paper's data). So the small model is wrong, and the prior of the
# large one expects larger weights than there are.
import matplotlib.pyplot as plt
import numpy as np
import torch

from gpclml import (
    BayesianLinearModel,
    RandomOrderings,
    conditional_log_marginal_likelihood,
    log_marginal_likelihood,
)
from gpclml.kernels import FourierFeatures

d = np.arange(1, 10)
sines, cosines = np.random.RandomState(15).randn(2, 9) / d**2  # the seeds of the paper's code
random = np.random.RandomState(6)
place = np.linspace(0, 10, 500)
random.shuffle(place)
function = np.sin(np.outer(place, d)) @ sines + np.cos(np.outer(place, d)) @ cosines
x, y = torch.tensor(place)[:, None], torch.tensor(function + 0.1 * random.randn(500))


def model_of(order, n):
    return BayesianLinearModel(x[:n], y[:n], FourierFeatures(order), noise=0.01)


# %%
# ## Which model is preferred, and which predicts better
#
# The figure shows the advantage of the large model for growing n: by the LML, by the CLML (random
# fifths of the points given the others), and in the log density of 300 test points. Above zero
# the large model is better.
from gpclml import marginal_log_predictive

sizes = [20, 30, 40, 60, 80, 100, 150, 200]
rows = {"LML": [], "CLML": [], "test": []}
for n in sizes:
    small, large = model_of(3, n), model_of(9, n)
    with torch.no_grad():
        m = n - n // 5
        gaps = [log_marginal_likelihood(one) / n for one in (small, large)]
        rows["LML"].append(float(gaps[1] - gaps[0]))
        gaps = [
            conditional_log_marginal_likelihood(one, RandomOrderings(100, m)).mean() / (n - m)
            for one in (small, large)
        ]
        rows["CLML"].append(float(gaps[1] - gaps[0]))
        gaps = [marginal_log_predictive(one, x[200:], y[200:]).mean() for one in (small, large)]
        rows["test"].append(float(gaps[1] - gaps[0]))

fig, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
for name, values in rows.items():
    axes.plot(sizes, values, "o-", label=name)

axes.axhline(0, color="k", lw=0.8)
axes.set(xlabel="n", ylabel="large less small model, nats a point")
axes.legend(frameon=False)
for name, values in rows.items():
    print(f"{name:5s}", " ".join(f"{value:+6.2f}" for value in values))

# %%
# ## Why the LML is wrong here
#
# The LML is the sum of the log densities of each point given the points before it. The first terms
# of the large model are bad, because its prior is vague. They stay in the sum, although they say
# nothing about predictions from all data.
from gpclml import learning_curve

fig, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
with torch.no_grad():
    for order in (3, 9):
        curve = learning_curve(model_of(order, 100), orderings=100, seed=0).mean(0)
        axes.plot(range(1, 101), curve, label=f"{order} frequencies")

axes.set(xlabel="number of points seen before", ylabel="log density of the next point, nats")
axes.legend(frameon=False)
