"""The loss of a line search is the objective's own, however it is computed.

The cases of ``record.json`` say so for every kernel, structure and conditioning; here are models
that a closed form could be mistaken in.
"""

import gpytorch
import pytest
import torch
from botorch.models import KroneckerMultiTaskGP, SingleTaskGP
from botorch.models.transforms import Warp
from exact_gps import MultitaskGP, PlainGP
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import LinearKernel, MaternKernel, PolynomialKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.priors import GammaPrior, HalfCauchyPrior, LogNormalPrior, NormalPrior
from linear_operator.utils.warnings import NumericalWarning

import gpclml
from gpclml import GPRegression, fit_mll
from gpclml.conditioning import KFold, LastPoints
from gpclml.errors import NonFiniteError
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss, fixed_loss


def data(n=15, outputs=1):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    y = torch.stack([torch.sin((5 + k) * x.sum(-1)) for k in range(outputs)], -1)
    return x, y + 0.1 * torch.randn(y.shape, generator=generator, dtype=torch.float64)


class Doubled(SingleTaskGP):
    def forward(self, x):
        return super().forward(2.0 * x)


class OwnInputs(SingleTaskGP):
    def transform_inputs(self, X, input_transform=None):
        return 0.5 * X


class OwnCall(SingleTaskGP):
    def __call__(self, x):
        prior = super().__call__(x)
        return gpytorch.distributions.MultivariateNormal(prior.mean + 1.0, prior.covariance_matrix)


def prior_of_each_kind():
    kernel = ScaleKernel(
        MaternKernel(1.5, ard_num_dims=3, lengthscale_prior=GammaPrior(3.0, 6.0)),
        outputscale_prior=NormalPrior(1.0, 0.5),
    )
    x, y = data()
    likelihood = GaussianLikelihood(noise_prior=LogNormalPrior(-3.0, 1.0))
    model = PlainGP(x, y.squeeze(-1), kernel, likelihood).double()
    constant = LogNormalPrior(0.3, 2.0)
    model.mean_module.register_prior("up", HalfCauchyPrior(2.0), lambda m: m.constant.exp())
    model.mean_module.register_prior(
        "transformed", NormalPrior(0.0, 1.0, transform=torch.exp), "constant"
    )
    model.mean_module.register_prior("other", constant, lambda m: m.constant.exp())
    return model


def hooked():
    model = SingleTaskGP(*data())
    model.mean_module.register_forward_hook(lambda module, args, output: output + 1.0)
    return model


def shared(**options):
    """Two outputs that have a kernel in common."""
    return SingleTaskGP(*data(outputs=2), covar_module=RBFKernel(**options))


def parameter_of_two_kernels():
    """Two kernels whose lengthscales have other bounds."""
    bounded = RBFKernel(
        lengthscale_constraint=GreaterThan(0.5), lengthscale_prior=GammaPrior(3.0, 6.0)
    )
    kernel = ScaleKernel(RBFKernel()) + bounded
    bounded.raw_lengthscale = kernel.kernels[0].base_kernel.raw_lengthscale
    return SingleTaskGP(*data(), covar_module=kernel)


def raw_lengthscale_from_another_parameter():
    model = SingleTaskGP(*data(), covar_module=ScaleKernel(RBFKernel()))
    kernel = model.covar_module.base_kernel
    model.other = torch.nn.Parameter(kernel.raw_lengthscale.data.double())
    del kernel.raw_lengthscale
    kernel.raw_lengthscale = model.other + 1.0
    return model


def frozen():
    model = SingleTaskGP(*data())
    model.likelihood.noise_covar.raw_noise.requires_grad_(False)
    return model


def missing_tasks():
    x, y = data(outputs=3)
    y[[4, 9, 9, 8], [0, 1, 2, 2]] = torch.nan
    model = MultitaskGP(x, y, MultitaskGaussianLikelihood(3)).double()
    model.covar_module.task_covar_module.covar_factor.data.fill_(0.5)
    return model


def prior_of_a_function(transform=None):
    """Priors of the lengthscale squared, and of a function of it that has its value there."""
    model = SingleTaskGP(*data())
    kernel = model.covar_module
    kernel.lengthscale = 1.0
    if transform is None:
        prior = GammaPrior(2.0, 3.0).double()  # PyTorch casts values to the type of its rate
        kernel.register_prior("square", prior, lambda m: m.lengthscale.square())
    else:
        kernel.register_prior("same", NormalPrior(0.0, 1.0, transform=transform), "lengthscale")
    return model


MODELS = {
    "warped": lambda: SingleTaskGP(*data(), input_transform=Warp(d=3, indices=[0, 2])),
    "two outputs": lambda: SingleTaskGP(*data(outputs=2)),
    "shared kernel": shared,
    "shared prior": lambda: shared(lengthscale_prior=GammaPrior(3.0, 6.0)),
    "own forward": lambda: Doubled(*data()),
    "own inputs": lambda: OwnInputs(*data()),
    "own call": lambda: OwnCall(*data()),
    "parameter of two kernels": parameter_of_two_kernels,
    "raw lengthscale from another parameter": raw_lengthscale_from_another_parameter,
    "hooked": hooked,
    "frozen": frozen,
    "missing tasks": missing_tasks,
    "priors": prior_of_each_kind,
    "prior of a square": prior_of_a_function,
    "prior of an exponential": lambda: prior_of_a_function(torch.exp),
}


def objective(model, conditioning):
    return ConditionalMarginalLogLikelihood(model.likelihood, model.train(), conditioning, seed=3)


def evaluated(mll, loss):
    mll.zero_grad()
    with gpytorch.settings.observation_nan_policy("mask"):
        value = loss()
    if isinstance(value, torch.Tensor):
        value.backward()
        value = value.item()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in mll.parameters()]
    return value, [gradient.clone() for gradient in gradients]


def assert_same(mll, loss, expected):
    value, ours = evaluated(mll, loss)
    expected, theirs = evaluated(mll, expected)
    assert value == pytest.approx(expected, rel=1e-10, abs=1e-12)
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    for gradient, other in zip(ours, theirs, strict=True):
        atol = 1e-8 * float(other.abs().max()) + 1e-12 * largest
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=atol)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["lml", "gpytorch", "folds"])
def test_value_and_gradient_at_several_points(name, kind):
    mll = objective(MODELS[name](), KFold(4) if kind == "folds" else LastPoints(m=0))
    model = mll.model
    theirs = ExactMarginalLogLikelihood(model.likelihood, model)
    if name == "missing tasks" and kind == "gpytorch":
        return  # which GPyTorch's objective treats in its own way
    with gpytorch.settings.observation_nan_policy("mask"):
        loss = FixedLoss(theirs if kind == "gpytorch" else mll)

    def expected():
        if kind == "folds" or name == "missing tasks":
            return fixed_loss(mll)
        return -theirs(model(*model.train_inputs), model.train_targets).sum()

    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        assert_same(mll, loss, expected)
        with torch.no_grad():
            for parameter in mll.parameters():
                if parameter.requires_grad:
                    move = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.add_(0.1 * move.to(parameter))


@pytest.mark.parametrize("conditioning", [LastPoints(m=0), KFold(4)], ids=repr)
def test_losses_of_members_add_up_to_that_of_the_batch(conditioning):
    mll = objective(MODELS["two outputs"](), conditioning)
    loss = FixedLoss(mll)
    assert_same(mll, lambda: loss(0) + loss(1), lambda: fixed_loss(mll))


def test_targets_that_overflow_are_an_error():
    mll = objective(SingleTaskGP(*data()), LastPoints(m=0))
    loss = FixedLoss(mll)
    with torch.no_grad():
        mll.model.mean_module.raw_constant.fill_(1e300)
    with pytest.raises(NonFiniteError, match="target minus prior mean"):
        loss()


def test_where_there_is_no_factor_jitter_is_added_as_without():
    x, y = data()
    noise = GreaterThan(1e-30, transform=None, initial_value=1e-25)
    likelihood = GaussianLikelihood(noise_constraint=noise)
    mll = objective(SingleTaskGP(x[:1].expand(15, 3), y, likelihood=likelihood), LastPoints(m=0))
    results = []
    for loss in (FixedLoss(mll), lambda: fixed_loss(mll)):
        with pytest.warns(NumericalWarning):
            results.append(evaluated(mll, loss))
    (value, ours), (expected, theirs) = results
    assert value == pytest.approx(expected, rel=1e-8)
    for gradient, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))


# ------------------------------------------------------------------ which way a step goes


CLOSED = "closed form, Cholesky"


class OwnKernel(RBFKernel):
    """A subclass, whose forward may be any."""


def plain(kernel):
    x, y = data()
    return PlainGP(x, y.squeeze(-1), kernel).double().train()


def test_the_way_of_a_step_and_why_not_a_faster_one():
    tasks = KroneckerMultiTaskGP(*data(outputs=2), outcome_transform=None)
    subclass = "GPyTorch's kernel, Cholesky: OwnKernel is a subclass of RBFKernel"
    for model, solver, words in (
        (plain(ScaleKernel(RBFKernel())), "auto", CLOSED),
        (plain(PolynomialKernel(2)), "auto", CLOSED),
        (plain(RBFKernel() + LinearKernel()), "auto", CLOSED),
        (plain(ScaleKernel(OwnKernel())), "auto", subclass),
        (plain(LinearKernel()), "auto", "low rank plus a diagonal"),
        (tasks.train(), "auto", "a Cholesky factor for each task"),
        (plain(RBFKernel()), "cg", "conjugate gradients: the objective was given"),
    ):
        road = ConditionalMarginalLogLikelihood(model.likelihood, model, solver=solver).road()
        assert str(road).startswith(words)
        assert road.way == words.partition(":")[0]


def test_a_step_that_is_asked_about_draws_the_same_points():
    model = plain(RBFKernel())
    asked, other = (ConditionalMarginalLogLikelihood(model.likelihood, model) for _ in range(2))
    asked.road()
    output, target = model(*model.train_inputs), model.train_targets
    assert torch.equal(asked(output, target), other(output, target))


@pytest.mark.filterwarnings("ignore::gpclml.fit.FitWarning")
def test_fits_by_gpytorchs_objective_go_in_closed_form():
    x, y = data()
    regression, single_task = GPRegression(x, y.squeeze(-1)), SingleTaskGP(x, y)
    for model in (regression.train(), plain(PolynomialKernel(2)), single_task.train()):
        for kind in (ExactMarginalLogLikelihood, gpclml.LeaveOneOutPseudoLikelihood):
            assert str(fit_mll(kind(model.likelihood, model), steps=2).road) == CLOSED
            model.train()


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
