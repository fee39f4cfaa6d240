"""Fitting hyperparameters: thin over ``botorch.fit`` and ``torch.optim``.

What is added: the right function for the optimizer (fresh held-out points for a stochastic
one, fixed ones for a line search), one joint fit where a batch shares parameters, progress,
a history, checks that values are finite, freezing, and restarts that redraw networks.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError

from gpclml._losses import fixed_loss
from gpclml._optimize import OptimizerFactory, StoppedError, stochastic
from gpclml._searches import FitWarning, Problem, search
from gpclml._utils.arguments import callers_level, checked
from gpclml.errors import ArgumentError
from gpclml.fit._options import STEPS, check_step_options, frozen, optimizer_factory
from gpclml.kernels.networks import reset_network
from gpclml.models import find_networks

__all__ = ["FitResult", "FitWarning", "fit_mll"]


@dataclass(frozen=True)
class FitResult:
    """What a fit did.

    Attributes:
        objective: The objective at the end, held-out points fixed, summed over a batch; nats
            per point.
        history: The objective at each step of the attempt that was kept.
        attempts: The objective that each attempt reached; NaN for one that failed.
        seconds: Wall time of all attempts.
        message: What is wrong with the kept attempt, and what to do; empty if nothing is.
        problem: The same in a word: "limit" if its steps were spent before it converged, "stopped"
            if it met values it could not use, "abnormal" if a line search ended before an
            optimum, "constant" if points predicted from all others get all the same prediction,
            "bound" if a parameter is at a bound and predictions are worse than the mean.
        starts: Starts that the line searches of the kept attempt were taken from.
    """

    objective: float
    history: list[float]
    attempts: list[float]
    seconds: float
    message: str = ""
    problem: Problem = ""
    starts: int = 1

    @property
    def converged(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return not self.problem


@dataclass
class _Attempt:
    history: list[float] = field(default_factory=list)
    message: str = ""
    problem: Problem = ""
    starts: int = 1
    objective: float = float("nan")

    def stopped(self, error: Exception) -> None:
        self.problem = "stopped"
        self.message = (
            f"The fit stopped after {len(self.history)} steps and keeps its best parameters so "
            f"far: {error}"
        )


@checked
def fit_mll(
    mll: MarginalLogLikelihood,
    optimizer: str | OptimizerFactory = "lbfgs",
    *,
    steps: int | None = None,
    lr: float = 0.01,
    restarts: int = 0,
    retries: int = 2,
    freeze: Iterable[str] = (),
    seed: int = 0,
    progress: bool = True,
) -> FitResult:
    """Maximizes an objective over the parameters of its model, in place.

    A stochastic optimizer sees the objective itself, which redraws its held-out points at each
    step; L-BFGS sees a fixed function (BoTorch's ``fit_gpytorch_mll_scipy``, resumed from its best
    point where it met one it could not evaluate) and ends where twenty steps have gained less than
    0.002 nats in all. If a torch optimizer meets a value, gradient or covariance that it cannot
    use, its last good parameters are kept and the result says so.

    A line search may fail in silence: it ends before an optimum, where the model predicts the same
    everywhere, or at a bound. Then others are taken from less noise with shorter and with longer
    lengthscales, and the best end is kept. What is still wrong is in the result, and a
    :class:`FitWarning` says it.

    Args:
        mll: Any GPyTorch or gpclml objective of a model with training data.
        optimizer: ``"lbfgs"``, ``"adam"``, or a ``torch.optim`` class.
        steps: Most steps; if None 300 for a torch optimizer, and for L-BFGS SciPy's limit of
            15000, which ends no fit.
        lr: Learning rate of a torch optimizer.
        restarts: Further attempts, each from redrawn networks and perturbed hyperparameters
            (drawn from their priors where they have one); the best objective is kept.
        retries: Most further starts of a line search that failed, in the first attempt.
        freeze: Names or name prefixes of parameters that stay as they are, as in
            ``mll.named_parameters()``.
        seed: Seed of the restarts.
        progress: Whether to show a progress bar on standard error.

    Returns:
        The history and outcome. The objective and its model are left in eval mode.

    Raises:
        ArgumentError: If ``optimizer``, ``steps``, ``lr``, ``restarts`` or ``retries`` is out of
            range.
        UnknownNameError: If a name to freeze matches no parameter.
        NonFiniteError, NotPSDError: If not even the start can be evaluated.

    Warns:
        FitWarning: If the fit that is kept was stopped or failed.

    Note:
        One value and gradient of the objective a step. After a line search one leave-one-out
        prediction, which costs less than a step; after one that failed three values of the
        objective and the further searches.
    """
    factory = optimizer_factory(optimizer)
    check_step_options(steps, lr)
    for name, count in (("restarts", restarts), ("retries", retries)):
        if count < 0:
            raise ArgumentError(name, count, "0 or more")
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    initial = copy.deepcopy(mll.state_dict())
    best: _Attempt | None = None
    best_state = initial
    attempts: list[float] = []
    with frozen(mll, freeze):
        try:
            for index in range(restarts + 1):
                if index:
                    mll.load_state_dict(initial)
                    _redraw(mll, generator)
                mll.train()
                tries = 0 if index else retries
                attempt = _attempt(mll, factory, steps, lr, tries, progress, must_start=index == 0)
                attempts.append(attempt.objective)
                if best is None or _is_better(attempt.objective, best.objective):
                    best, best_state = attempt, copy.deepcopy(mll.state_dict())
        finally:
            # An interrupt keeps the best attempt, or the current one if it is the first.
            if best is not None:
                mll.load_state_dict(best_state)
    mll.eval()
    assert best is not None
    if best.problem not in ("", "limit"):
        warnings.warn(best.message, FitWarning, stacklevel=callers_level())
    return FitResult(
        best.objective, best.history, attempts, time.perf_counter() - start,
        best.message, best.problem, best.starts,
    )  # fmt: skip


def _is_better(objective: float, best: float) -> bool:
    """Whether it is larger; a failed attempt (NaN) never is, and any other beats one."""
    return objective > best or (math.isnan(best) and not math.isnan(objective))


def _attempt(
    mll: MarginalLogLikelihood,
    factory: OptimizerFactory | None,
    steps: int | None,
    lr: float,
    retries: int,
    progress: bool,
    must_start: bool,
) -> _Attempt:
    from tqdm import tqdm

    attempt = _Attempt()
    total = steps if factory is None else (steps or STEPS)
    with tqdm(total=total, desc="fit", disable=not progress) as bar:

        def record(_: Any, result: Any) -> None:
            attempt.history.append(-float(result.fval))
            bar.update()
            bar.set_postfix(objective=f"{attempt.history[-1]:.4f}", refresh=False)

        try:
            if factory is None:
                found = search(mll, steps, record, retries)
                attempt.problem, attempt.message = found.problem, found.message
                attempt.starts, attempt.history = found.starts, found.history
            else:
                stochastic(mll, factory, steps or STEPS, lr, record)
        except StoppedError as stopped:
            if stopped.nothing_done and must_start:
                raise stopped.error from None
            attempt.stopped(stopped.error)
    mll.train()
    with torch.no_grad():
        try:
            attempt.objective = -float(fixed_loss(mll))
        except (NanError, NotPSDError) as error:
            if not attempt.problem:
                attempt.stopped(error)
    return attempt


def _redraw(mll: MarginalLogLikelihood, generator: torch.Generator) -> None:
    """New networks; other parameters from their priors, else moved by half a unit."""
    from botorch.optim.utils import sample_all_priors

    networks = find_networks(mll.model)
    of_networks = {id(p) for network in networks for p in network.parameters()}
    with torch.no_grad():
        for parameter in mll.parameters():
            if parameter.requires_grad and id(parameter) not in of_networks:
                draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.5 * draw.to(parameter))
    for network in networks:
        reset_network(network, generator)
    # BoTorch samples priors from the global generator.
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sample_all_priors(cast(Any, mll.model))
