"""Training networks only as far as data they have not seen support it."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpclml._deep_start import drop_second_part, has_second_part
from gpclml._optimize import StoppedError
from gpclml._subset_training import SubsetTraining
from gpclml.conditioning import KFold
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.models import GPRegression, networks_of

__all__ = ["StoppingResult", "fit_networks"]

_LOOKS = 4  # at the held-out folds, evenly over the steps, after the one at the start
_ENOUGH = 1000  # held-out points to judge by: with as many, further folds are not looked at
_MARGIN = 1.5  # standard errors that a gain must exceed
_WORSE = 2.0  # standard errors below no gain at which a fold gives up


@dataclass(frozen=True)
class StoppingResult:
    """What held-out folds chose and why.

    Attributes:
        chosen: Index of the chosen look; 0 keeps the model as it was.
        steps: Number of steps taken at each look. The first look is the model as it was, the
            second the start of the training, which differs for the kernel ``"deep"``.
        gains: Mean gain in held-out log density over the model as it was, nats per point.
        standard_errors: Of the gains, over points.
        error_gains: Mean decrease in held-out squared error, in squared standardized units.
        num_held_out: Number of held-out points looked at.
        seconds: Wall time of everything.
        message: Why training on all data failed, after which the model is as it was.
    """

    chosen: int
    steps: list[int]
    gains: list[float]
    standard_errors: list[float]
    error_gains: list[float]
    num_held_out: int
    seconds: float
    message: str = ""


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
    and hyperparameters fitted by two line searches (a shorter lengthscale, an indicator of one
    column's values) on the log marginal likelihood of up to 1000 rows, the better one kept;
    then everything, network and full linear map included, is trained by Adam, each step under
    the objective of 400 random rows, so that a step's cost does not grow with n. Of any other
    model the networks alone are trained. Each fold does so with a copy on the other folds and
    scores its own points, :math:`\log p(y_i \mid \text{other folds})`. The look is chosen
    whose mean gain over the model as it was exceeds 1.5 standard errors the most, among those
    with no larger a squared error; training on all data goes as far. Where there is none the
    model stays as it was; ``"deep"`` becomes the ARD GP alone, its second part without variance.

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
        One training each fold looked at, and one on all data.
    """
    start = time.perf_counter()
    model = _checked_model(mll)
    if steps < 1:
        raise ArgumentError("steps", steps, "at least 1")
    if not 0 < lr < math.inf:
        raise ArgumentError("lr", lr, "a positive number")
    looks = sorted({round(steps * k / _LOOKS) for k in range(_LOOKS + 1)})
    densities, errors = _held_out_scores(mll, model, looks, lr, KFold(folds, seed), seed, progress)
    gains, worse = densities - densities[0], errors - errors[0]
    means = gains.mean(-1).tolist()
    standard_errors = (gains.std(-1) / math.sqrt(gains.shape[-1])).tolist()
    error_gains = (-worse.mean(-1)).tolist()
    chosen = _choose(means, standard_errors, error_gains)
    message = ""
    if chosen:
        rows = _observed(model)
        message = _train_on_all(mll, rows, looks[chosen - 1], looks[-1], lr, seed)
        chosen = 0 if message else chosen
    if chosen == 0 and has_second_part(model):
        drop_second_part(model)
    mll.eval()
    return StoppingResult(
        chosen=chosen,
        steps=[0, *looks][: len(means)],
        gains=means,
        standard_errors=standard_errors,
        error_gains=error_gains,
        num_held_out=gains.shape[-1],
        seconds=time.perf_counter() - start,
        message=message,
    )


def _checked_model(mll: MarginalLogLikelihood) -> GPRegression:
    model = mll.model
    if not isinstance(model, GPRegression) or not networks_of(model):
        raise UnsupportedError(
            "mll.model", type(model).__name__, "a GPRegression with a network", "Use fit_mll."
        )
    if cast(Tensor, model.train_targets).ndim > 1:
        raise UnsupportedError("mll.model", "a batch of models", "a single one", "Use fit_mll.")
    return model


def _observed(model: GPRegression) -> Tensor:
    return (~cast(Tensor, model.train_targets).isnan()).nonzero()[:, 0]


def _choose(gains: list[float], standard_errors: list[float], error_gains: list[float]) -> int:
    best, most = 0, 0.0
    for look, (gain, error, less) in enumerate(
        zip(gains, standard_errors, error_gains, strict=True)
    ):
        if less >= 0 and gain - _MARGIN * error > most:
            best, most = look, gain - _MARGIN * error
    return best


def _held_out_scores(
    mll: MarginalLogLikelihood,
    model: GPRegression,
    looks: list[int],
    lr: float,
    folds: KFold,
    seed: int,
    progress: bool,
) -> tuple[Tensor, Tensor]:
    """Log densities and squared errors of held-out points at each look; two of (looks, b)."""
    from tqdm import tqdm

    rows = _observed(model)
    observed = torch.zeros(len(cast(Tensor, model.train_targets)), dtype=torch.bool)
    observed[rows.cpu()] = True
    groups = folds.held_out(len(observed), observed=observed)
    blocks = [block.to(rows.device) for group in groups for block in group]
    scores, count = [], 0
    with tqdm(total=len(blocks), desc="folds", disable=not progress) as bar:
        for block in blocks:
            kept = rows[~torch.isin(rows, block)]
            training = SubsetTraining(copy.deepcopy(mll), kept, looks[-1], lr, seed)
            scores.append(_scores_at_looks(training, block, looks))
            bar.update()
            count += len(block)
            if count >= _ENOUGH:
                break
    common = min(len(fold) for fold in scores)
    densities, errors = (
        torch.stack([torch.cat([fold[look][kind] for fold in scores]) for look in range(common)])
        for kind in range(2)
    )
    return densities, errors


def _scores_at_looks(
    training: SubsetTraining, held_out: Tensor, looks: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """Of the model as it is, of the start, and after so many steps; fewer where it gave up."""
    scores = [training.score(held_out)]
    try:
        training.start()
        scores.append(training.score(held_out))
        for done, steps in pairwise(looks):
            training.train(steps - done)
            scores.append(training.score(held_out))
            if _is_clearly_worse(scores[-1][0] - scores[0][0]):
                break
    except StoppedError:
        pass
    return scores


def _is_clearly_worse(gains: Tensor) -> bool:
    return bool(gains.mean() < -_WORSE * gains.std() / math.sqrt(len(gains)))


def _train_on_all(
    mll: MarginalLogLikelihood, rows: Tensor, steps: int, course: int, lr: float, seed: int
) -> str:
    """Why it failed, with the parameters back where they were; empty if it did not."""
    before = copy.deepcopy(mll.state_dict())
    training = SubsetTraining(mll, rows, course, lr, seed)
    try:
        training.start()
        training.train(steps)
    except StoppedError as error:
        mll.load_state_dict(before)
        return str(error)
    return ""
