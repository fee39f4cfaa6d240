"""Losses of line searches on a GPU, which are recorded as a CUDA graph and replayed."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from device_steps import data
from gpytorch.priors import GammaPrior, LogNormalPrior
from pretended_gpu import GPU, pretended_gpu

from gpclml import ConditionalMarginalLogLikelihood, GPRegression, fit_mll
from gpclml.conditioning import KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.mlls.fixed_loss import FixedLoss

CONDITIONINGS = {
    "lml": LastPoints(m=0), "tenth": RandomHoldout(0.1, seed=0), "folds": KFold(4, seed=0),
    "loo": LeaveOneOut(),
}  # fmt: skip


def objective(device, conditioning, kernel="rbf", n=40, dtype=torch.float64):
    x, y = data(torch.device(device), dtype, n)
    model = GPRegression(x, y, kernel).train()
    base = model.covar_module.base_kernel
    base.register_prior("lengthscale_prior", LogNormalPrior(0.5, 1.0).to(x), "lengthscale")
    model.likelihood.register_prior("noise_prior", GammaPrior(1.1, 0.5).to(x), "noise")
    return ConditionalMarginalLogLikelihood(
        model.likelihood, model, CONDITIONINGS[conditioning]
    )  # fmt: skip


def losses(mll, count=5):
    """At points of a line, each with its gradients."""
    loss, found = FixedLoss(mll), []
    for step in range(count):
        with torch.no_grad():
            for parameter in mll.parameters():
                parameter.fill_(-0.3 * step)
                parameter.grad = torch.zeros_like(parameter)
        value = loss()
        found.append([value, *(parameter.grad.clone().cpu() for parameter in mll.parameters())])
    return found, loss


@pytest.mark.parametrize("kernel", ["rbf", "matern", "rq"])
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_what_is_recorded_reads_nothing(conditioning, kernel):
    with pretended_gpu() as reads:
        loss = FixedLoss(objective(GPU, conditioning, kernel))
        reads.clear()
        loss._without_reads()
    assert not reads


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_losses_that_cannot_be_recorded_are_the_same(conditioning):
    expected, _ = losses(objective("cpu", conditioning))
    with pretended_gpu():
        found, loss = losses(objective(GPU, conditioning))
    assert loss._recorded._graph is None
    _assert_same(found, expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_replayed_losses_are_those_of_the_cpu(conditioning):
    for kernel, n in (("rbf", 40), ("rbf", 700), ("matern", 40), ("rq", 40)):
        expected, _ = losses(objective("cpu", conditioning, kernel, n))
        found, loss = losses(objective(GPU, conditioning, kernel, n))
        assert loss._recorded._graph is not None
        _assert_same(found, expected)


def test_what_has_no_factor_is_computed_as_without_recording():
    with pretended_gpu():
        mll = objective(GPU, "lml")
        x = mll.model.train_inputs[0]
        mll.model.set_train_data(x[:20].repeat(2, 1), strict=False)
        mll.likelihood.noise_covar.register_constraint(
            "raw_noise", type(mll.likelihood.noise_covar.raw_noise_constraint)(0.0)
        )
        mll.likelihood.noise = 1e-18
        with pytest.warns(RuntimeWarning, match="jitter"):
            value = FixedLoss(mll)()
    assert math.isfinite(value)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fits_one_after_another_end_where_those_of_the_cpu_do():
    for n in (30, 60, 30):
        ends = []
        for device in ("cpu", "cuda"):
            mll = objective(device, "lml", n=n)
            ends.append(fit_mll(mll, progress=False).objective)
        assert ends[0] == pytest.approx(ends[1], abs=1e-5)


def _assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_a_loss_frees_its_memory_when_it_goes():
    with pretended_gpu():
        _, loss = losses(objective(GPU, "lml"))
        known = weakref.ref(loss)
        gc.collect()
        gc.disable()
        try:
            del loss
            assert known() is None
        finally:
            gc.enable()
