"""Plots of predictions: how models fit their data, and whether their errors are calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.evaluation.comparison import Comparison
from gpclml.evaluation.model_scores import scored_in
from gpclml.evaluation.plots import (
    GUIDE,
    as_comparison,
    axes_for,
    ink,
    legend_below,
    say_nothing_drawn,
    style_of,
)
from gpclml.inference.posterior import marginal_predictive
from gpclml.inference.units import Units, units_of_targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from gpclml.evaluation.plots import AxesGiven

__all__ = [
    "plot_calibration",
    "plot_fit",
]

_DEVIATIONS = 2
_PLACES = 300  # along one input
_ROOM = 0.05  # beyond the data
_BINS = 10
_TAILS = (0.025, 0.975)


def plot_fit(
    comparison: Comparison | Mapping[str, ExactGP],
    *,
    ax: AxesGiven = None,
    **options: Any,
) -> NDArray[np.object_]:
    """Plots the predictions of each model and the targets, a panel for each model.

    With one input it shows mean and two standard deviations of observations over the input, given
    all targets; otherwise targets against their predictions from all other points, with two
    standard deviations. The panel of a model without LOO says so.

    Args:
        comparison: As for :func:`plot_compare`, as are options and errors.
        ax: Axes to draw in, one for each model in the order of the ranking; None for those of a
            new figure of pyplot.
        **options: Options of :func:`score_models`, if models are given.

    Returns:
        The axes, one for each model.
    """
    compared = as_comparison(comparison, options)
    inputs = {name: _one_input(model) for name, model in compared.models.items()}
    count = len(inputs)
    one_input = all(values is not None for values in inputs.values())
    columns = 1 if one_input else min(count, 2)
    height = 0.6 + 1.9 * count
    if not one_input:
        height = 0.4 + (2.7 if columns == 2 else 4.2) * -(-count // columns)
    panels = axes_for(ax, count, height, columns, sharex=one_input)
    scored = scored_in("loo", compared.scores)
    for place, (name, panel) in enumerate(zip(inputs, panels, strict=True)):
        panel.set_title(name)
        if name not in scored:
            say_nothing_drawn(panel, "predictions")
        elif one_input:
            _draw_function(panel, compared, name, cast(Any, inputs[name]), place)
        else:
            _draw_left_out(panel, compared, name, place)
        if place % columns == 0:
            panel.set_ylabel("target")
        if place + columns >= count:
            panel.set_xlabel("input" if one_input else "prediction from the others")
    return panels


def plot_calibration(
    comparison: Comparison | Mapping[str, ExactGP],
    *,
    ax: AxesGiven = None,
    **options: Any,
) -> NDArray[np.object_]:
    r"""Plots calibration: probability integral transforms and coverage of intervals, in two panels.

    Predictions are from all other points; models without LOO are left out. The upper panel is a
    histogram of :math:`\Phi((y_i - \mu_{-i}) / \sigma_{-i})`: flat for calibrated predictions, high
    at both ends for overconfident ones, high in the middle for underconfident ones. The lower panel
    is the share of targets within the central interval of each nominal share, less that share; an
    overconfident model is below zero. Grey bands contain 95% of what chance gives for independent
    points, which is an approximation.

    Args:
        comparison: As for :func:`plot_compare`, as are options and errors.
        ax: Two axes to draw in; None for those of a new figure of pyplot.
        **options: Options of :func:`score_models`, if models are given.

    Returns:
        The two axes.
    """
    from scipy.stats import binom

    compared = as_comparison(comparison, options)
    panels = axes_for(ax, 2, 5.6)
    above, below = panels
    count = len(compared.targets)
    nominal = np.linspace(0, 1, 101)
    low, high = (float(binom.ppf(q, count, 1 / _BINS)) * _BINS / count for q in _TAILS)
    above.axhspan(low, high, color="gray", alpha=0.2, lw=0)
    low, high = (binom.ppf(q, count, nominal) / count - nominal for q in _TAILS)
    below.fill_between(nominal, low, high, color="gray", alpha=0.2, lw=0)
    scored = scored_in("loo", compared.scores)
    for place, (name, scores) in enumerate(compared.scores.items()):
        if name not in scored:
            continue
        errors = (compared.targets - scores.loo_mean) / scores.loo_variance.sqrt()
        places = torch.special.ndtr(errors).numpy()
        heights, edges = np.histogram(places, bins=_BINS, range=(0, 1), density=True)
        above.stairs(heights, edges, baseline=None, linewidth=1.5, **style_of(place))
        inside = (np.abs(2 * places - 1)[:, None] <= nominal).mean(0)
        below.plot(nominal, inside - nominal, label=name, **style_of(place))
    above.axhline(1, **GUIDE)
    below.axhline(0, **GUIDE)
    above.set_title("place of targets in their predictions")
    above.set(
        xlabel="predictive probability of less", ylabel="density", xlim=(0, 1), ylim=(0, None)
    )
    below.set_title("coverage of central intervals")
    below.set(xlabel="nominal share", ylabel="observed less nominal", xlim=(0, 1))
    if not scored:
        say_nothing_drawn(above, "LOO")
    legend_below(below, *below.get_legend_handles_labels())
    return panels


def _one_input(model: ExactGP) -> Tensor | None:
    """Inputs of a model of one column, in the user's units, if these are known."""
    assert model.train_inputs is not None
    inputs = model.train_inputs
    if len(inputs) != 1 or inputs[0].shape[-1] != 1:
        return None
    x = inputs[0].detach()
    transform = getattr(model, "input_transform", None)
    if transform is None or model.training:
        return x
    try:
        return transform.untransform(x)
    except NotImplementedError:
        return None


def _draw_function(axes: Axes, compared: Comparison, name: str, x: Tensor, place: int) -> None:
    """Draws mean and deviations of new observations over one input, and the targets."""
    model = compared.models[name]
    low, high = float(x.min()), float(x.max())
    room = _ROOM * (high - low)
    grid = torch.linspace(low - room, high + room, _PLACES, dtype=x.dtype, device=x.device)
    mean, deviation = _predictions(model, grid.unsqueeze(-1), compared.units)
    at = grid.cpu().numpy()
    axes.fill_between(
        at, mean - _DEVIATIONS * deviation, mean + _DEVIATIONS * deviation, alpha=0.2, lw=0,
        color=style_of(place)["color"],
    )  # fmt: skip
    axes.plot(at, mean, **style_of(place))
    points = x.squeeze(-1).cpu()[compared.rows]
    axes.plot(points.numpy(), compared.targets.numpy(), ".", color=ink(), markersize=4, alpha=0.7)


@torch.no_grad()
def _predictions(
    model: ExactGP, x: Tensor, units: Units
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means and deviations of new observations; fixed noises are replaced by their mean."""
    noise = None
    if isinstance(model.likelihood, FixedNoiseGaussianLikelihood):
        noise = cast(Any, model.likelihood.noise_covar).noise.mean().expand(len(x))
    normal = marginal_predictive(model, x, noise)
    scale, shift = units_of_targets(model, units)
    mean, deviation = (part.cpu().double() for part in (normal.mean, normal.stddev))
    return (scale * mean + shift).numpy(), (scale * deviation).numpy()


def _draw_left_out(axes: Axes, compared: Comparison, name: str, place: int) -> None:
    """Draws targets against their predictions from all other points."""
    scores, targets = compared.scores[name], compared.targets.numpy()
    mean, deviation = scores.loo_mean.numpy(), scores.loo_variance.sqrt().numpy()
    axes.errorbar(
        mean, targets, xerr=_DEVIATIONS * deviation, fmt=".", markersize=5, elinewidth=0.6,
        color=style_of(place)["color"], alpha=min(1.0, 0.15 + 30 / len(targets)),
    )  # fmt: skip
    ends = [min(targets.min(), mean.min()), max(targets.max(), mean.max())]
    axes.plot(ends, ends, color=ink(), linewidth=0.8)
