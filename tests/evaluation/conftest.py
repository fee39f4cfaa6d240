"""Data and models that are compared."""

import pytest
import torch

from benchmarks.evidence.ledger.fourier import fourier_data
from gpclml.kernels import FourierFeatures
from gpclml.models import BayesianLinearModel, GPRegression


@pytest.fixture
def data():
    """Inputs of two columns and targets far from standardized, by number of points and seed."""

    def make(n=25, columns=2, seed=0):
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(n, columns, generator=generator, dtype=torch.float64)
        noise = torch.randn(n, generator=generator, dtype=torch.float64)
        return x, 37.0 * (torch.sin(5 * x.sum(-1)) + 0.2 * noise) + 5.0

    return make


@pytest.fixture
def models(data):
    """A good GP, a bad one and a linear model of the same data."""
    x, y = data()
    good = GPRegression(x, y, "rbf")
    good.covar_module.base_kernel.lengthscale = 0.8
    good.likelihood.noise = 0.05
    linear = BayesianLinearModel(x, y, prior_variance=900.0, noise=300.0)
    return {"good": good, "bad": GPRegression(x, y, kernel="matern"), "linear": linear}


@pytest.fixture(scope="session")
def fourier():
    """M3 and M9 of Lotfi et al. (2022, Section 4.3) on the 100 points of their figure."""
    x, y, _ = (torch.tensor(values)[:100] for values in fourier_data(15, 6, 500))
    return {
        name: BayesianLinearModel(x, y, FourierFeatures(frequencies), noise=0.01)
        for name, frequencies in (("M3", 3), ("M9", 9))
    }
