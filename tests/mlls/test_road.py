"""What objectives and fits say of the way in which they are computed."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from botorch.models import KroneckerMultiTaskGP, SingleTaskGP
from gpytorch.kernels import LinearKernel, PolynomialKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood

import gpclml
from gpclml import fit_mll
from gpclml.inference import Road
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss
from gpclml.models import GPRegression

CLOSED = "closed form, Cholesky"


class Plain(gpytorch.models.ExactGP):
    """A model as GPyTorch's users write it."""

    def __init__(self, x, y, kernel):
        super().__init__(x, y, GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Own(RBFKernel):
    """A subclass, whose forward may be any."""


def data(n=14):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.sin(4 * x).sum(-1)


def plain(kernel):
    return Plain(*data(), kernel).double().train()


def road(model, **options):
    return ConditionalMarginalLogLikelihood(model.likelihood, model.train(), **options).road()


@pytest.mark.parametrize(
    "kernel",
    [ScaleKernel(RBFKernel()), PolynomialKernel(2), RBFKernel() + LinearKernel()],
    ids=["rbf", "polynomial", "sum"],
)
def test_known_kernels_go_in_closed_form(kernel):
    assert road(plain(kernel)) == Road(CLOSED)
    assert str(road(plain(kernel))) == CLOSED


def test_other_kernels_go_by_gpytorch_for_a_reason():
    said = road(plain(ScaleKernel(Own())))
    assert said.way == "GPyTorch's kernel, Cholesky"
    assert said.reason == "Own is a subclass of RBFKernel"
    assert str(said) == "GPyTorch's kernel, Cholesky: Own is a subclass of RBFKernel"


def test_structure_and_solvers_have_ways_of_their_own():
    assert road(plain(LinearKernel())).way == "low rank plus a diagonal"
    x, y = data()
    tasks = KroneckerMultiTaskGP(x, torch.stack([y, y.cos()], -1), outcome_transform=None)
    assert road(tasks).way == "a Cholesky factor for each task"
    by_products = road(plain(RBFKernel()), solver="cg")
    assert by_products.way == "conjugate gradients"
    assert "was given this solver" in by_products.reason


def test_a_step_that_is_asked_about_draws_the_same_points():
    model = plain(RBFKernel())
    one, other = (ConditionalMarginalLogLikelihood(model.likelihood, model) for _ in range(2))
    one.road()
    output, target = model(*model.train_inputs), model.train_targets
    assert torch.equal(one(output, target), other(output, target))


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPRegression(*data()),
        lambda: plain(PolynomialKernel(2)),
        lambda: SingleTaskGP(data()[0], data()[1].unsqueeze(-1)),
    ],
    ids=["GPRegression", "ExactGP", "SingleTaskGP"],
)
@pytest.mark.filterwarnings("ignore::gpclml.fit.FitWarning")
def test_fits_by_gpytorchs_objective_go_in_closed_form(make):
    model = make().train()
    for kind in (ExactMarginalLogLikelihood, gpclml.LeaveOneOutPseudoLikelihood):
        assert fit_mll(kind(model.likelihood, model), steps=2).road == Road(CLOSED)


def test_losses_that_are_left_to_gpytorch_say_why():
    def reason(mll):
        loss = FixedLoss(mll)
        assert loss.road.way == "GPyTorch's evaluation"
        return loss.road.reason

    model = plain(Own())
    assert reason(ExactMarginalLogLikelihood(model.likelihood, model)).startswith("Own is a")
    other = LeaveOneOutPseudoLikelihood(model.likelihood, model)
    assert reason(other) == "LeaveOneOutPseudoLikelihood is an objective of its own"
    model = plain(LinearKernel())
    assert "low rank" in reason(ExactMarginalLogLikelihood(model.likelihood, model))
    model = plain(RBFKernel())
    model.compute_custom_loss = lambda mll: None
    assert "compute_custom_loss" in reason(ExactMarginalLogLikelihood(model.likelihood, model))
