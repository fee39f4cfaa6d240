"""What objectives and fits say of the way in which they are computed."""

import pytest
import torch
from botorch.models import KroneckerMultiTaskGP, SingleTaskGP
from exact_gps import PlainGP
from gpytorch.kernels import LinearKernel, PolynomialKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood

import gpclml
from gpclml import fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss
from gpclml.models import GPRegression

CLOSED = "closed form, Cholesky"


class OwnKernel(RBFKernel):
    """A subclass, whose forward may be any."""


def data(n=14):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.sin(4 * x).sum(-1)


def plain(kernel):
    return PlainGP(*data(), kernel).double().train()


def tasks():
    x, y = data()
    return KroneckerMultiTaskGP(x, torch.stack([y, y.cos()], -1), outcome_transform=None)


ROADS = {
    "rbf": (lambda: plain(ScaleKernel(RBFKernel())), "auto", CLOSED),
    "polynomial": (lambda: plain(PolynomialKernel(2)), "auto", CLOSED),
    "sum": (lambda: plain(RBFKernel() + LinearKernel()), "auto", CLOSED),
    "own kernel": (
        lambda: plain(ScaleKernel(OwnKernel())),
        "auto",
        "GPyTorch's kernel, Cholesky: OwnKernel is a subclass of RBFKernel",
    ),
    "linear": (lambda: plain(LinearKernel()), "auto", "low rank plus a diagonal"),
    "tasks": (tasks, "auto", "a Cholesky factor for each task"),
    "solver": (lambda: plain(RBFKernel()), "cg", "conjugate gradients: the objective was given"),
}


@pytest.mark.parametrize("name", ROADS)
def test_the_way_of_a_step_and_why_not_a_faster_one(name):
    make, solver, words = ROADS[name]
    model = make().train()
    road = ConditionalMarginalLogLikelihood(model.likelihood, model, solver=solver).road()
    assert str(road).startswith(words)
    assert road.way == words.partition(":")[0]


def test_a_step_that_is_asked_about_draws_the_same_points():
    model = plain(RBFKernel())
    asked, other = (ConditionalMarginalLogLikelihood(model.likelihood, model) for _ in range(2))
    asked.road()
    output, target = model(*model.train_inputs), model.train_targets
    assert torch.equal(asked(output, target), other(output, target))


MODELS = {
    "GPRegression": lambda: GPRegression(*data()),
    "ExactGP": lambda: plain(PolynomialKernel(2)),
    "SingleTaskGP": lambda: SingleTaskGP(data()[0], data()[1].unsqueeze(-1)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::gpclml.fit.FitWarning")
def test_fits_by_gpytorchs_objective_go_in_closed_form(name):
    model = MODELS[name]().train()
    for kind in (ExactMarginalLogLikelihood, gpclml.LeaveOneOutPseudoLikelihood):
        assert str(fit_mll(kind(model.likelihood, model), steps=2).road) == CLOSED


def test_losses_that_are_left_to_gpytorch_say_why():
    own_loss = plain(RBFKernel())
    own_loss.compute_custom_loss = lambda mll: None
    for kind, model, words in (
        (ExactMarginalLogLikelihood, plain(OwnKernel()), "OwnKernel is a subclass"),
        (LeaveOneOutPseudoLikelihood, plain(RBFKernel()), "LeaveOneOutPseudoLikelihood is an obj"),
        (ExactMarginalLogLikelihood, plain(LinearKernel()), "low rank"),
        (ExactMarginalLogLikelihood, own_loss, "compute_custom_loss"),
    ):
        road = FixedLoss(kind(model.likelihood, model)).road
        assert road.way == "GPyTorch's evaluation"
        assert words in road.reason
