"""The loss of a line search is the objective's own, value and gradient, however it is computed."""

from __future__ import annotations

from random import Random

import gpytorch
import pytest
import torch
from botorch.models import MultiTaskGP, SingleTaskGP
from botorch.models.transforms import Normalize, Standardize, Warp
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import GammaPrior, HalfCauchyPrior, LogNormalPrior, NormalPrior
from linear_operator.utils.warnings import NumericalWarning
from objective_cases import MultitaskModel

from gpclml.conditioning import HeldOut, KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.errors import NonFiniteError
from gpclml.gram import Reason
from gpclml.inference import observations
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss, fixed_loss
from gpclml.models import GPRegression


def data(n=15, outputs=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, 3, generator=generator, dtype=dtype)
    y = torch.stack([torch.sin((5 + k) * x.sum(-1)) for k in range(outputs)], -1)
    return x, y + 0.1 * torch.randn(y.shape, generator=generator, dtype=dtype)


class Plain(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel, mean=None):
        super().__init__(x, y, likelihood)
        self.mean_module = mean or gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


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


def plain(kernel, **likelihood):
    x, y = data()
    likelihood = GaussianLikelihood(**likelihood)
    return Plain(x, y.squeeze(-1), likelihood, kernel).double()


def with_priors():
    kernel = ScaleKernel(
        MaternKernel(1.5, ard_num_dims=3, lengthscale_prior=GammaPrior(3.0, 6.0)),
        outputscale_prior=NormalPrior(1.0, 0.5),
    )
    model = plain(kernel, noise_prior=LogNormalPrior(-3.0, 1.0))
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


def one_parameter_of_two():
    """Two kernels whose lengthscales have other bounds."""
    bounded = RBFKernel(
        lengthscale_constraint=GreaterThan(0.5), lengthscale_prior=GammaPrior(3.0, 6.0)
    )
    kernel = ScaleKernel(RBFKernel()) + bounded
    bounded.raw_lengthscale = kernel.kernels[0].base_kernel.raw_lengthscale
    return SingleTaskGP(*data(), covar_module=kernel)


def of_another_parameter():
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


def missing():
    x, y = data()
    y[[4, 9, 10]] = torch.nan
    return x, y.squeeze(-1)


def missing_tasks():
    x, y = data(outputs=3)
    y[[4, 9, 9, 8], [0, 1, 2, 2]] = torch.nan
    model = MultitaskModel(x, y, MultitaskGaussianLikelihood(3)).double()
    model.covar_module.task_covar_module.covar_factor.data.fill_(0.5)
    return model


def fixed_noise():
    x, y = data()
    return SingleTaskGP(x, y, train_Yvar=torch.full_like(y, 0.05))


def tasks():
    x, y = data()
    task = torch.arange(15).remainder(2).double().unsqueeze(-1)
    return MultiTaskGP(torch.cat([x, task], -1), y, task_feature=-1)


MODELS = {
    "botorch": lambda: SingleTaskGP(*data()),
    "botorch matern": lambda: SingleTaskGP(
        *data(), covar_module=ScaleKernel(MaternKernel(2.5, active_dims=(2, 0)))
    ),
    "normalized": lambda: SingleTaskGP(
        *data(), input_transform=Normalize(3), outcome_transform=Standardize(1)
    ),
    "warped": lambda: SingleTaskGP(*data(), input_transform=Warp(d=3, indices=[0, 2])),
    "two outputs": lambda: SingleTaskGP(*data(outputs=2)),
    "shared kernel": shared,
    "shared prior": lambda: shared(lengthscale_prior=GammaPrior(3.0, 6.0)),
    "fixed noise": fixed_noise,
    "tasks": tasks,
    "own forward": lambda: Doubled(*data()),
    "own inputs": lambda: OwnInputs(*data()),
    "own call": lambda: OwnCall(*data()),
    "one parameter of two": one_parameter_of_two,
    "of another parameter": of_another_parameter,
    "hooked": hooked,
    "frozen": frozen,
    "missing": lambda: Plain(*missing(), GaussianLikelihood(), RBFKernel()).double(),
    "regression with missing": lambda: GPRegression(*missing(), kernel="matern"),
    "missing tasks": missing_tasks,
    "plain": lambda: plain(ScaleKernel(RBFKernel(ard_num_dims=3))),
    "linear mean": lambda: SingleTaskGP(*data(), mean_module=gpytorch.means.LinearMean(3)),
    "priors": with_priors,
    "spectral mixture": lambda: plain(gpytorch.kernels.SpectralMixtureKernel(2, ard_num_dims=3)),
    "regression": lambda: GPRegression(data()[0], data()[1].squeeze(-1), kernel="rq"),
    "sum of kernels": lambda: plain(RBFKernel() + ScaleKernel(MaternKernel(0.5))),
    "deep": lambda: GPRegression(data()[0], data()[1].squeeze(-1), kernel="deep_bottleneck"),
    "linear": lambda: plain(gpytorch.kernels.LinearKernel()),
}
CONDITIONINGS = {
    "default": None,
    "lml": LastPoints(m=0),
    "held-out": HeldOut([3, 8, 0]),
    "some": RandomHoldout(0.3, condition_on=5),
    "folds": KFold(4),
    "loo": LeaveOneOut(),
}


def objective_of(model, conditioning):
    model.train()
    if conditioning == "gpytorch":
        return ExactMarginalLogLikelihood(model.likelihood, model)
    return ConditionalMarginalLogLikelihood(
        model.likelihood, model, CONDITIONINGS[conditioning], seed=3
    )


def evaluated(mll, loss):
    mll.zero_grad()
    with gpytorch.settings.observation_nan_policy("mask"):
        value = float(loss())
    return value, [None if p.grad is None else p.grad.clone() for p in mll.parameters()]


def assert_same(mll, loss):
    value, ours = evaluated(mll, loss)

    def by_autograd():
        loss = fixed_loss(mll)
        loss.backward()
        return loss.detach()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observations, "closed_form_of", lambda kernel: Reason("for comparison"))
        expected, theirs = evaluated(mll, by_autograd)
    assert value == pytest.approx(expected, rel=1e-10, abs=1e-12)
    largest = max(float(one.abs().max()) for one in theirs if one is not None)
    for one, other in zip(ours, theirs, strict=True):
        if other is None:
            assert one is None or one.abs().max() < 1e-12 * largest
        else:
            atol = 1e-8 * float(other.abs().max()) + 1e-13 * largest
            torch.testing.assert_close(one, other, rtol=1e-8, atol=atol)


# GPyTorch's objective leaves missing targets to its own policy.
CASES = [
    (name, conditioning)
    for k, name in enumerate(MODELS)
    for conditioning in ("lml", "gpytorch", list(CONDITIONINGS)[k % len(CONDITIONINGS)], "folds")
    if conditioning != "gpytorch" or "missing" not in name
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("name", "conditioning"), dict.fromkeys(CASES))
def test_value_and_gradient_at_several_points(name, conditioning):
    mll = objective_of(MODELS[name](), conditioning)
    with gpytorch.settings.observation_nan_policy("mask"):
        loss = FixedLoss(mll)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        assert_same(mll, loss)
        with torch.no_grad():
            for parameter in mll.parameters():
                if parameter.requires_grad:
                    move = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.add_(0.1 * move.to(parameter))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("botorch", False), ("two outputs", True), ("shared kernel", False), ("shared prior", False)],
)
def test_members_that_share_nothing_are_evaluated_one_by_one(name, expected):
    assert FixedLoss(objective_of(MODELS[name](), "lml")).has_members == expected


@pytest.mark.parametrize("conditioning", ["lml", "folds", "gpytorch"])
def test_losses_of_members_add_up_to_that_of_the_batch(conditioning):
    mll = objective_of(MODELS["two outputs"](), conditioning)
    loss = FixedLoss(mll)
    for _ in range(2):
        value, gradients = evaluated(mll, loss)
        mll.zero_grad()
        assert loss(0) + loss(1) == pytest.approx(value, rel=1e-12)
        for parameter, gradient in zip(mll.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            for parameter in mll.parameters():
                parameter += 0.1


def test_targets_that_overflow_are_an_error():
    x, y = data()
    mll = objective_of(SingleTaskGP(x, y), "lml")
    loss = FixedLoss(mll)
    with torch.no_grad():
        mll.model.mean_module.raw_constant.fill_(1e300)
    with pytest.raises(NonFiniteError, match="target minus prior mean"):
        loss()


@pytest.mark.parametrize("transform", [None, torch.exp])
def test_priors_of_what_is_not_a_hyperparameter_itself_are_left_to_pytorch(transform):
    """The lengthscale and a function of it that has the same value and another slope."""
    model = SingleTaskGP(*data())
    kernel = model.covar_module
    kernel.lengthscale = 1.0
    if transform is None:
        prior = GammaPrior(2.0, 3.0).double()  # PyTorch casts values to the type of its rate
        kernel.register_prior("square", prior, lambda m: m.lengthscale.square())
    else:
        kernel.register_prior("of", NormalPrior(0.0, 1.0, transform=transform), "lengthscale")
    mll = objective_of(model, "lml")
    loss = FixedLoss(mll)
    assert_same(mll, loss)
    kernel.lengthscale = 0.7
    assert_same(mll, loss)


def test_where_there_is_no_factor_jitter_is_added_as_without():
    x, y = data()
    noise = gpytorch.constraints.GreaterThan(1e-30, transform=None, initial_value=1e-25)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=noise)
    model = SingleTaskGP(x[:1].expand(15, 3), y, likelihood=likelihood)
    mll = objective_of(model, "lml")
    with pytest.warns(NumericalWarning):
        expected, theirs = evaluated(mll, lambda: _backward(fixed_loss(mll)))
    with pytest.warns(NumericalWarning):
        value, ours = evaluated(mll, FixedLoss(mll))
    assert value == pytest.approx(expected, rel=1e-8)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))


def _backward(loss):
    loss.backward()
    return loss.detach()


def drawn_kernel(random, depth=2):
    """A tree of known kernels: scales, dimensions of their own, one lengthscale or several."""
    kinds = gpytorch.kernels
    if depth and random.random() < 0.7:
        parts = [drawn_kernel(random, depth - 1) for _ in range(random.choice([1, 2, 2, 3]))]
        if len(parts) == 1:
            dims = parts[0].active_dims
            own = {} if dims is None else {"active_dims": tuple(dims.tolist())}
            return ScaleKernel(parts[0], **own)
        return random.choice([kinds.AdditiveKernel, kinds.ProductKernel])(*parts)
    dims = random.choice([None, (0,), (2, 0), (0, 1, 2)])
    options = {"active_dims": dims}
    if random.random() < 0.5:
        options["ard_num_dims"] = 3 if dims is None else len(dims)
    kind = random.choice(
        ["rbf", "matern", "matern", "rq", "periodic", "linear", "constant", "cosine"]
    )
    if kind == "matern":
        # A distance of zero is 1e-15 to GPyTorch, and a Matern-1/2 kernel has a kink there.
        return MaternKernel(random.choice([1.5, 2.5]), **options)
    if kind == "linear":
        return kinds.LinearKernel(**options)
    if kind == "constant":
        return kinds.ConstantKernel()
    if kind == "cosine":
        return kinds.CosineKernel(active_dims=(1,))  # which is not positive of several
    one = {"rbf": RBFKernel, "rq": kinds.RQKernel, "periodic": kinds.PeriodicKernel}[kind]
    return one(**options)


@pytest.mark.parametrize("seed", range(15))
def test_trees_of_known_kernels(seed):
    random = Random(seed)
    kernel = RBFKernel(ard_num_dims=3) + drawn_kernel(random)
    model = SingleTaskGP(*data(), covar_module=kernel)
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter += random.uniform(-0.5, 0.5)
    mll = objective_of(model, random.choice(list(CONDITIONINGS)))
    assert_same(mll, FixedLoss(mll))
