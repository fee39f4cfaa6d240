"""Fits of a model's hyperparameters to an objective, by a line search or a torch optimizer.

Built on SciPy's L-BFGS-B and ``torch.optim``. What is added: the right function for the
optimizer (fresh held-out points for a stochastic one, fixed ones for a line search), one joint fit
where a batch shares parameters, progress, a history, checks that values are finite, freezing, and
restarts that redraw networks.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError

from gpclml._utils.arguments import callers_level, check_counts, check_positive, checked, seeded
from gpclml._utils.environment import progress_bar, seeded_globally
from gpclml._utils.resuming import copied_state
from gpclml.errors import ArgumentError, UnknownNameError, UnsupportedError
from gpclml.fit._optimize import OptimizerFactory, StoppedError, frozen, stochastic
from gpclml.fit._searches import Search, search
from gpclml.fit.deep_kernel import warm_start_fresh_models
from gpclml.fit.result import FitResult, FitWarning
from gpclml.inference import Road
from gpclml.kernels.networks import reset_network
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import fixed_loss
from gpclml.models import find_networks

__all__ = [
    "STEPS",
    "FitResult",
    "FitWarning",
    "fit_mll",
    "optimizer_factory",
    "stopped_after",
]


STEPS = 300
"""Steps of a torch optimizer that are taken if no number is given."""


@dataclass(frozen=True, kw_only=True)
class MLLFitResult(FitResult):
    """What :func:`fit_mll` did.

    ``objective`` is computed with fixed held-out points and summed over a batch; ``history``
    belongs to the attempt that was kept.

    Attributes:
        attempts: The objective that each attempt reached; NaN for one that failed.
        starts: Number of line searches in the kept attempt.
        road: Which way evaluations of the objective went, and why not a faster one; of a sum that
            of one member. None where the objective or the model does not say.
    """

    attempts: list[float]
    starts: int = 1
    road: Road | None = None


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
    progress: bool | None = None,
) -> MLLFitResult:
    """Maximizes an objective over the parameters of its model, in place.

    A stochastic optimizer maximizes the objective itself, which redraws its held-out points at each
    step. SciPy's L-BFGS-B maximizes a function with fixed held-out points, each member of a batch
    that shares nothing on its own. Its first step is taken in the raw parameters, the others in the
    logarithms of positive hyperparameters. It continues from its
    best point if it meets one that cannot be evaluated, and ends when twenty steps gain less than
    0.002 nats in all. If a torch optimizer meets a value, gradient or covariance that is not
    finite, the last good parameters are kept and the result says so.

    A model with BoTorch's ``custom_fit``, such as ``RobustRelevancePursuitSingleTaskGP``, is fitted
    by that, whose line searches are these.

    A line search may end before an optimum, at a bound, or where the model predicts the same
    everywhere. Then further searches start from less noise with shorter and with longer
    lengthscales, and the best result is kept. If a problem remains, the result names it and a
    :class:`FitWarning` is given.

    The conditional marginal likelihood and leave-one-out do not score first points, and leave the
    scale of a kernel open. Under them a line search gives outputscale, mean and lengthscales of a
    ``GPRegression`` that standardizes its data weak priors (log-normal around 1 with a deviation of
    1.5, normal around 0 with 1, and log-normal around the root of the number of columns with 1),
    unless they have their own. ``objective`` leaves them out, ``history`` has them. A model of your
    own that runs away has the problem "runaway".

    A model with the kernel ``"deep"`` that was not trained before is first passed to
    :func:`~gpclml.fit.warm_start`, which also sets frozen parameters.

    Args:
        mll: Any GPyTorch or gpclml objective of a model with training data.
        optimizer: ``"lbfgs"``, ``"adam"``, or a ``torch.optim`` class.
        steps: Largest number of steps. If None: 300 for a torch optimizer, and SciPy's limit of
            15000 for L-BFGS, which no fit reaches.
        lr: Learning rate of a torch optimizer.
        restarts: Further attempts, each from redrawn networks and perturbed hyperparameters
            (drawn from their priors where they have one); the best objective is kept.
        retries: Largest number of further starts in the first attempt, if its line search fails.
        freeze: Names or name prefixes of parameters that stay as they are, as in
            ``mll.named_parameters()``.
        seed: Seed of the restarts.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        The history and outcome. The objective and its model are left in eval mode.

    Raises:
        ArgumentError: If ``optimizer``, ``steps``, ``lr``, ``restarts`` or ``retries`` is out of
            range, or every parameter is frozen.
        UnknownNameError: If a name to freeze matches no parameter.
        NonFiniteError, NotPSDError: If the objective cannot be evaluated at the start.

    Warns:
        FitWarning: If the fit that is kept was stopped or failed.

    Note:
        One value and gradient of the objective for each step. A line search is followed by one
        leave-one-out prediction, which costs less than a step; a failed one also by three values of
        the objective and the further searches.
    """
    factory = optimizer_factory(optimizer)
    check_counts(steps=steps)
    check_counts(0, restarts=restarts, retries=retries)
    check_positive(lr=lr)
    start = time.perf_counter()
    warm_start_fresh_models(mll)
    generator = seeded(seed)
    initial = copied_state(mll) if restarts else {}
    best: Search | None = None
    best_state: dict[str, Any] = {}
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
                    best, best_state = attempt, copied_state(mll) if restarts else {}
        finally:
            # An interrupt keeps the best attempt, or the current one if it is the first.
            if best_state:
                mll.load_state_dict(best_state)
    mll.eval()
    assert best is not None
    if best.problem not in ("", "limit"):
        warnings.warn(best.message, FitWarning, stacklevel=callers_level())
    return MLLFitResult(
        objective=best.objective, history=best.history, attempts=attempts,
        seconds=time.perf_counter() - start, message=best.message, problem=best.problem,
        starts=best.starts, road=best.road,
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
    progress: bool | None,
    must_start: bool,
) -> Search:
    history: list[float] = []
    stopped: Exception | None = None
    total = steps if factory is None else (steps or STEPS)
    with progress_bar(total=total, desc="fit", progress=progress) as bar:

        def record(loss: float) -> None:
            history.append(-loss)
            bar.update()
            bar.set_postfix(objective=f"{-loss:.4f}", refresh=False)

        try:
            if factory is None and hasattr(mll.model, "custom_fit"):
                _custom_fit(mll, steps)
            elif factory is None:
                return search(mll, steps, record, retries)
            else:
                stochastic(mll, factory, steps or STEPS, lr, record)
        except StoppedError as error:
            if error.nothing_done and must_start:
                raise error.error from None
            stopped = error.error
    mll.train()
    value = math.nan
    try:
        with torch.no_grad():
            value = -float(fixed_loss(mll))
    except (NanError, NotPSDError) as error:
        stopped = stopped or error
    road = _road(mll)
    if stopped is None:
        return Search("", "", 1, history, value, road)
    return Search("stopped", stopped_after(len(history), stopped), 1, history, value, road)


def _road(mll: MarginalLogLikelihood) -> Road | None:
    """Which way steps of a stochastic optimizer go."""
    try:
        return mll.road() if isinstance(mll, ConditionalMarginalLogLikelihood) else None
    except (NanError, NotPSDError, ArgumentError):  # the fit itself says why it stopped
        return None


def _custom_fit(mll: MarginalLogLikelihood, steps: int | None) -> None:
    """What a model of BoTorch does in place of one line search, each of its own by ours."""
    from gpclml.fit.botorch import fit_gpytorch_mll_fused

    options = {} if steps is None else {"options": {"maxiter": steps}}
    fit = cast(Any, mll.model).custom_fit
    fit(mll=mll, optimizer=fit_gpytorch_mll_fused, optimizer_kwargs=options)


def stopped_after(steps: int, reason: object) -> str:
    """The message of a fit that could not go on."""
    return f"The fit stopped after {steps} steps and keeps its best parameters so far: {reason}"


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
    # A prior of a function of parameters, which nothing can set, is not drawn from.
    drawn = SimpleNamespace(named_priors=lambda: (p for p in mll.model.named_priors() if p[-1]))
    # BoTorch samples priors from the global generators.
    with seeded_globally(generator, mll.parameters()):
        sample_all_priors(cast(Any, drawn))


def optimizer_factory(optimizer: str | OptimizerFactory) -> OptimizerFactory | None:
    """The factory; None for the line search."""
    if isinstance(optimizer, type) and not issubclass(optimizer, torch.optim.Optimizer):
        raise UnsupportedError("optimizer", optimizer.__name__, "a class of torch.optim")
    if callable(optimizer):
        return partial(_make_optimizer, optimizer)
    factories = {"lbfgs": None, "adam": torch.optim.Adam}
    if optimizer not in factories:
        raise UnknownNameError("optimizer", optimizer, factories)
    return factories[optimizer]


def _make_optimizer(factory: OptimizerFactory, parameters: Any, lr: float) -> torch.optim.Optimizer:
    name = getattr(factory, "__name__", type(factory).__name__)
    expected = "a class of torch.optim, or a function of parameters and lr that makes one"
    try:
        made = factory(parameters, lr=lr)
    except TypeError as error:
        raise UnsupportedError("optimizer", f"{name} ({error})", expected) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UnsupportedError("optimizer", f"{name}, which made no optimizer", expected)
    return made
