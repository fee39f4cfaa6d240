"""Dtypes and devices that do not go together."""

from __future__ import annotations

import gpytorch
import pytest
import torch

from gpclml.conditioning import RandomHoldout
from gpclml.errors import ArgumentError
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

N = 30

# What is moved where, and what is named. "meta" stands for a device that is another one.
CASES = {
    "single target": (lambda m: None, torch.float32, r"target: got torch.float32 on cpu, expected"),
    "counts": (lambda m: None, torch.int64, "target: got torch.int64"),
    "target elsewhere": (lambda m: None, "meta", "target: got torch.float64 on meta"),
    "single likelihood": (lambda m: m.likelihood.float(), None, "likelihood.noise_covar.raw_noise"),
    "likelihood elsewhere": (lambda m: m.likelihood.to("meta"), None, "likelihood.noise_covar"),
    "single mean": (lambda m: m.mean_module.float(), None, "expected torch.float32"),
    "kernel elsewhere": (lambda m: m.covar_module.to("meta"), None, r"kernel\.raw_outputscale"),
}


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_mixed_is_named(case, solver):
    move, place, message = CASES[case]
    x = torch.rand(N, 2, dtype=torch.float64)
    model = GPRegression(x, x.sum(-1)).train()
    move(model)
    target = model.train_targets if place is None else model.train_targets.to(place)
    mll = ConditionalMarginalLogLikelihood(
        model.likelihood, model, RandomHoldout(0.2), solver=solver
    )
    with pytest.raises(ArgumentError, match=message), gpytorch.settings.debug(False):
        mll(model(x), target)
