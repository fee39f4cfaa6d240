"""How models fit their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.models import ExactGP

from gpclml.evaluation._checks import units_of_targets
from gpclml.evaluation._criteria import scored_in
from gpclml.evaluation._figures import as_comparison, colour, figure_and_axes, say_nothing_drawn
from gpclml.evaluation.comparison import Comparison
from gpclml.inference.predictive import marginal_predictive
from gpclml.inference.units import Units

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

__all__ = ["plot_fit"]

_DEVIATIONS = 2
_PLACES = 300  # along one input
_ROOM = 0.05  # beyond the data


def plot_fit(
    comparison: Comparison | Mapping[str, ExactGP],
    *,
    axes: Axes | Sequence[Axes] | None = None,
    **options: Any,
) -> Figure:
    """A panel a model: its predictions and the targets.

    With one input the mean and two deviations of observations over the input, given all targets.
    Otherwise targets against their predictions from all other points, with two deviations. The
    panel of a model without LOO says so.

    Args:
        comparison: What :func:`score_models` gives, or models, which it is then called with.
        axes: As many axes as models, to draw in, in the order of the ranking.
        **options: Of :func:`score_models`, with models.

    Returns:
        The figure, of no window; write it with ``savefig``.

    Raises:
        UnsupportedError: If matplotlib is not installed, or this is no comparison.
        ArgumentError: If there are other than so many axes, or options beside a comparison.
    """
    compared = as_comparison(comparison, options)
    inputs = {name: _one_input(model) for name, model in compared.models.items()}
    count = len(inputs)
    if all(values is not None for values in inputs.values()):
        figure, panels = figure_and_axes(axes, (count, 1), 0.6 + 1.9 * count, sharex=True)
        for place, (name, panel) in enumerate(zip(inputs, panels, strict=True)):
            _draw_function(panel, compared, name, cast(Any, inputs[name]), place)
        panels[-1].set_xlabel("input")
        return figure
    columns = min(count, 2)
    lines = -(-count // columns)
    shape = (1, count) if axes is not None else (lines, columns)
    figure, panels = figure_and_axes(axes, shape, 0.4 + (2.7 if columns == 2 else 4.2) * lines)
    for panel in panels[count:]:
        panel.remove()
    for place, (name, panel) in enumerate(zip(inputs, panels, strict=False)):
        _draw_left_out(panel, compared, name, place)
    for place, panel in enumerate(panels[:count]):
        if place % columns == 0:
            panel.set_ylabel("target")
        if place + columns >= count:
            panel.set_xlabel("prediction from the others")
    return figure


def _one_input(model: ExactGP) -> torch.Tensor | None:
    """Inputs of a model of one column, as the user gave them, if that can be told."""
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


def _draw_function(
    axes: Axes, compared: Comparison, name: str, x: torch.Tensor, place: int
) -> None:
    axes.set_title(name, loc="left", fontsize="medium")
    if name not in scored_in("loo", compared.scores):
        say_nothing_drawn(axes, "predictions")
        return
    model = compared.models[name]
    low, high = float(x.min()), float(x.max())
    room = _ROOM * (high - low)
    grid = torch.linspace(low - room, high + room, _PLACES, dtype=x.dtype, device=x.device)
    mean, deviation = _predictions(model, grid.unsqueeze(-1), compared.units)
    at = grid.cpu().numpy()
    axes.fill_between(
        at, mean - _DEVIATIONS * deviation, mean + _DEVIATIONS * deviation, color=colour(place),
        alpha=0.2, lw=0,
    )  # fmt: skip
    axes.plot(at, mean, color=colour(place))
    points = x.squeeze(-1).cpu()[compared.rows]
    axes.plot(points.numpy(), compared.targets.numpy(), "k.", markersize=4, alpha=0.7)
    axes.set_ylabel("target")


@torch.no_grad()
def _predictions(
    model: ExactGP, x: torch.Tensor, units: Units
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means and deviations of new observations; under fixed noises with their mean."""
    noise = None
    if isinstance(model.likelihood, FixedNoiseGaussianLikelihood):
        noise = cast(Any, model.likelihood.noise_covar).noise.mean().expand(len(x))
    normal, _ = marginal_predictive(model, x, x.new_zeros(len(x)), noise)
    scale, shift = units_of_targets(model, units)
    mean, deviation = (part.cpu().double() for part in (normal.mean, normal.stddev))
    return (scale * mean + shift).numpy(), (scale * deviation).numpy()


def _draw_left_out(axes: Axes, compared: Comparison, name: str, place: int) -> None:
    axes.set_title(name, loc="left", fontsize="medium")
    if name not in scored_in("loo", compared.scores):
        say_nothing_drawn(axes, "predictions")
        return
    scores, targets = compared.scores[name], compared.targets.numpy()
    mean, deviation = scores.loo_mean.numpy(), scores.loo_variance.sqrt().numpy()
    axes.errorbar(
        mean, targets, xerr=_DEVIATIONS * deviation, fmt=".", color=colour(place), markersize=5,
        elinewidth=0.6, alpha=min(1.0, 0.15 + 30 / len(targets)),
    )  # fmt: skip
    ends = [min(targets.min(), mean.min()), max(targets.max(), mean.max())]
    axes.plot(ends, ends, color="black", linewidth=0.8)
