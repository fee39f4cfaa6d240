"""What missing inputs of new rows may be, as training rows show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gpclml._utils.arguments import seeded

__all__ = ["averaged", "completions", "filled", "unknown_inputs"]

_MOST_VALUES = 64  # by which a missing input is represented
_JITTER = 1e-6
_LEAST_SHARE = 1e-3  # of a level, whatever the other inputs say


def unknown_inputs(x: Tensor, train_x: Tensor, categories: Sequence[Sequence[int]]) -> Tensor:
    """Which inputs of points are not known: NaN, or of a level that no training row has.

    Args:
        x: Points, ``(m, d)``.
        train_x: Training inputs, ``(n, d)``.
        categories: For each category the columns that are its levels. A row without any of them has
            a further level, which is unknown if no training row has it.

    Returns:
        ``(m, d)``.
    """
    unknown = x.isnan()
    for group in map(list, categories):
        lacks = unknown[:, group].any(-1)
        if bool((train_x[:, group] != 0).any(-1).all()):
            lacks = lacks | (x[:, group] == 0).all(-1)
        unknown[:, group] = lacks.unsqueeze(-1)
    return unknown


def completions(
    x: Tensor,
    unknown: Tensor,
    train_x: Tensor,
    categories: Sequence[Sequence[int]],
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    r"""Values that the unknown inputs of points may have given their other inputs.

    Each of v training rows gives one: its own values, moved by how much their linear prediction
    from the other inputs differs between the row and the point. So it is the prediction at the
    point, plus the row's residual. A category has the row's own level, and the row a weight
    :math:`\hat p(\text{level} \mid x) / p(\text{level})`, with the linear prediction of the level's
    column for its probability. Coefficients are those of the covariance of the training inputs,
    shrunk as Ledoit and Wolf (2004) have it.

    Args:
        x: Points, ``(r, d)``.
        unknown: Which of their inputs are unknown, ``(r, d)``.
        train_x: Training inputs, ``(n, d)``.
        categories: For each category the columns that are its levels.
        seed: Seed by which up to 64 of the training rows are drawn.

    Returns:
        Points without unknown inputs, ``(r, v, d)``, and their weights, ``(r, v)``, with sum one.
    """
    from sklearn.covariance import ledoit_wolf

    drawn = torch.randperm(len(train_x), generator=seeded(seed))[:_MOST_VALUES].numpy()
    rows = train_x.detach().cpu().double().numpy()
    points = x.detach().cpu().double().numpy()
    lacking = unknown.cpu().numpy()
    center, width = rows.mean(0), rows.std(0)
    width[width == 0] = 1.0
    covariance = ledoit_wolf((rows - center) / width, assume_centered=True)[0]
    covariance += _JITTER * np.eye(len(center))  # levels of a category add up to one
    least, most = rows.min(0), rows.max(0)
    values = np.repeat(points[:, None], len(drawn), axis=1)
    weights = np.ones(values.shape[:2])
    patterns, which = np.unique(lacking, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        members, lost, known = which.ravel() == number, np.flatnonzero(pattern), ~pattern
        slopes = np.linalg.solve(covariance[np.ix_(known, known)], covariance[np.ix_(known, lost)])
        slopes = slopes * width[lost] / width[known][:, None]
        expected = (points[members][:, known] - center[known]) @ slopes
        fitted = (rows[drawn][:, known] - center[known]) @ slopes
        moved = rows[drawn][:, lost] + expected[:, None] - fitted
        moved = moved.clip(least[lost], most[lost])
        for group in categories:
            levels = np.flatnonzero(np.isin(lost, group))
            if len(levels):
                given = rows[drawn][:, lost[levels]]
                moved[:, :, levels] = given
                shares = (expected[:, levels] + center[lost[levels]]).clip(_LEAST_SHARE)
                ratios = shares / center[lost[levels]].clip(_LEAST_SHARE)
                # A row of none of the levels keeps its weight.
                none = 1.0 - given.sum(1)
                weights[members] *= ratios @ given.T + none
        values[np.ix_(members, np.arange(len(drawn)), lost)] = moved
    weights /= weights.sum(1, keepdims=True)
    return torch.as_tensor(values).to(x), torch.as_tensor(weights).to(x)


def averaged(
    moments: Callable[[Tensor], tuple[Tensor, Tensor]],
    x: Tensor,
    train_x: Tensor,
    categories: Sequence[Sequence[int]],
    tails: Tensor,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Locations and scales of K models at points, ``(K, m)``, averaged over unknown inputs.

    Mean and variance are those of the average.

    Args:
        moments: Locations and scales ``(K, p)`` at points ``(p, d)`` without unknown inputs.
        x: Points, ``(m, d)``, NaN where an input is missing.
        train_x: Training inputs, ``(n, d)``.
        categories: For each category the columns that are its levels.
        tails: Variances of the models' distributions of scale one, ``(K, 1)``.
        seed: Seed of :func:`completions`.
    """
    unknown = unknown_inputs(x, train_x, categories)
    locations, scales = moments(torch.where(unknown, train_x.mean(0), x))
    rows = unknown.any(-1)
    if bool(rows.any()):
        points, weights = completions(x[rows], unknown[rows], train_x, categories, seed)
        values, spreads = (
            values.reshape(-1, *weights.shape) for values in moments(points.flatten(0, 1))
        )
        mean = (weights * values).sum(-1)
        between = (weights * (values - mean.unsqueeze(-1)).square()).sum(-1)
        locations[:, rows] = mean
        scales[:, rows] = ((weights * spreads.square()).sum(-1) + between / tails).sqrt()
    return locations, scales


def filled(
    x: Tensor, categories: Sequence[Sequence[int]], seed: int = 0, train_x: Tensor | None = None
) -> Tensor:
    """Rows whose missing inputs are replaced by their expectations given the other inputs.

    Args:
        x: Inputs, ``(n, d)``, NaN where missing.
        categories: For each category the columns that are its levels.
        seed: Seed of :func:`completions`.
        train_x: Training inputs that show what may be, ``(m, d)``; the rows themselves if None, in
            which no column may be missing everywhere.
    """
    unknown = x.isnan()
    rows = unknown.any(-1)
    if not bool(rows.any()):
        return x
    whole = torch.where(unknown, x.nanmean(0) if train_x is None else train_x.mean(0), x)
    known = whole if train_x is None else train_x
    values, shares = completions(whole[rows], unknown[rows], known, categories, seed)
    whole[rows] = (shares.unsqueeze(-1) * values).sum(1)
    return whole
