"""What missing inputs of new rows may be, as training rows show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from sklearn.covariance import ledoit_wolf
from torch import Tensor

from gpclml._utils.arguments import seeded

_MOST_VALUES = 64  # by which a missing input is represented
_JITTER = 1e-6
_LEAST_SHARE = 1e-3  # of a level, whatever the other inputs say


def unknown_inputs(x: Tensor, train_x: Tensor, categories: Sequence[Sequence[int]]) -> Tensor:
    """Which inputs of points are NaN, or of a level that no training row has, ``(m, d)``.

    ``categories`` has for each category the columns that are its levels. A row without any of them
    has a further level, which is unknown if no training row has it.
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
    shrunk as Ledoit and Wolf (2004) have it. Up to 64 of the training rows are drawn by the seed.

    Returns:
        Points without unknown inputs, ``(r, v, d)``, and their weights, ``(r, v)``, with sum one.
    """
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
    # Rows that lack the same inputs share one linear solve.
    patterns, which = np.unique(lacking, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        members, lost, known = which.ravel() == number, np.flatnonzero(pattern), ~pattern
        slopes = np.linalg.solve(covariance[np.ix_(known, known)], covariance[np.ix_(known, lost)])
        slopes = slopes * width[lost] / width[known][:, None]
        expected = (points[members][:, known] - center[known]) @ slopes
        fitted = (rows[drawn][:, known] - center[known]) @ slopes
        moved = rows[drawn][:, lost] + expected[:, None] - fitted
        # A linear prediction may leave the range that the training rows have.
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

    ``moments`` gives locations and scales ``(K, p)`` at points ``(p, d)`` without unknown inputs,
    ``tails`` are the variances of the models' distributions of scale one, ``(K, 1)``. Mean and
    variance are those of the average.
    """
    unknown = unknown_inputs(x, train_x, categories)
    # All rows at once, with means for what is unknown; rows that lack something come again below.
    locations, scales = moments(torch.where(unknown, train_x.mean(0), x))
    rows = unknown.any(-1)
    if bool(rows.any()):
        points, weights = completions(x[rows], unknown[rows], train_x, categories, seed)
        values, spreads = (
            values.reshape(-1, *weights.shape) for values in moments(points.flatten(0, 1))
        )
        mean = (weights * values).sum(-1)
        # Total variance: within the completions and between them, in units of scales.
        between = (weights * (values - mean.unsqueeze(-1)).square()).sum(-1)
        locations[:, rows] = mean
        scales[:, rows] = ((weights * spreads.square()).sum(-1) + between / tails).sqrt()
    return locations, scales


def averaged_values(
    values: Callable[[Tensor], Tensor],
    x: Tensor,
    train_x: Tensor,
    categories: Sequence[Sequence[int]],
    seed: int = 0,
) -> Tensor:
    """Values at points, such as probabilities ``(C, m)``, averaged over unknown inputs.

    ``values`` gives ``(C, p)`` at points ``(p, d)`` without unknown inputs.
    """
    unknown = unknown_inputs(x, train_x, categories)
    rows = unknown.any(-1)
    if not bool(rows.any()):
        return values(x)
    points, weights = completions(x[rows], unknown[rows], train_x, categories, seed)
    # One call, since factors above half a GiB are not kept for the next.
    known, spread = values(torch.cat([x[~rows], points.flatten(0, 1)])).split(
        [int((~rows).sum()), weights.numel()], dim=-1
    )
    result = known.new_empty(len(known), len(x))
    result[:, ~rows] = known
    result[:, rows] = (weights * spread.unflatten(-1, weights.shape)).sum(-1)
    return result


def within_reach(x: Tensor, train_x: Tensor, ranges: float) -> Tensor:
    """Points with values at most so many ranges of a column away from those of training rows."""
    least, most = train_x.aminmax(dim=0)
    room = ranges * (most - least)
    # NaN and infinite values stay what they are, to be refused or averaged over.
    return torch.where(x.isfinite(), x.clamp(least - room, most + room), x)


def filled(
    x: Tensor, categories: Sequence[Sequence[int]], seed: int = 0, train_x: Tensor | None = None
) -> Tensor:
    """Rows ``(n, d)`` whose missing inputs are replaced by their expectations given the others.

    ``train_x`` ``(m, d)`` shows what may be; if None the rows do, in which no column may be missing
    everywhere.
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
