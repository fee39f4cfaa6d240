"""The objectives by GPyTorch's names are GPyTorch's: value, gradient, signature, fits."""

from __future__ import annotations

import inspect

import gpytorch
import pytest
import torch
from botorch.models import SingleTaskGP

import gpclml
from gpclml.errors import UnsupportedError
from gpclml.fit import fit_mll

NAMES = ["ExactMarginalLogLikelihood", "LeaveOneOutPseudoLikelihood"]


def model():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20, 2, generator=generator, dtype=torch.float64)
    return SingleTaskGP(x, (3 * x).sin().sum(-1, keepdim=True))


@pytest.mark.parametrize("name", NAMES)
def test_value_gradient_and_signature_are_those_of_gpytorch(name):
    results = []
    for package in (gpclml, gpytorch.mlls):
        gp = model().train()
        mll = getattr(package, name)(gp.likelihood, gp)
        value = mll(gp(*gp.train_inputs), gp.train_targets)
        parameters = [parameter for _, parameter in sorted(gp.named_parameters())]
        results.append([value, *torch.autograd.grad(value, parameters)])
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)
    ours, theirs = (
        list(inspect.signature(getattr(package, name).__init__).parameters)
        for package in (gpclml, gpytorch.mlls)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_fits_are_in_closed_form(name):
    gp = model()
    result = fit_mll(getattr(gpclml, name)(gp.likelihood, gp), progress=False)
    assert result.road.way == "closed form, Cholesky"
    assert result.road.reason == ""


def test_a_list_of_models_is_refused_by_name():
    models = gpytorch.models.IndependentModelList(model())
    with pytest.raises(UnsupportedError, match="model: got IndependentModelList"):
        gpclml.ExactMarginalLogLikelihood(models.likelihood, models)
