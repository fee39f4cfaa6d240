from __future__ import annotations

import numpy as np
import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from matplotlib.figure import Figure
from scipy.stats import norm

from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.evaluation import (
    compare,
    plot_calibration,
    plot_compare,
    plot_fit,
    plot_learning_curves,
    score_models,
)
from gpclml.models import GPRegression

PLOTS = {plot_compare: 3, plot_learning_curves: 2, plot_calibration: 2, plot_fit: 3}


@pytest.fixture
def comparison(models):
    return score_models(models, m=20, orderings=20)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_every_figure_is_drawn(plot, comparison, tmp_path):
    figure = plot(comparison)
    assert len(figure.axes) == PLOTS[plot]
    assert figure.get_figwidth() < 6  # legible on a narrow page
    figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
    drawn = Figure().subplots(1, PLOTS[plot])
    assert plot(comparison, axes=drawn) is drawn[0].figure
    with pytest.raises(ArgumentError, match=f"axes: got 1, expected {PLOTS[plot]}"):
        plot(comparison, axes=[drawn[0]])


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_models_are_scored_on_the_way(plot, models):
    assert isinstance(plot(models, m=20, orderings=3), Figure)
    assert isinstance(plot({"good": models["good"]}, orderings=3), Figure)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_what_cannot_be_drawn(plot, comparison, models):
    with pytest.raises(ArgumentError, match="m"):
        plot(comparison, m=3)
    with pytest.raises(UnsupportedError, match="use score_models"):
        plot(compare(models))


def test_dots_are_differences(comparison):
    table = comparison.table
    for axes, criterion in zip(plot_compare(comparison).axes, ("lml", "clml", "loo"), strict=True):
        expected = table[criterion] - table[criterion].iloc[0]
        dots = [bars.lines[0] for bars in axes.containers]
        assert [float(dot.get_xdata()[0]) for dot in dots] == pytest.approx(expected.tolist())
        filled = [dot.get_markerfacecolor() != "white" for dot in dots]
        assert filled == (table[criterion] == table[criterion].max()).tolist()
        assert [label.get_text() for label in axes.get_yticklabels()] == table.index.tolist()
    (left, _), (right, _) = axes.containers[2].lines[2][0].get_segments()[0]
    assert (right - left) / 2 == pytest.approx(table["difference_se"].iloc[2])


def test_far_models_do_not_hide_near_ones(comparison, data):
    x, y = data()
    far = GPRegression(x, y, standardize=False)
    models = {**comparison.models, "far": far}
    above, below = plot_learning_curves(models, orderings=5).axes
    assert below.get_yscale() == "symlog"
    assert {axes.get_xscale() for axes in plot_compare(models, orderings=5).axes} >= {"symlog"}
    first = next(iter(comparison.scores.values())).curves.mean(0)
    low, high = above.get_ylim()
    assert high - low < 10 * float(first.max() - first.min() + 1)


def test_curves_end_at_the_difference_in_evidence(comparison):
    above, below = plot_learning_curves(comparison).axes
    table = comparison.table
    ends = [float(line.get_ydata()[-1]) for line in below.lines[:2]]
    assert ends == pytest.approx((table["lml"] - table["lml"].iloc[0]).tolist()[1:])
    scores = next(iter(comparison.scores.values()))
    line = above.lines[0]
    assert line.get_xdata()[0] == 1
    assert line.get_ydata()[0] == pytest.approx(float(scores.curves[:, 0].mean()))
    # Windows cover all terms once: the mean over windows, by width, is the whole.
    alone = plot_learning_curves({table.index[0]: comparison.models[table.index[0]]}, orderings=4)
    total = float(alone.axes[1].lines[0].get_ydata()[-1])
    assert total == pytest.approx(table["lml"].iloc[0])


def test_coverage_is_counted(comparison):
    above, below = plot_calibration(comparison).axes
    scores = next(iter(comparison.scores.values()))
    error = (comparison.targets - scores.loo_mean) / scores.loo_variance.sqrt()
    for share in (0.5, 0.9):
        inside = float((error.abs() <= norm.ppf((1 + share) / 2)).double().mean())
        line = below.lines[0]
        place = np.abs(line.get_xdata() - share).argmin()
        assert line.get_ydata()[place] == pytest.approx(inside - share, abs=1e-9)
    heights = above.patches[1].get_data().values
    assert heights.sum() == pytest.approx(10)  # a density over ten bins
    low = (error < norm.ppf(0.1)).double().mean()
    assert heights[0] == pytest.approx(10 * float(low))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("training", [True, False])
def test_one_input_is_drawn_as_a_function(data, training):
    x, y = data(columns=1)
    x = 0.8 * x + 0.1
    ours = GPRegression(x, y)
    theirs = SingleTaskGP(
        x, y.unsqueeze(-1), input_transform=Normalize(1), outcome_transform=Standardize(1)
    )
    noise = torch.full_like(y, 40.0).unsqueeze(-1)
    fixed = SingleTaskGP(x, y.unsqueeze(-1), train_Yvar=noise, outcome_transform=Standardize(1))
    models = {"ours": ours, "theirs": theirs, "fixed": fixed}
    for model in models.values():
        model.train(training)
    figure = plot_fit(models, orderings=3)
    assert all(model.training == training for model in models.values())
    for axes in figure.axes:
        line, points = axes.lines
        name = axes.get_title(loc="left")
        assert points.get_ydata() == pytest.approx(y.numpy())
        assert points.get_xdata() == pytest.approx(x.squeeze(-1).numpy())
        grid = torch.as_tensor(line.get_xdata()).unsqueeze(-1)
        with torch.no_grad():
            if name == "ours":
                mean = ours.predict(grid).mean
            else:
                mean = models[name].posterior(grid).mean.squeeze(-1)
        torch.testing.assert_close(torch.as_tensor(line.get_ydata()), mean, atol=1e-6, rtol=1e-6)


def test_several_inputs_are_drawn_left_out(comparison):
    for axes, (name, scores) in zip(
        plot_fit(comparison).axes, comparison.scores.items(), strict=True
    ):
        assert axes.get_title(loc="left") == name
        dots = axes.containers[0].lines[0]
        assert dots.get_xdata() == pytest.approx(scores.loo_mean.numpy())
        assert dots.get_ydata() == pytest.approx(comparison.targets.numpy())
