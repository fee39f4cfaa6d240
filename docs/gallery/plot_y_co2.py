"""# Read a sum of kernels: CO2 at Mauna Loa

Carbon dioxide in the air over Mauna Loa rises from year to year, and falls each summer while plants
grow. A sum of kernels models both, and `decompose` gives each back with its error. The data and the
idea are those of Rasmussen and Williams (2006, Section 5.4.3).
"""

# %%
# ## A kernel for each cause
#
# Monthly means from 1958 to 2001, in parts per million. An RBF kernel of half a century is the
# trend. A periodic kernel of one year times an RBF kernel is a season that may change over the
# decades. A Matern kernel is what differs from year to year.
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from statsmodels.datasets import co2

from gpclml import ExactMarginalLogLikelihood, GPRegression, decompose, fit_mll

months = co2.load().data["co2"].resample("MS").mean().dropna()
years = torch.tensor(months.index.year + (months.index.month - 0.5) / 12, dtype=torch.float64)
concentration = torch.tensor(months.to_numpy(), dtype=torch.float64)
trend = ScaleKernel(RBFKernel())
season = ScaleKernel(PeriodicKernel() * RBFKernel())
weather = ScaleKernel(MaternKernel(nu=1.5))
model = GPRegression(years, concentration - 340, trend + season + weather, standardize=False)

# %%
# ## Start and fit
#
# Lengthscales are in years and scales in squared parts per million, since nothing is standardized.
# They start near what one expects. The period is a year and stays one.
trend.outputscale, trend.base_kernel.lengthscale = 50.0**2, 50.0
season.outputscale = 2.4**2
yearly, decades = season.base_kernel.kernels
yearly.lengthscale, yearly.period_length, decades.lengthscale = 1.5, 1.0, 90.0
yearly.raw_period_length.requires_grad_(False)
weather.outputscale, weather.base_kernel.lengthscale = 0.7**2, 1.0
fit_mll(ExactMarginalLogLikelihood(model.likelihood, model))

# %%
# ## Trend, season and the rest
#
# The season is stronger at the end than at the start. The last panel has the warm years 1973, 1988
# and 1998, and the slow growth after the eruption of Pinatubo in 1991. Bands are two standard
# deviations.
names = ["trend", "season", "from year to year"]
components = decompose(model, years, center=True, names=names)
axes = components.plot(months.index)
for ax in axes:
    ax.set_ylabel("ppm")

# %%
# ## What centering does
#
# The data do not say whether a constant belongs to the trend or to the season: one may be higher
# where the other is lower, so that neither is known well. Less its mean over the data each is.
for name, plain, centered in zip(
    names, decompose(model, years).stddev.mean(-1), components.stddev.mean(-1), strict=False
):
    print(f"{name}: standard deviation {plain:.2f} ppm, centered {centered:.2f} ppm")
