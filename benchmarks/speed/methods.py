"""The gradient steps that are compared, all on one exact GP."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import gpytorch
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpclml.conditioning import (
    Conditioning,
    KFold,
    LastPoints,
    LeaveOneOut,
    RandomHoldout,
    RandomOrderings,
)
from gpclml.errors import UnknownNameError
from gpclml.inference import Solver
from gpclml.kernels import MLP, DeepKernel
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = [
    "BASE", "BY_DEFAULT", "DENSE_METHODS", "LOO_BASE", "METHODS", "NUM_FEATURES",
    "OF_TASKS", "SCALE_METHODS", "ExactRBF", "ExactTasks", "Problem", "gpytorch_defaults",
    "gradient_step", "sampled_data",
]  # fmt: skip

NUM_FEATURES = 8
NOISE = 0.1


class ExactRBF(gpytorch.models.ExactGP):
    """An exact GP with constant mean and scaled ARD RBF kernel, also on features of a network."""

    def __init__(self, x: Tensor, y: Tensor, network: bool = False) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        d = x.shape[-1]
        kernel = gpytorch.kernels.RBFKernel(ard_num_dims=d + 2 * network)
        if network:
            kernel = DeepKernel(MLP([d, 50, 50, 2]), kernel)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior at x."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class ExactTasks(gpytorch.models.ExactGP):
    """An exact GP of several tasks at the same points: an ARD RBF kernel times one of tasks."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        tasks = y.shape[-1]
        super().__init__(x, y, gpytorch.likelihoods.MultitaskGaussianLikelihood(tasks))
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), tasks)
        points = gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[-1])
        self.covar_module = gpytorch.kernels.MultitaskKernel(points, tasks)
        for parameter in self.covar_module.task_covar_module.parameters():  # which are random
            parameter.data.fill_(0.5)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultitaskMultivariateNormal:
        """The prior at x."""
        mean, covariance = self.mean_module(x), self.covar_module(x)
        return gpytorch.distributions.MultitaskMultivariateNormal(mean, covariance)


def sampled_data(
    n: int,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int,
    dimensions: int = NUM_FEATURES,
) -> tuple[Tensor, Tensor]:
    """Inputs uniform on the unit cube, targets a mean of sines and noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, dimensions, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    y = (2 * math.pi * x).sin().mean(-1) + 0.1 * noise
    return x.to(device, dtype), y.to(device, dtype)


class Problem:
    """Data of :func:`sampled_data` and a model in train mode on which a step is taken.

    With ``tasks`` above one, each has targets of its own at the same points. A share of the targets
    may be missing. With ``network`` the kernel is given two features of a network too.
    """

    def __init__(
        self,
        n: int,
        dtype: torch.dtype = torch.float64,
        device: str | torch.device = "cpu",
        seed: int = 0,
        tasks: int = 1,
        missing: float = 0.0,
        dimensions: int = NUM_FEATURES,
        network: bool = False,
    ) -> None:
        self.x, self.y = sampled_data(n, dtype, device, seed, dimensions)
        if tasks == 1:
            model = ExactRBF(self.x, self.y, network)
            for part in model.covar_module.modules():
                if isinstance(part, gpytorch.kernels.RBFKernel):
                    part.lengthscale = 1.0
        else:
            self.y = (self.y.unsqueeze(-1) * torch.arange(1, tasks + 1, device=device)).sin()
            model = ExactTasks(self.x, self.y)
            model.covar_module.data_covar_module.lengthscale = 1.0
        model.likelihood.noise = NOISE
        if missing:
            gone = torch.rand(self.y.shape, generator=torch.Generator().manual_seed(seed)) < missing
            self.y = self.y.masked_fill(gone.to(device), math.nan)
        self.policy = "mask" if missing else "ignore"
        self.model = model.to(device, dtype).train()

    @property
    def n(self) -> int:
        """Number of data points."""
        return len(self.y)


Objective = Callable[[], Tensor]


def _gpytorch(mll_class: type, problem: Problem) -> Objective:
    mll = mll_class(problem.model.likelihood, problem.model)

    def objective() -> Tensor:
        # Above this size GPyTorch would turn to stochastic estimates.
        with gpytorch.settings.max_cholesky_size(problem.y.numel()):
            return mll(problem.model(problem.x), problem.y)

    return objective


@contextmanager
def gpytorch_defaults() -> Iterator[None]:
    """GPyTorch's own settings, which importing BoTorch changes: Cholesky up to n = 800.

    Beyond, conjugate gradients to a residual of 1 and a log-determinant by Lanczos quadrature at
    ten random vectors, which are drawn from torch's global generator.
    """
    with (
        gpytorch.settings.max_cholesky_size(800),
        gpytorch.settings.fast_computations(True, True, True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", NumericalWarning)  # of what is measured here
        yield


def _gpytorch_by_default(problem: Problem) -> Objective:
    mll = ExactMarginalLogLikelihood(problem.model.likelihood, problem.model)

    def objective() -> Tensor:
        with gpytorch_defaults():
            return mll(problem.model(problem.x), problem.y)

    return objective


def _conditional(
    conditioning: Callable[[int], Conditioning], problem: Problem, solver: Solver = "cholesky"
) -> Objective:
    mll = ConditionalMarginalLogLikelihood(
        problem.model.likelihood, problem.model, conditioning(problem.n), solver=solver
    )
    return lambda: mll(problem.model(problem.x), problem.y)


class _UnknownRBF(gpytorch.kernels.RBFKernel):
    """A kernel that only GPyTorch can evaluate, as any subclass is to ``gpclml``."""


def _dense(conditioning: Callable[[int], Conditioning], problem: Problem) -> Objective:
    """The objective of a matrix that GPyTorch has made, with derivatives by autograd."""
    model = copy.deepcopy(problem.model)
    model.covar_module.base_kernel.__class__ = _UnknownRBF
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning(problem.n))

    def objective() -> Tensor:
        model.zero_grad()
        return mll(model(problem.x), problem.y)

    return objective


def _textbook(num_conditioned: Callable[[int], int], problem: Problem) -> Objective:
    m = num_conditioned(problem.n)

    def objective() -> Tensor:
        output = problem.model.likelihood(problem.model(problem.x))
        covariance, residual = output.covariance_matrix, problem.y - output.mean
        joint = _log_density_by_inverse(covariance, residual)
        given = _log_density_by_inverse(covariance[:m, :m], residual[:m])
        return (joint - given) / (problem.n - m)

    return objective


def _log_density_by_inverse(covariance: Tensor, residual: Tensor) -> Tensor:
    quadratic = residual @ torch.linalg.inv(covariance) @ residual
    log_det = torch.linalg.slogdet(covariance).logabsdet
    return -0.5 * (quadratic + log_det + len(residual) * math.log(2 * math.pi))


BASE = "gpytorch LML"
"""The method whose step is 1: GPyTorch's log marginal likelihood, by Cholesky."""

LOO_BASE = "gpytorch LOO"
"""GPyTorch's leave-one-out pseudo-likelihood."""

METHODS: dict[str, Callable[[Problem], Objective]] = {
    BASE: partial(_gpytorch, ExactMarginalLogLikelihood),
    LOO_BASE: partial(_gpytorch, LeaveOneOutPseudoLikelihood),
    "textbook m=n/2": partial(_textbook, lambda n: n // 2),
    "textbook m=0.9n": partial(_textbook, lambda n: n - round(0.1 * n)),
    "RandomHoldout(0.1)": partial(_conditional, lambda n: RandomHoldout(0.1)),
    "RandomHoldout(0.5)": partial(_conditional, lambda n: RandomHoldout(0.5)),
    "KFold(10)": partial(_conditional, lambda n: KFold(10)),
    "LeaveOneOut()": partial(_conditional, lambda n: LeaveOneOut()),
    "LastPoints(m=n/2)": partial(_conditional, lambda n: LastPoints(n // 2)),
    "LastPoints(m=0)": partial(_conditional, lambda n: LastPoints(0)),
    "RandomOrderings(5, m=n/2)": partial(_conditional, lambda n: RandomOrderings(5, n // 2)),
}
"""What makes the objective of each method on a problem, by name."""

OF_TASKS = (BASE, "RandomHoldout(0.1)", "KFold(10)", "LeaveOneOut()", "LastPoints(m=0)")
"""Those that are compared with several tasks, missing targets or a network."""

DENSE_METHODS: dict[str, Callable[[Problem], Objective]] = {
    "LastPoints(m=0), dense": partial(_dense, lambda n: LastPoints(0)),
    "RandomHoldout(0.1), dense": partial(_dense, lambda n: RandomHoldout(0.1)),
}
"""The same for a kernel whose derivatives are not in closed form."""


def _block_of_256(n: int, most: int | None = None) -> Conditioning:
    share = min(256 / n, 0.5)
    condition_on = None if most is None else min(most, n - round(share * n))
    return RandomHoldout(share, condition_on=condition_on)


BY_DEFAULT = "gpytorch LML, its default"
"""The same by GPyTorch's own settings, conjugate gradients for more than 800 points."""

SCALE_METHODS: dict[str, Callable[[Problem], Objective]] = {
    BASE: METHODS[BASE],
    BY_DEFAULT: _gpytorch_by_default,
    "CLML of 256, Cholesky": partial(_conditional, _block_of_256),
    "CLML of 256, cg": partial(_conditional, _block_of_256, solver="cg"),
    "CLML of 256 given 4000": partial(_conditional, partial(_block_of_256, most=4000)),
}
"""The same for methods that are compared at large n."""


def gradient_step(method: str, problem: Problem) -> Callable[[], Tensor]:
    """One training step without the update: kernel, value and gradient of all parameters.

    The function takes the step of a method and returns the loss.
    """
    known = METHODS | DENSE_METHODS | SCALE_METHODS
    if method not in known:
        raise UnknownNameError("method", method, known)
    objective = known[method](problem)

    def step() -> Tensor:
        problem.model.zero_grad()
        with gpytorch.settings.observation_nan_policy(problem.policy):
            loss = -objective()
        loss.backward()
        return loss.detach()

    return step
