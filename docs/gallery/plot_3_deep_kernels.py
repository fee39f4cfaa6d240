"""# Deep kernels, with and without redrawing

A deep kernel is a network followed by a GP. Trained by the marginal likelihood, the network
overfits the training data. An objective that scores held-out points, drawn anew at each step,
overfits less. The task: by which angle was the image of a digit turned?
"""

# %%
# ## The data
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.ndimage import rotate
from sklearn.datasets import load_digits

generator = np.random.default_rng(1)
images = load_digits().images
chosen, angles = generator.permutation(len(images))[:800], generator.uniform(-45, 45, 800)
turned = np.stack(
    [rotate(images[k], a, reshape=False, order=1) for k, a in zip(chosen, angles, strict=True)]
)
x, y = torch.tensor(turned.reshape(800, 64) / 16), torch.tensor(angles)
fig, axes = plt.subplots(1, 6, figsize=(8, 1.7), layout="constrained")
for ax, image, angle in zip(axes, turned, angles, strict=False):
    ax.imshow(image, cmap="gray_r")
    ax.set_title(f"{angle:+.0f}°")
    ax.set_axis_off()

# %%
# ## Two objectives, otherwise the same
#
# Only the conditioning differs: `LastPoints(0)` gives the LML, `RandomHoldout()` the CLML of a
# tenth of the points, another tenth at each step.
from gpclml import ConditionalMarginalLogLikelihood, GPRegression, LastPoints, RandomHoldout

curves = {}
for name, conditioning in {"LML": LastPoints(0), "CLML": RandomHoldout()}.items():
    model = GPRegression(x[:300], y[:300], "deep_bottleneck")
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    curves[name] = []
    for step in range(301):
        if step % 20 == 0:
            errors = [
                (model.predict(x[part], marginal=True).mean - y[part]).square().mean().sqrt()
                for part in (slice(0, 300), slice(300, 800))
            ]
            curves[name].append([step, *map(float, errors)])
        optimizer.zero_grad()
        loss = -mll(model(*model.train_inputs), model.train_targets)
        loss.backward()
        optimizer.step()

# %%
# ## What they learn
#
# Both fit the training digits. On new digits the objective with redrawn points predicts better.
fig, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
for color, (name, rows) in zip(("C1", "C0"), curves.items(), strict=True):
    steps, train, test = np.array(rows).T
    axes.plot(steps, test, color=color, label=f"{name}, new digits")
    axes.plot(steps, train, "--", color=color, label=f"{name}, training digits")
    print(f"{name}: off by {test[-1]:.2f} degrees on new digits, {train[-1]:.2f} on those seen")

axes.set(xlabel="steps of Adam", ylabel="error in degrees (root mean square)", ylim=(0, 20))
axes.legend(frameon=False)

# %%
# `python -m benchmarks.demo` does this with five draws, beside an RBF GP, a plain network and
# boosted trees. Line searches suit kernels without a network (`fit_mll`); train networks by
# `fit_networks` or by Adam.
