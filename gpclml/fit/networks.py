"""Training networks only as far as data they have not seen support it."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import cast

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpclml._optimize import StoppedError
from gpclml._utils.arguments import check_learning_rate, checked
from gpclml.conditioning import KFold
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit._deep_start import drop_second_part, has_second_part
from gpclml.fit._held_out_gains import Gain, held_out_gains
from gpclml.fit._subset_training import SubsetTraining
from gpclml.models import GPRegression, find_networks

__all__ = ["StoppingResult", "fit_networks"]

_LOOKS = 4  # at the held-out folds, evenly over the steps, after the one at the start
_ENOUGH = 1000  # held-out points to judge by: with as many, further folds are not looked at
_MARGIN = 1.5  # standard errors that a gain must exceed


@dataclass(frozen=True)
class StoppingResult:
    """What held-out folds chose and why.

    Attributes:
        chosen: Index of the chosen look; 0 keeps the model as it was.
        steps: Number of steps taken at each look. The first look is the model as it was, the
            second the start of the training, which differs for the kernel ``"deep"``. The last
            is where training was given up, if it was.
        gains: Mean gain in held-out log density over the model as it was, nats per point.
        standard_errors: Of the gains, over points.
        error_gains: Mean decrease in held-out squared error, in squared standardized units.
        num_held_out: Number of held-out points looked at, each time.
        seconds: Wall time of everything.
        message: Why training on all data failed, after which the model is as it was.
    """

    chosen: int
    steps: list[int]
    gains: list[float]
    standard_errors: list[float]
    error_gains: list[float]
    num_held_out: list[int]
    seconds: float
    message: str = ""


@checked
def fit_networks(
    mll: MarginalLogLikelihood,
    *,
    steps: int = 300,
    lr: float = 0.01,
    folds: int = 4,
    seed: int = 0,
    progress: bool = True,
) -> StoppingResult:
    r"""Trains the networks of a model, with as many steps as held-out folds support.

    The kernel ``"deep"`` first gets a second part beside the fitted ARD kernel, its linear map
    and hyperparameters fitted by line searches (from a shorter lengthscale and from an indicator
    of one column's values, of which the better goes on) on the log marginal likelihood of up to
    1000 rows; then everything, network and full linear map included, is trained by Adam, each
    step under the objective of 400 random rows, so that a step's cost does not grow with n. Of
    any other model the networks alone are trained. Each fold does so with a copy on the other
    folds and scores its own points, :math:`\log p(y_i \mid y_{\ne i})`, whose targets have no
    part in the hyperparameters. The look is chosen whose mean gain over the model as it was
    exceeds 1.5 standard errors the most, among those with no larger a squared error; training
    on all data goes as far. Where there is none the model stays as it was; ``"deep"`` becomes
    the ARD GP alone, its second part without variance: with its warm start just the GP that
    :func:`~gpclml.fit.fit_mll` makes of the kernel ``"rbf"`` under the LML. Training is given up
    as soon as a gain is a standard error below none (two at the start, from which steps may still
    gain) or steps no longer raise it.

    Args:
        mll: An objective of a :class:`~gpclml.models.GPRegression` with a network in its
            kernel or mean, e.g. ``kernel="deep"``; one whose held-out points are drawn or all.
        steps: Most steps.
        lr: Learning rate of Adam, with a rise and a cosine decay; in the kernel ``"deep"`` a
            tenth of it for the network and twice it for everything else.
        folds: Number of folds. Only so many are looked at as hold 1000 points together.
        seed: Seed of the folds and subsets.
        progress: Whether to show progress bars on standard error.

    Returns:
        The look chosen and why. The objective and its model are left in eval mode.

    Raises:
        UnsupportedError: If the model is no GPRegression, batched, or has no network.
        ArgumentError: If ``steps``, ``lr`` or ``folds`` is out of range.

    Note:
        At most one training each fold looked at, and one on all data; where the start of the
        first fold is clearly no gain, that start.
    """
    start = time.perf_counter()
    model = _checked_model(mll)
    if steps < 1:
        raise ArgumentError("steps", steps, "at least 1")
    check_learning_rate(lr)
    looks = sorted({round(steps * k / _LOOKS) for k in range(_LOOKS + 1)})
    gains = held_out_gains(mll, _folds(model, folds, seed), looks, lr, seed, progress)
    chosen = _choose(gains)
    message = ""
    if chosen:
        rows = _observed(model)
        message = _train_on_all(mll, rows, looks[chosen - 1], looks[-1], lr, seed, progress)
        chosen = 0 if message else chosen
    if chosen == 0 and has_second_part(model):
        drop_second_part(model)
    mll.eval()
    return StoppingResult(
        chosen=chosen,
        steps=[0, *looks][: len(gains)],
        gains=[gain.mean for gain in gains],
        standard_errors=[gain.standard_error for gain in gains],
        error_gains=[gain.error for gain in gains],
        num_held_out=[gain.num_held_out for gain in gains],
        seconds=time.perf_counter() - start,
        message=message,
    )


def _checked_model(mll: MarginalLogLikelihood) -> GPRegression:
    model = mll.model
    if not isinstance(model, GPRegression) or not find_networks(model):
        raise UnsupportedError(
            "mll.model", type(model).__name__, "a GPRegression with a network", "Use fit_mll."
        )
    if cast(Tensor, model.train_targets).ndim > 1:
        raise UnsupportedError("mll.model", "a batch of models", "a single one", "Use fit_mll.")
    return model


def _observed(model: GPRegression) -> Tensor:
    return (~cast(Tensor, model.train_targets).isnan()).nonzero()[:, 0]


def _choose(gains: list[Gain]) -> int:
    best, most = 0, 0.0
    for look, gain in enumerate(gains):
        least = gain.mean - _MARGIN * gain.standard_error
        if gain.error >= 0 and least > most:
            best, most = look, least
    return best


def _folds(model: GPRegression, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Rows to train on and rows held out, of so many folds as hold enough points together."""
    rows = _observed(model)
    observed = torch.zeros(len(cast(Tensor, model.train_targets)), dtype=torch.bool)
    observed[rows.cpu()] = True
    folds: list[tuple[Tensor, Tensor]] = []
    held_out = 0
    for group in KFold(count, seed).held_out(len(observed), observed=observed):
        for block in group.to(rows.device):
            if held_out < _ENOUGH:
                folds.append((rows[~torch.isin(rows, block)], block))
                held_out += len(block)
    return folds


def _train_on_all(
    mll: MarginalLogLikelihood,
    rows: Tensor,
    steps: int,
    course: int,
    lr: float,
    seed: int,
    progress: bool,
) -> str:
    """Why it failed, with the parameters back where they were; empty if it did not."""
    before = copy.deepcopy(mll.state_dict())
    training = SubsetTraining(mll, rows, course, lr, seed)
    try:
        training.start()
        training.train(steps, progress)
    except StoppedError as error:
        mll.load_state_dict(before)
        return str(error)
    return ""
