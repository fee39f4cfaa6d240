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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from gpytorch.mlls import MarginalLogLikelihood, SumMarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpclml._utils.arguments import (
    callers_level,
    check_counts,
    check_positive,
    checked,
    seeded,
    tensor_like,
)
from gpclml._utils.environment import progress_bar, seeded_globally
from gpclml._utils.resuming import copied_state
from gpclml.conditioning import NearestNeighbors
from gpclml.fit.deep_kernel import warm_start_fresh_models
from gpclml.fit.result import FitWarning, MLLFitResult
from gpclml.fit.search import (
    MARGIN,
    detached_data,
    frozen,
    positive_hyperparameters,
    search,
)
from gpclml.fit.train import (
    STEPS,
    OptimizerFactory,
    Training,
    falling,
    limits_of,
    optimizer_factory,
    set_gradients,
    trainable,
)
from gpclml.gram import Transform
from gpclml.kernels.networks import reset_network
from gpclml.mlls.fixed_loss import fixed_loss, fresh_loss
from gpclml.models import find_networks


@checked
def fit_mll(
    mll: MarginalLogLikelihood,
    optimizer: str | OptimizerFactory = "lbfgs",
    *,
    steps: int | None = None,
    lr: float = 0.01,
    final_lr: float | None = None,
    network_lr: float | None = None,
    network_decay: float | None = None,
    restarts: int = 0,
    retries: int = 2,
    freeze: Iterable[str] = (),
    seed: int = 0,
    progress: bool | None = None,
) -> MLLFitResult:
    """Maximizes an objective over the parameters of its model, in place.

    A stochastic optimizer maximizes the objective itself, which redraws its held-out points at each
    step. It trains raw parameters, or given nearest neighbours and without networks the logarithms
    of positive hyperparameters. SciPy's L-BFGS-B maximizes a function with fixed held-out points;
    members of a batch are searched one by one where they share nothing and their kernel is known,
    else together. Its first step is taken in the raw parameters, the others in the logarithms of
    positive hyperparameters. It continues from its best point if it meets one that cannot be
    evaluated, and ends when twenty steps gain less than 0.002 nats in all. If a torch optimizer
    meets a value, gradient or covariance that is not finite, the last good parameters are kept and
    the result says so.

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
        final_lr: What ``lr`` falls to at the last step, by half a cosine, and that of networks with
            it by the same factor; constant if None.
        network_lr: Learning rate of the weights of networks; ``lr`` if None.
        network_decay: Weight decay of networks, by which a step of a torch optimizer at the rate r
            multiplies their weights by 1 - ``network_decay`` r (Loshchilov and Hutter 2019).
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
        ArgumentError: If ``optimizer``, ``steps``, a rate, ``restarts`` or ``retries`` is out of
            range, or every parameter is frozen.
        UnknownNameError: If a name to freeze matches no parameter.
        NonFiniteError, NotPSDError: If the objective cannot be evaluated at the start.

    Warns:
        FitWarning: If the fit that is kept was stopped or failed.

    Note:
        One value and gradient of the objective for each step. A line search is followed by one
        leave-one-out prediction, which costs less than a step; a failed one also by three values of
        the objective and the further searches.

    Examples:
        >>> import torch
        >>> from gpclml import ExactMarginalLogLikelihood, GPRegression, fit_mll
        >>> x = torch.linspace(0, 1, 40, dtype=torch.float64)
        >>> model = GPRegression(x, (9 * x).sin() + 0.1 * (250 * x).cos())
        >>> result = fit_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> result.road.way, result.problem
        ('closed form, Cholesky', '')
    """
    factory = optimizer_factory(optimizer)
    check_counts(steps=steps)
    check_counts(0, restarts=restarts, retries=retries)
    check_positive(lr=lr, final_lr=final_lr, network_lr=network_lr, network_decay=network_decay)
    rates = lr, final_lr or lr, network_lr or lr, network_decay or 0.0
    start = time.perf_counter()
    warm_start_fresh_models(mll)
    generator = seeded(seed)
    initial = copied_state(mll) if restarts else {}
    best: MLLFitResult | None = None
    best_state: dict[str, Any] = {}
    attempts: list[float] = []
    with frozen(mll, freeze):
        try:
            for index in range(restarts + 1):
                if index:
                    mll.load_state_dict(initial)
                    _redraw(mll, generator)
                mll.train()
                attempt = _attempt(mll, factory, steps, rates, progress, None if index else retries)
                attempts.append(value := attempt.objective)
                # A failed attempt (NaN) never is better, and any other is better than one.
                if best is None or not (value <= best.objective or math.isnan(value)):
                    best, best_state = attempt, copied_state(mll) if restarts else {}
        finally:
            # An interrupt keeps the best attempt, or the current one if it is the first.
            if best_state:
                mll.load_state_dict(best_state)
    mll.eval()
    assert best is not None
    if best.problem not in ("", "limit"):
        warnings.warn(best.message, FitWarning, stacklevel=callers_level())
    return replace(best, attempts=attempts, seconds=time.perf_counter() - start)


def _attempt(
    mll: MarginalLogLikelihood,
    factory: OptimizerFactory | None,
    steps: int | None,
    rates: tuple[float, float, float, float],
    progress: bool | None,
    retries: int | None,
) -> MLLFitResult:
    """A fit from where the parameters are; the first, which has retries, must be able to start."""
    training, model = Training(), cast(Any, mll.model)
    stopped: Exception | None = None
    try:
        if factory is not None:
            _climb(mll, factory, steps or STEPS, rates, training, progress)
        elif hasattr(model, "custom_fit"):
            # A model of BoTorch that searches several times, which the line search does here.
            from gpclml.fit.botorch import fit_gpytorch_mll_fused

            options = {} if steps is None else {"options": {"maxiter": steps}}
            model.custom_fit(mll=mll, optimizer=fit_gpytorch_mll_fused, optimizer_kwargs=options)
        else:
            with progress_bar(total=steps, desc="fit", progress=progress) as bar:

                def record(loss: float) -> None:
                    bar.update()
                    bar.set_postfix(objective=f"{-loss:.4f}", refresh=False)

                return search(mll, steps, record, retries or 0)
    except (NanError, NotPSDError) as error:
        if retries is not None and not training.history:
            raise
        stopped = error
    mll.train()
    value, road = math.nan, None
    try:
        with torch.no_grad():
            value = -float(fixed_loss(mll))
        road = cast(Any, mll).road() if hasattr(mll, "road") else None
    except (NanError, NotPSDError) as error:
        stopped = stopped or error
    return MLLFitResult(
        objective=value, history=training.history, attempts=[value], seconds=training.seconds,
        message=stopped_after(len(training.history), stopped) if stopped else "",
        problem="stopped" if stopped else "", road=road,
    )  # fmt: skip


def _climb(
    mll: MarginalLogLikelihood,
    factory: OptimizerFactory,
    steps: int,
    rates: tuple[float, float, float, float],
    training: Training,
    progress: bool | None,
) -> None:
    """Steps of a torch optimizer on the loss with fresh held-out points, in train mode.

    If a value or gradient does not exist or is not finite, the parameters become those of the last
    step at which they were, and the error is raised.
    """
    parameters, limits = trainable(mll), limits_of(mll)
    members = cast(Any, mll.mlls if isinstance(mll, SumMarginalLogLikelihood) else [mll])
    has_neighbors = any(
        isinstance(getattr(member, "conditioning", None), NearestNeighbors) for member in members
    )
    # Features of a network, whose weights say which columns matter, predict worse so.
    positive = _positive(mll) if has_neighbors and not find_networks(mll.model) else []
    (lr, final_lr, network_lr, decay), groups = rates, list(parameters.values())
    if network_lr != lr or decay:
        weights = {id(p) for network in find_networks(mll.model) for p in network.parameters()}
        groups = [
            {"params": [p for p in groups if (id(p) in weights) == is_network], "lr": rate}
            for is_network, rate in ((False, lr), (True, network_lr))
        ]
    optimizer = factory(groups, lr=lr)
    # What is left of the learning rates after so many steps.
    share = falling(1.0, final_lr / lr, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    last: list[Tensor] = []

    def evaluate() -> float:
        loss = set_gradients(optimizer, fresh_loss(mll), mll)
        last[:] = [parameter.detach().clone() for parameter in parameters.values()]
        return -loss

    def step(number: int) -> float:
        value = evaluate()
        with _in_logarithms(positive):
            optimizer.step()
        with torch.no_grad():
            if decay:
                networks = optimizer.param_groups[1]
                for weights in networks["params"]:
                    weights.mul_(1 - decay * networks["lr"])
            for name, pair in limits.items():
                parameters[name].clamp_(*pair)
        schedule.step()
        return value

    try:
        with detached_data(mll):
            training.run(step, steps, desc="fit", progress=progress)
            evaluate()  # what the last step led to must be usable too
    except (NanError, NotPSDError):
        with torch.no_grad():
            for parameter, values in zip(parameters.values(), last, strict=False):
                parameter.copy_(values)
        raise


_Positive = tuple[Tensor, Transform, Tensor]


def _positive(mll: MarginalLogLikelihood) -> list[_Positive]:
    """Raw parameters of positive hyperparameters, and their transforms and least values."""
    named, made = trainable(mll), []
    for name, transform in positive_hyperparameters(mll).items():
        bound = 0.0 if transform.lower_bound is None else transform.lower_bound
        least = (1 + MARGIN) * tensor_like(bound, named[name])
        made.append((named[name], transform, least.clamp_min(torch.finfo(least.dtype).tiny)))
    return made


@contextmanager
def _in_logarithms(positive: Sequence[_Positive]) -> Iterator[None]:
    """Within the block these parameters and their gradients are those of logarithms.

    A raw lengthscale above one is the lengthscale itself: steps of one length in it never reach the
    thousands that say that a column does not matter.
    """
    trained = [each for each in positive if each[0].grad is not None]
    with torch.no_grad():
        for parameter, transform, least in trained:
            value = transform.value(parameter).clamp_min(least)
            slope = transform.slope(parameter)
            if isinstance(slope, Tensor):  # far below zero a softplus has none
                slope = slope.clamp_min(torch.finfo(slope.dtype).tiny)
            cast(Tensor, parameter.grad).mul_(value / slope)
            parameter.copy_(value.log())
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, transform, least in trained:
                parameter.copy_(transform.inverse(parameter.exp().clamp_min(least)))


def stopped_after(steps: int, reason: object) -> str:
    """The message of a fit that could not go on."""
    return f"The fit stopped after {steps} steps and keeps its best parameters so far: {reason}"


def _redraw(mll: MarginalLogLikelihood, generator: torch.Generator) -> None:
    """New networks; other parameters from their priors, else moved by half a unit."""
    from botorch.optim.utils import sample_all_priors

    networks = find_networks(mll.model)
    weights = {id(p) for network in networks for p in network.parameters()}
    with torch.no_grad():
        for parameter in mll.parameters():
            if parameter.requires_grad and id(parameter) not in weights:
                draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.5 * draw.to(parameter))
    for network in networks:
        reset_network(network, generator)
    # A prior of a function of parameters, which nothing can set, is not drawn from.
    drawn = SimpleNamespace(named_priors=lambda: (p for p in mll.model.named_priors() if p[-1]))
    # BoTorch samples priors from the global generators.
    with seeded_globally(generator, mll.parameters()):
        sample_all_priors(cast(Any, drawn))
