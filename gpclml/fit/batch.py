"""Fits of many small models at once, as one batch in which each has its own parameters."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from gpytorch.models import ExactGP
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpclml._utils.arguments import callers_level, check_counts, check_positive, checked
from gpclml._utils.environment import progress_bar
from gpclml.conditioning import Split
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit.deep_kernel import warm_start_fresh_models
from gpclml.fit.mll import fit_mll, stopped_after
from gpclml.fit.result import FitResult, FitWarning
from gpclml.fit.search import frozen, objective
from gpclml.fit.train import STEPS, Training, limits_of, non_finite, optimizer_factory
from gpclml.inference.observations import Observations, training_observations
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.conditional_marginal_log_likelihood import member_objectives
from gpclml.mlls.fixed_loss import fixed_loss
from gpclml.models.stack import ModelStack

__all__ = ["fit_batch", "suggest_batch_size"]

# Largest n and models in a batch; beyond, memory traffic costs more than overhead saves.
_ON_CPU = ((150, 10), (250, 5))
_ON_CPU_KEEPING_MEMORY = ((300, 10), (500, 5))
_GPU_ENTRIES = 10**8  # of one covariance (k, n, n); a step holds some twenty arrays of its size
_MOST_ON_GPU = 256


@checked
def suggest_batch_size(
    num_data: int, device: torch.device | str = "cpu", keeps_memory: bool = False
) -> int:
    """How many models of a size it pays to fit together; 1: fit them one by one.

    On a CPU the number follows measurements on one core (``python -m benchmarks.speed run --study
    batches``). On a GPU it is limited by memory and by 256 models; from a hundred on, larger
    batches hardly fit more models per second (``benchmarks/gpu/results``).

    Args:
        num_data: Number of data points n of each model.
        device: Where they are.
        keeps_memory: Whether the process's allocator keeps freed memory, as with the
            environment variables ``MALLOC_TRIM_THRESHOLD_=2000000000`` and
            ``MALLOC_MMAP_THRESHOLD_=33554432`` of glibc. Otherwise large arrays are given back
            and their pages cleared anew at every step.

    Raises:
        ArgumentError: If ``num_data`` is below 1, or there is no such kind of device.
    """
    check_counts(num_data=num_data)
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ArgumentError("device", repr(device), "a device, such as 'cpu' or 'cuda'") from error
    if kind != "cpu":
        return max(1, min(_MOST_ON_GPU, _GPU_ENTRIES // num_data**2))
    table = _ON_CPU_KEEPING_MEMORY if keeps_memory else _ON_CPU
    return next((size for most, size in table if num_data <= most), 1)


@checked
def fit_batch(
    mlls: Sequence[ConditionalMarginalLogLikelihood],
    optimizer: str | type[torch.optim.Optimizer] = "adam",
    *,
    steps: int | None = None,
    lr: float = 0.01,
    freeze: Iterable[str] = (),
    progress: bool | None = None,
) -> list[FitResult]:
    """Fits each model as :func:`gpclml.fit.fit_mll` would alone, all in the same steps.

    A line search takes as many steps as its model needs, so with ``"lbfgs"`` the models are fitted
    one after the other; a step of a known kernel takes less time than its share of a batch.

    For a torch optimizer the models are stacked: one covariance of shape ``(k, n, n)``, one pass
    through k networks. They may differ in data, start, seed and conditioning, but not in kind or
    size. Each gets the result of its single fit, up to rounding. A batch is faster while a step is
    mostly overhead; :func:`suggest_batch_size` says for how many models.

    A model whose objective or gradient is not finite keeps its last good parameters and leaves the
    batch with a :class:`FitWarning`; this does not change the others.

    Args:
        mlls: Objectives of distinct models, each with its model's own likelihood.
        optimizer: ``"lbfgs"``, ``"adam"``, or a ``torch.optim`` class that treats numbers one by
            one (no line search, no norms over parameters).
        steps: Largest number of steps. If None: 300, and no limit for ``"lbfgs"``.
        lr: Learning rate of a torch optimizer.
        freeze: Names or name prefixes of parameters that stay as they are, in every model.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        A result for each objective, in order; ``seconds`` is an equal share of the wall time.
        One that could not be evaluated at all has no history, a NaN objective and the reason
        as its message.

    Raises:
        ArgumentError: If there is no objective, one comes twice, or an option is out of range.
        UnsupportedError: If the models cannot be stacked, if their stack computes other values, or
            if an objective asks for conjugate gradients.
        UnknownNameError: If a name to freeze matches no parameter.

    Note:
        A step has the overhead of one single step, and k times the floating-point operations.
    """
    check_counts(steps=steps)
    check_positive(lr=lr)
    factory = optimizer_factory(optimizer)
    _check_members(mlls)
    if factory is None:
        return _one_after_the_other(mlls, steps, freeze, progress)
    start = time.perf_counter()
    for mll in mlls:
        warm_start_fresh_models(mll)
        mll.train()
    with contextlib.ExitStack() as stack:
        for mll in mlls:
            stack.enter_context(frozen(mll, freeze))
        batch = _Batch(mlls, lambda parameters: factory(parameters, lr=lr))
        try:
            Training().run(
                batch.step, steps or STEPS, callback=lambda _: {"models": len(batch.active)},
                desc="fit", progress=progress,
            )  # fmt: skip
            batch.evaluate()  # what the last step led to must be usable too
        finally:
            batch.write_back()
    seconds = (time.perf_counter() - start) / len(mlls)
    results = []
    for index, (mll, history) in enumerate(zip(mlls, batch.histories, strict=True)):
        reason = batch.messages.get(index)
        message = "" if reason is None else stopped_after(len(history), reason)
        with torch.no_grad():
            value = objective(mll) if message else -float(fixed_loss(mll))
        results.append(_result(mll, value, history, seconds, message))
    return results


def _result(
    mll: ConditionalMarginalLogLikelihood,
    value: float,
    history: list[float],
    seconds: float,
    message: str,
) -> FitResult:
    """The result of a fit that ended, with a warning if it was stopped."""
    mll.eval()
    if message:
        warnings.warn(message, FitWarning, stacklevel=callers_level())
    return FitResult(
        objective=value, history=history, seconds=seconds, message=message,
        problem="stopped" if message else "",
    )  # fmt: skip


def _one_after_the_other(
    mlls: Sequence[ConditionalMarginalLogLikelihood],
    steps: int | None,
    freeze: Iterable[str],
    progress: bool | None,
) -> list[FitResult]:
    """Line searches, of which one that cannot start does not end the others."""
    results: list[FitResult] = []
    names = list(freeze)
    with progress_bar(total=len(mlls), desc="fits", progress=progress) as bar:
        for mll in mlls:
            try:
                results.append(fit_mll(mll, steps=steps, freeze=names, progress=False))
            except (NanError, NotPSDError) as error:
                message = f"The fit stopped after 0 steps and keeps its parameters: {error}"
                results.append(_result(mll, math.nan, [], 0.0, message))
            bar.update()
    return results


def _check_members(mlls: Sequence[ConditionalMarginalLogLikelihood]) -> None:
    if not mlls:
        raise ArgumentError("mlls", "none", "at least one objective")
    if len({id(mll.model) for mll in mlls}) < len(mlls):
        raise ArgumentError("mlls", "one model twice", "objectives of distinct models")
    for mll in mlls:
        if mll.solver not in ("auto", "cholesky"):
            suggestion = (
                "Fit such models one by one with fit_mll; conjugate gradients are for large ones."
            )
            got, expected = f"solver={mll.solver!r}", "'cholesky', or 'auto' where that fits"
            raise UnsupportedError("mlls", got, expected, suggestion)
        if mll.likelihood is not cast(ExactGP, mll.model).likelihood:
            suggestion = "Pass model.likelihood to the objective."
            raise UnsupportedError(
                "mlls", "a likelihood that is not the model's", "model.likelihood", suggestion
            )


Faults = dict[int, Exception]  # why a member cannot be evaluated, by its row in the stack


class _Batch:
    """Objectives of models, in train mode, that are stacked and stepped together.

    ``active`` has the indices of the members still in the batch, ``histories`` their objective at
    each step, ``messages`` why a member left, by its index.
    """

    def __init__(
        self,
        mlls: Sequence[ConditionalMarginalLogLikelihood],
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._mlls = list(mlls)
        self._make_optimizer = make_optimizer
        self.histories: list[list[float]] = [[] for _ in mlls]
        self.messages: dict[int, str] = {}
        self.active: list[int] = []
        self._last_good: list[Tensor] | None = None
        alone = []
        for index, mll in enumerate(mlls):
            try:
                with torch.no_grad():
                    data = training_observations(cast(ExactGP, mll.model))
                    alone.append((data.covariance.to_dense(), data.residual))
                self.active.append(index)
            except (NanError, NotPSDError) as error:
                self.messages[index] = str(error)
        if self.active:
            self._restack()
            self._check_stack(alone)

    def step(self, number: int) -> float:
        """A step of the optimizer, noted in the histories; the mean objective before it."""
        self.evaluate()
        if not self.active:
            return math.nan
        for index, value in zip(self.active, self._values.tolist(), strict=True):
            self.histories[index].append(value)
        self._optimizer.step()
        with torch.no_grad():
            for parameter, limits in zip(self._stack.parameters, self._limits, strict=True):
                if limits is not None:
                    parameter.clamp_(*limits)
        return float(self._values.mean())

    def evaluate(self) -> None:
        """Value and gradient of every member at fresh points; those that are not finite leave."""
        self._blocks: dict[int, list[Tensor]] = {}
        while self.active:
            try:
                self._optimizer.zero_grad()
                values = self._objectives()
                (-values.sum()).backward()
                self._values = values.detach()
                faults = self._non_finite()
            except (NanError, NotPSDError):
                faults = self._faults_alone()
                if not faults:
                    raise
            if not faults:
                self._last_good = [p.detach().clone() for p in self._stack.parameters]
                return
            self._retire(faults)

    def write_back(self) -> None:
        """Copies the parameters of all active members to their models."""
        for row in range(len(self.active)):
            self._stack.write_back(row)

    def _objectives(self) -> Tensor:
        data = training_observations(self._stack.model)
        blocks = [self._draw(index, data.member(row)) for row, index in enumerate(self.active)]
        mlls = [self._mlls[index] for index in self.active]
        return member_objectives(mlls, self._stack.model, data, blocks)

    def _draw(self, index: int, data: Observations) -> list[Tensor]:
        """Held-out blocks of a member, drawn once in an evaluation."""
        if index not in self._blocks:
            split = self._mlls[index].draw_split(data)
            if split.conditioned_on is not None:
                raise UnsupportedError(
                    "mlls", "held-out points conditioned on a part of the others",
                    "on all others", "Fit such models one by one with fit_mll.",
                )  # fmt: skip
            self._blocks[index] = split.held_out
        return self._blocks[index]

    def _non_finite(self) -> Faults:
        """The members of which a value or an entry of a gradient is not finite."""
        named = zip(self._names, (p.grad for p in self._stack.parameters), strict=True)
        finite = {
            name: grad.reshape(len(self.active), -1).isfinite().all(-1)
            for name, grad in named if grad is not None
        }  # fmt: skip
        good = torch.stack([self._values.isfinite(), *finite.values()]).all(0)
        return {
            row: non_finite(
                float(self._values[row]), [n for n, ok in finite.items() if not ok[row]]
            )
            for row in (~good).nonzero().flatten().tolist()
        }

    def _faults_alone(self) -> Faults:
        """The members whose objective cannot be evaluated on their own either."""
        faults: Faults = {}
        self.write_back()
        for row, index in enumerate(self.active):
            mll = self._mlls[index]
            try:
                with torch.no_grad():
                    data = training_observations(cast(ExactGP, mll.model))
                    mll.objective_at(data, Split(self._draw(index, data)))
            except (NanError, NotPSDError) as error:
                faults[row] = error
        return faults

    def _retire(self, faults: Faults) -> None:
        """Leaves members at their last good parameters; the others keep all they have."""
        self.write_back()
        for row, error in faults.items():
            self.messages[self.active[row]] = str(error)
            if self._last_good is not None:
                self._stack.write_back(row, self._last_good)
        rows = [row for row in range(len(self.active)) if row not in faults]
        self.active = [self.active[row] for row in rows]
        if not self.active:
            return
        states = [self._optimizer.state.get(p, {}) for p in self._stack.parameters]
        shapes = [p.shape for p in self._stack.parameters]
        self._restack()
        for parameter, state, shape in zip(self._stack.parameters, states, shapes, strict=True):
            for name, value in state.items():
                is_stacked = isinstance(value, Tensor) and value.shape == shape
                self._optimizer.state[parameter][name] = value[rows] if is_stacked else value
        if self._last_good is not None:
            self._last_good = [values[rows] for values in self._last_good]

    def _restack(self) -> None:
        self._stack = ModelStack([cast(ExactGP, self._mlls[index].model) for index in self.active])
        self._optimizer = self._make_optimizer(self._stack.parameters)
        first = self._mlls[self.active[0]]
        names, limits = {id(p): name for name, p in first.named_parameters()}, limits_of(first)
        self._names = [names[id(p)] for p in self._stack.own_parameters(0)]
        self._limits = [limits.get(name) for name in self._names]

    @torch.no_grad()
    def _check_stack(self, alone: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A stack must be the same models: modules of others may not take a batch so."""
        suggestion = "Fit such models one by one with fit_mll."
        expected = "models that GPyTorch can batch"
        try:
            together = training_observations(self._stack.model)
        except RuntimeError as error:
            raise UnsupportedError("mlls", str(error), expected, suggestion) from error
        for row, (covariance, residual) in enumerate(alone):
            member = together.member(row)
            for name, stacked, single in (
                ("covariance", member.covariance.to_dense(), covariance),
                ("residual", member.residual, residual),
            ):
                tolerance = 1e3 * torch.finfo(stacked.dtype).eps * float(single.abs().max())
                if stacked.shape != single.shape or not bool(
                    (stacked - single).abs().max() <= tolerance
                ):
                    got = f"another {name} in the stack than alone"
                    raise UnsupportedError("mlls", got, expected, suggestion)
