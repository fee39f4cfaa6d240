"""Line searches of float32 models end where float32 predictions are what their parameters say."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpclml import ConditionalMarginalLogLikelihood, GPRegression, LastPoints, fit_mll
from gpclml.fit import fit_gpytorch_mll_fused
from gpclml.fit.diagnosis import predicts_in_its_type
from gpclml.fit.search import limited_rounding
from gpclml.mlls.fixed_loss import fixed_loss

pytestmark = pytest.mark.filterwarnings("ignore")  # BoTorch's of float32; of a scale that runs away

KERNELS = {"matern": MaternKernel, "rbf": RBFKernel, "rq": RQKernel}
OBJECTIVES = {"lml": ExactMarginalLogLikelihood, "clml": ConditionalMarginalLogLikelihood}
NOISE = 0.01


def function(x):
    return x.sum(-1, keepdim=True) ** 2


def smooth(seed, n=50, outputs=1):
    generator = torch.Generator().manual_seed(seed)
    x, new_x = torch.rand(n, 2, generator=generator), torch.rand(100, 2, generator=generator)
    y = function(x) + NOISE * torch.randn(n, outputs, generator=generator)
    return x, y, new_x


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_fitted_model_of_botorch_predicts_a_smooth_function(kernel, objective, seed):
    x, y, new_x = smooth(seed)
    covariance = ScaleKernel(KERNELS[kernel](ard_num_dims=2))
    model = SingleTaskGP(x, y, covar_module=covariance)
    fit_gpytorch_mll(
        OBJECTIVES[objective](model.likelihood, model), optimizer=fit_gpytorch_mll_fused
    )
    with torch.no_grad():
        posterior = model.posterior(new_x)
        error = (posterior.mean - function(new_x)).square().mean().sqrt()
    assert error < 2 * NOISE  # the targets range over 3.5
    double = copy.deepcopy(model).double()
    double.set_train_data(x.double(), model.train_targets.double(), strict=False)
    with torch.no_grad():
        expected = double.posterior(new_x.double())
    off = (posterior.mean - expected.mean).abs() / (expected.variance.sqrt() + NOISE)
    assert off.max() < 0.5
    assert not list(model.added_loss_terms())


def test_several_outputs():
    x, y, new_x = smooth(0, outputs=2)
    model = SingleTaskGP(x, y, covar_module=ScaleKernel(
        MaternKernel(ard_num_dims=2, batch_shape=torch.Size([2])), batch_shape=torch.Size([2])
    ))  # fmt: skip
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_fused)
    with torch.no_grad():
        error = (model.posterior(new_x).mean - function(new_x)).square().mean(0).sqrt()
    assert (error < 2 * NOISE).all()


def test_a_model_without_digits_is_told_and_its_limit_is_a_term_of_the_objective():
    x, y, _ = smooth(0)
    model = SingleTaskGP(x, y, covar_module=ScaleKernel(MaternKernel(ard_num_dims=2)))
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    model.likelihood.noise, model.covar_module.outputscale = 1e-3, 1.0
    assert predicts_in_its_type(mll)
    with limited_rounding(mll, 1e4):
        within = fixed_loss(mll)
    torch.testing.assert_close(within, fixed_loss(mll))
    model.covar_module.outputscale = 1e5
    model.covar_module.base_kernel.lengthscale = 30.0
    assert not predicts_in_its_type(mll)
    assert model.training
    with limited_rounding(mll, 1e4):
        beyond = fixed_loss(mll)
    excess = torch.tensor(1e8 / 1e4).log().square()
    torch.testing.assert_close(beyond - fixed_loss(mll), excess, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_shape_that_is_no_longer_a_parameter_stays_finite(dtype):
    x, y, _ = smooth(1)
    model = GPRegression(x.to(dtype), y.squeeze(-1).to(dtype), "rq")
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_mll(mll, progress=False)
    assert model.covar_module.base_kernel.alpha <= 1.001e5
