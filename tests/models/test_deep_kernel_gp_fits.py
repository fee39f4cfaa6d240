"""DeepKernelGP in BoTorch's fits and in the optimization of its acquisition functions."""

from __future__ import annotations

import pytest
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from gpytorch.mlls import (
    ExactMarginalLogLikelihood,
    LeaveOneOutPseudoLikelihood,
)

from deep_kernel_cases import BARE, KERNELS, data, members, moved, points
from gpclml.conditioning import LastPoints, LeaveOneOut
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import find_networks
from gpclml.models.botorch import DeepKernelGP

pytestmark = [
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
OBJECTIVES = {
    "clml": ConditionalMarginalLogLikelihood,
    "lml": lambda likelihood, model: ConditionalMarginalLogLikelihood(
        likelihood, model, LastPoints(0)
    ),
    "loo": lambda likelihood, model: ConditionalMarginalLogLikelihood(
        likelihood, model, LeaveOneOut()
    ),
    "gpytorch-lml": ExactMarginalLogLikelihood,
    "gpytorch-loo": LeaveOneOutPseudoLikelihood,
}
FEW = {"optimizer_kwargs": {"options": {"maxiter": 6}}, "max_attempts": 1}


def values(mll):
    mll.train()
    with torch.no_grad():
        if hasattr(mll, "compute_custom_loss"):
            return -mll.compute_custom_loss()
        model = mll.model
        return mll(model(*model.train_inputs), model.train_targets)


@pytest.fixture(scope="module")
def fitted():
    x, y = data(n=12)
    model = DeepKernelGP(x, y, feature_share=0.3)
    fit_gpytorch_mll(ConditionalMarginalLogLikelihood(model.likelihood, model), **FEW)
    return model, y


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.OptimizationWarning")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_improved(name, kernel):
    batch_shape, m = (2,), 2
    model = moved(DeepKernelGP(*data(batch_shape, m), kernel=kernel, feature_share=0.3))
    mll = OBJECTIVES[name](model.likelihood, model)
    before, [network] = values(mll), find_networks(model)
    weights = [parameter.clone() for parameter in network.parameters()]
    fit_gpytorch_mll(mll, **FEW)
    assert not mll.training
    after = values(mll)
    assert after.shape == model._aug_batch_shape
    assert (after > before).all()
    moves = [(new != old).any() for new, old in zip(network.parameters(), weights, strict=True)]
    assert sum(moves) >= len(moves) - 1  # a shift of all features, the last bias, changes nothing


@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_are_fitted_each_by_itself(kernel):
    x, y = data(m=2)
    model = moved(DeepKernelGP(x, y, kernel=kernel, feature_share=0.3, **BARE))
    alone = [one for *_, one in members(model, x, y)]
    few = {"optimizer_kwargs": {"options": {"maxiter": 3}}, "max_attempts": 1}
    for one in (model, *alone):
        fit_gpytorch_mll(ConditionalMarginalLogLikelihood(one.likelihood, one), **few)
    found = values(ConditionalMarginalLogLikelihood(model.likelihood, model))
    expected = [values(ConditionalMarginalLogLikelihood(one.likelihood, one)) for one in alone]
    assert torch.allclose(found, torch.stack(expected), atol=1e-5)


def test_from_its_start_a_fit_is_that_of_single_task_gp():
    x, y = data(n=12)
    optima = []
    for model in (DeepKernelGP(x, y, input_transform=None), SingleTaskGP(x, y)):
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
        fit_gpytorch_mll(mll)
        optima.append(float(values(mll)))
    assert optima[0] == pytest.approx(optima[1], abs=2e-3)
    assert optima[0] > optima[1] - 1e-4


def test_acquisition_functions_are_optimized(fitted):
    (model, y), q = fitted, 3
    acquisition = qLogExpectedImprovement(model, best_f=y.max())
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    points_, value = optimize_acqf(acquisition, bounds, q, num_restarts=2, raw_samples=16)
    assert points_.shape == (q, 2)
    assert ((points_ >= 0) & (points_ <= 1)).all()
    with torch.no_grad():
        assert float(acquisition(points_)) == pytest.approx(float(value))
        assert float(value) > float(acquisition(points(200, q, 2)).max()) - 1e-3


def test_gradients_of_acquisition_functions(fitted):
    model, y = fitted
    acquisition = qLogExpectedImprovement(model, best_f=y.max())
    assert torch.autograd.gradcheck(acquisition, points(2, 2, 2).requires_grad_(), atol=1e-4)
