"""Whether models know how far off their predictions are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.evaluation._criteria import scored_in
from gpclml.evaluation._figures import (
    as_comparison,
    colour,
    figure_and_axes,
    legend_below,
    say_nothing_drawn,
)
from gpclml.evaluation.comparison import Comparison
from gpclml.evaluation.model_scores import ModelScores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_calibration"]

_BINS = 10
_TAILS = (0.025, 0.975)


def plot_calibration(
    comparison: Comparison | Mapping[str, ExactGP],
    *,
    axes: Sequence[Axes] | None = None,
    **options: Any,
) -> Figure:
    r"""Two panels: the places of targets in their predictions, and how many are in intervals.

    Predictions are from all other points; a model without LOO is left out. Above a histogram of
    :math:`\Phi((y_i - \mu_{-i}) / \sigma_{-i})`, flat where predictions are calibrated, high at
    both ends where they are too sure, in the middle where they are not sure enough. Below the
    share of targets in the central interval of each nominal share, less that share: below zero a
    model is too sure. Grey is where 95 % of what chance gives would be if points were independent,
    which they are not quite.

    Args:
        comparison: What :func:`score_models` gives, or models, which it is then called with.
        axes: Two axes to draw in.
        **options: Of :func:`score_models`, with models.

    Returns:
        The figure, of no window; write it with ``savefig``.

    Raises:
        UnsupportedError: If matplotlib is not installed, or this is no comparison.
        ArgumentError: If there are other than two axes, or options beside a comparison.
    """
    from scipy.stats import binom

    compared = as_comparison(comparison, options)
    figure, (above, below) = figure_and_axes(axes, (2, 1), 5.6)
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
        places = _places(scores, compared.targets).numpy()
        heights, edges = np.histogram(places, bins=_BINS, range=(0, 1), density=True)
        above.stairs(heights, edges, color=colour(place), baseline=None, linewidth=1.5)
        inside = (np.abs(2 * places - 1)[:, None] <= nominal).mean(0)
        below.plot(nominal, inside - nominal, color=colour(place), label=name)
    above.axhline(1, color="gray", linewidth=0.8, zorder=0)
    below.axhline(0, color="gray", linewidth=0.8, zorder=0)
    above.set_title("place of targets in their predictions", loc="left", fontsize="medium")
    above.set(
        xlabel="predictive probability of less", ylabel="density", xlim=(0, 1), ylim=(0, None)
    )
    below.set_title("coverage of central intervals", loc="left", fontsize="medium")
    below.set(xlabel="nominal share", ylabel="observed less nominal", xlim=(0, 1))
    if not scored:
        say_nothing_drawn(above, "LOO")
    legend_below(below, *below.get_legend_handles_labels())
    return figure


def _places(scores: ModelScores, targets: Tensor) -> Tensor:
    """Predictive probabilities of a smaller value than each target."""
    return torch.special.ndtr((targets - scores.loo_mean) / scores.loo_variance.sqrt())
