"""What training gains on folds that it has not seen, for as long as it may gain something."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpclml._optimize import StoppedError
from gpclml.fit._subset_training import SubsetTraining

__all__ = ["Gain", "held_out_gains"]

# Standard errors below no gain at which training is given up: at its start, from which steps may
# still gain, and after steps.
_WORSE_START, _WORSE = 2.0, 1.0

Scores = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Gain:
    """What a training has gained by one look at the held-out points.

    Attributes:
        mean: Mean gain in log density over the model as it was, nats per point.
        standard_error: Of that mean, over points.
        error: Mean decrease in squared error, in squared standardized units.
        num_held_out: Number of points looked at.
    """

    mean: float
    standard_error: float
    error: float
    num_held_out: int


def held_out_gains(
    mll: MarginalLogLikelihood,
    folds: Sequence[tuple[Tensor, Tensor]],
    looks: Sequence[int],
    lr: float,
    seed: int,
    progress: bool,
) -> list[Gain]:
    """Trains a copy a fold, all to one look before any to the next.

    Training ends as soon as the gain of a look is more than a standard error (at the start, two)
    below none in the folds seen by then, steps have not raised it, or a fold cannot be trained
    on.

    Args:
        mll: The objective; not changed.
        folds: Rows to train on and rows held out, a pair a fold.
        looks: Numbers of steps at which to look, from 0.
        lr: Learning rate.
        seed: Seed of the subsets.
        progress: Whether to show a progress bar.

    Returns:
        The gain of the model as it was (none), at the start of the training and after each of
        the numbers of steps above 0; the last one of fewer folds if training was given up.
    """
    from tqdm import tqdm

    trainings = [SubsetTraining(copy.deepcopy(mll), kept, looks[-1], lr, seed) for kept, _ in folds]
    stages: list[Callable[[SubsetTraining], None]] = [SubsetTraining.start]
    stages += [partial(SubsetTraining.train, steps=b - a) for a, b in pairwise(looks)]
    gains: list[Gain] = []
    try:
        before = [
            training.score(block) for training, (_, block) in zip(trainings, folds, strict=True)
        ]
        gains.append(_gain(before, before))
        with tqdm(total=len(folds) * len(stages), desc="folds", disable=not progress) as bar:
            for stage in stages:
                worse = _WORSE_START if len(gains) == 1 else _WORSE
                scores: Scores = []
                gains.append(gains[0])
                for training, (_, block) in zip(trainings, folds, strict=True):
                    stage(training)
                    scores.append(training.score(block))
                    bar.update()
                    gains[-1] = _gain(scores, before)
                    if gains[-1].mean < -worse * gains[-1].standard_error:
                        return gains
                if len(gains) > 2 and gains[-1].mean <= max(gain.mean for gain in gains[:-1]):
                    return gains
    except StoppedError:
        return gains[:-1] or [Gain(0.0, 0.0, 0.0, 0)]  # that look was not at all folds
    return gains


def _gain(scores: Scores, before: Scores) -> Gain:
    """Over the folds scored by now, which are the first ones."""
    densities, errors = (
        torch.cat([now[kind] - then[kind] for now, then in zip(scores, before, strict=False)])
        for kind in range(2)
    )
    count = len(densities)
    error = float(densities.std()) / math.sqrt(count) if count > 1 else math.inf
    return Gain(float(densities.mean()), error, -float(errors.mean()), count)
