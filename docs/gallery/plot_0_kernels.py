"""# What a kernel assumes: draws from the prior

A kernel says which functions are likely before any point was seen. Draws from the prior show it,
and a fit to a wave with a gap shows what it is good for.
"""

# %%
# ## Kernels and means
#
# Every kernel has variance 1. The lengthscale is 1, a sixth of the range shown; the rational
# quadratic mixes lengthscales; the spectral mixture has waves of period 1.5 that fade; the deep
# kernel is an RBF kernel of two features of a network.
import matplotlib.pyplot as plt
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel, SpectralMixtureKernel

from gpclml.kernels import MLP, DeepKernel, FeatureKernel, NetworkMean, PolynomialFeatures

torch.set_default_dtype(torch.float64)


def network(outputs, seed, scale):
    """A network with random weights, whose first layer is made steep enough to bend within ±3."""
    made = MLP([1, 50, 50, outputs], torch.nn.Tanh, scale, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        made[0].weight.mul_(2)
    return made


rational, mixture = RQKernel(), SpectralMixtureKernel(num_mixtures=1)
rational.initialize(lengthscale=1.0, alpha=0.2)
mixture.initialize(mixture_weights=1.0, mixture_means=1 / 1.5, mixture_scales=0.08)
kernels = {
    "RBF": RBFKernel(),
    "rational quadratic": rational,
    "Matern 5/2": MaternKernel(nu=2.5),
    "spectral mixture": mixture,
    "linear": FeatureKernel(PolynomialFeatures(1), 0.5),
    "polynomial, degree 3": FeatureKernel(
        PolynomialFeatures(3), torch.tensor([1, 1, 0.3, 0.03]) ** 2
    ),
    "deep": DeepKernel(network(2, 0, 6.0), RBFKernel(), residual=False),
    "RBF with a network mean": ScaleKernel(RBFKernel()).initialize(outputscale=0.02),
}
for kernel in kernels.values():
    if kernel.has_lengthscale:
        kernel.lengthscale = 1.0

# %%
# ## Three draws of each
colors = "#0072B2", "#D55E00", "#009E73"  # told apart by colour-blind readers too
x = torch.linspace(-3, 3, 300)
fig, panels = plt.subplots(2, 4, figsize=(10, 4.6), layout="constrained", sharex=True)
for ax, (name, kernel) in zip(panels.flat, kernels.items(), strict=True):
    with torch.no_grad():
        covariance = kernel(x[:, None]).to_dense() + 1e-8 * torch.eye(len(x))
        noise = torch.randn(len(x), 3, generator=torch.Generator().manual_seed(1))
        draws = torch.linalg.cholesky(covariance) @ noise
        if "mean" in name:
            draws += NetworkMean(network(1, 2, 6.0))(x[:, None])[:, None]
    for draw, color in zip(draws.T, colors, strict=True):
        ax.plot(x, draw, color=color, lw=1.3)
    ax.set_title(name, fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)

# %%
# - **RBF**: smooth, one scale. **Rational quadratic**: smooth, with bumps of several scales.
#   **Matern**: rougher, with kinks in the slope; the default of `GPRegression`.
# - **Spectral mixture**: waves, which go on beyond the data.
# - **Linear and polynomial**: few numbers, and far-off values beyond the data.
# - **Deep**: slow in one place and fast in another; which place is learned.
# - **Network mean**: one function for all draws, and little about it.
#
# ## Fitted to a wave with a gap
#
# Each is fitted by the LML to 50 scattered points, with none between 4 and 6 and none beyond 10.
# Bands are 90 % intervals of new points. The Matern kernel returns to the mean where there are no
# points. The spectral mixture continues the wave, if it starts from frequencies that the points
# can resolve: `spacing="grid"`. Started from the smallest gap between two points, as suits points
# on a grid, it takes frequencies that no such points show. The likelihood of a mixture has many
# optima, so each fit has four restarts; with one attempt the second mixture misses the wave too.
from gpclml import ExactMarginalLogLikelihood, GPRegression, fit_mll, log_marginal_likelihood
from gpclml.kernels import initialize_spectral_mixture

generator = torch.Generator().manual_seed(0)
points = 10 * torch.rand(60, generator=generator)
points = points[(points < 4) | (points > 6)]
targets = (4 * points).sin() + 0.3 * points
targets += 0.1 * torch.randn(len(points), generator=generator)


def mixture_on_a_grid():
    """The start of a spectral mixture, in the standardized units of a `GPRegression`."""
    plain = GPRegression(points, targets)
    x, y = plain.input_standardizer.transform(points[:, None]), plain.train_targets
    kernel = SpectralMixtureKernel(num_mixtures=4)
    return initialize_spectral_mixture(kernel, x, y, spacing="grid")


fitted = {
    "Matern 5/2": GPRegression(points, targets, "matern"),
    "spectral mixture, grid": GPRegression(points, targets, mixture_on_a_grid()),
    "spectral mixture, smallest gap": GPRegression(points, targets, "spectral_mixture"),
}
new = torch.linspace(0, 12, 300)
fig, panels = plt.subplots(1, 3, figsize=(10, 3), layout="constrained", sharey=True)
for ax, (name, model) in zip(panels, fitted.items(), strict=True):
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_mll(mll, restarts=4, progress=False)
    with torch.no_grad():
        normal = model.predict(new, marginal=True)
    half = 1.645 * normal.stddev
    ax.fill_between(new, normal.mean - half, normal.mean + half, color=colors[0], alpha=0.2, lw=0)
    ax.plot(new, normal.mean, color=colors[0])
    ax.plot(new, (4 * new).sin() + 0.3 * new, "--", color="0.4", lw=1, label="truth")
    ax.plot(points, targets, ".", color="k", ms=4)
    ax.set_title(name, fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    print(f"{name:31s} LML {log_marginal_likelihood(model).item():6.1f} nats")

panels[0].legend(frameon=False)
