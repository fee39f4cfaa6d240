"""Fitting many small models at once, as one batch in which each has its own parameters."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from gpytorch.models import ExactGP
from linear_operator.utils.errors import NanError, NotPSDError

from gpclml._losses import fixed_loss
from gpclml._searches import FitWarning
from gpclml._utils.arguments import callers_level, checked
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit._batch_steps import Batch
from gpclml.fit._options import STEPS, check_step_options, frozen, optimizer_factory
from gpclml.fit.mll import FitResult
from gpclml.mlls import ConditionalMarginalLogLikelihood

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

    On a CPU from measurements on one core, as ``python -m benchmarks.speed.fits`` makes them;
    on a GPU, where nothing was measured, a batch is limited by memory only.

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
    if num_data < 1:
        raise ArgumentError("num_data", num_data, "at least 1")
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
    progress: bool = True,
) -> list[FitResult]:
    """Fits each model as :func:`gpclml.fit.fit_mll` would alone, all in the same steps.

    The models are stacked: one covariance of shape ``(k, n, n)``, one pass through k networks.
    They may differ in data, start, seed and conditioning, but not in kind or size. Each ends
    where its lone fit ends, up to rounding. It pays where a step is mostly overhead;
    :func:`suggest_batch_size` says for how many.

    A model whose objective or gradient can no longer be used keeps its last good parameters
    and leaves the batch, with a :class:`FitWarning`; the others go on as if it had never been.

    Args:
        mlls: Objectives of distinct models, each with its model's own likelihood.
        optimizer: ``"adam"`` or a ``torch.optim`` class that treats numbers one by one (no
            line search, no norms over parameters).
        steps: Most steps; 300 if None.
        lr: Learning rate.
        freeze: Names or name prefixes of parameters that stay as they are, in every model.
        progress: Whether to show a progress bar on standard error.

    Returns:
        A result for each objective, in order; ``seconds`` is an equal share of the wall time.
        One that could not be evaluated at all has no history, a NaN objective and the reason
        as its message.

    Raises:
        ArgumentError: If there is no objective, one comes twice, or an option is out of range.
        UnsupportedError: If the models cannot be stacked, or as a stack are not the same models;
            if an objective asks for conjugate gradients, as members hold out points of their own.
        UnknownNameError: If a name to freeze matches no parameter.

    Note:
        A step costs about one lone step, and k times the floating-point operations.
    """
    check_step_options(steps, lr)
    factory = optimizer_factory(optimizer)
    if factory is None:
        mend = "Use 'adam', or fit_mll for each model."
        raise ArgumentError("optimizer", repr(optimizer), "a torch optimizer", mend)
    _check_members(mlls)
    start = time.perf_counter()
    for mll in mlls:
        mll.train()
    with contextlib.ExitStack() as stack:
        for mll in mlls:
            stack.enter_context(frozen(mll, freeze))
        batch = Batch(mlls, lambda parameters: factory(parameters, lr=lr))
        _take_steps(batch, steps or STEPS, progress)
    stopped = {
        place: f"The fit stopped after {len(batch.histories[place])} steps and keeps its best "
        f"parameters so far: {message}"
        for place, message in batch.messages.items()
    }
    for message in stopped.values():
        warnings.warn(message, FitWarning, stacklevel=callers_level())
    objectives = [_objective(mll, batch.messages.get(i)) for i, mll in enumerate(mlls)]
    seconds = (time.perf_counter() - start) / len(mlls)
    results = []
    for place, mll in enumerate(mlls):
        mll.eval()
        message, value = stopped.get(place, ""), objectives[place]
        problem = "stopped" if message else ""
        history = batch.histories[place]
        results.append(FitResult(value, history, [value], seconds, message, problem))
    return results


def _take_steps(batch: Batch, steps: int, progress: bool) -> None:
    from tqdm import tqdm

    with tqdm(total=steps, desc="fit", disable=not progress) as bar:
        try:
            for _ in range(steps):
                batch.evaluate()
                batch.step()
                bar.update()
                bar.set_postfix(models=len(batch.active), refresh=False)
            batch.evaluate()  # what the last step led to must be usable too
        finally:
            batch.write_back()


@torch.no_grad()
def _objective(mll: ConditionalMarginalLogLikelihood, failed: str | None) -> float:
    try:
        return -float(fixed_loss(mll))
    except (NanError, NotPSDError):
        if failed is None:
            raise
        return float("nan")


def _check_members(mlls: Sequence[ConditionalMarginalLogLikelihood]) -> None:
    if not mlls:
        raise ArgumentError("mlls", "none", "at least one objective")
    if len({id(mll.model) for mll in mlls}) < len(mlls):
        raise ArgumentError("mlls", "one model twice", "objectives of distinct models")
    for mll in mlls:
        if not isinstance(mll, ConditionalMarginalLogLikelihood):
            expected = "ConditionalMarginalLogLikelihood (LastPoints(m=0) is the LML)"
            raise UnsupportedError("mlls", type(mll).__name__, expected, "Use fit_mll.")
        if mll.solver not in ("auto", "cholesky"):
            mend = (
                "Fit such models one by one with fit_mll; conjugate gradients are for large ones."
            )
            got, expected = f"solver={mll.solver!r}", "'cholesky', or 'auto' where that fits"
            raise UnsupportedError("mlls", got, expected, mend)
        if mll.likelihood is not cast(ExactGP, mll.model).likelihood:
            mend = "Pass model.likelihood to the objective."
            raise UnsupportedError("mlls", "a likelihood not its model's", "its model's", mend)
