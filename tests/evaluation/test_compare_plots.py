import numpy as np
import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from cycler import cycler
from matplotlib import pyplot, rcParams, style
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scipy.stats import norm

from gpclml.errors import ArgumentError, UnknownNameError, UnsupportedError
from gpclml.evaluation import (
    plot_calibration,
    plot_compare,
    plot_fit,
    plot_learning_curves,
    score_models,
)
from gpclml.models import GPRegression

PLOTS = {plot_compare: 1, plot_learning_curves: 2, plot_calibration: 2, plot_fit: 3}


@pytest.fixture(autouse=True)
def _close():
    yield
    pyplot.close("all")


@pytest.fixture
def comparison(models):
    return score_models(models, m=20, orderings=20)


def panels(axes):
    return list(np.ravel(axes))


def colours(axes):
    lines = [to_hex(line.get_color()) for panel in panels(axes) for line in panel.lines]
    texts = [text for panel in panels(axes) for text in (panel.title, panel.xaxis.label)]
    return lines, [to_hex(text.get_color()) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_axes_are_new_ones_of_pyplot_or_those_given(plot, comparison, models, tmp_path):
    pyplot.close("all")  # what other tests have left
    axes = panels(plot(comparison))
    assert len(axes) == PLOTS[plot]
    figure = pyplot.gcf()
    assert {panel.figure for panel in axes} == {figure}
    assert figure.get_figwidth() == rcParams["figure.figsize"][0]
    figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
    given = Figure().subplots(PLOTS[plot])
    assert panels(plot(comparison, ax=given)) == panels(given)
    assert len(pyplot.get_fignums()) == 1
    for wrong in (Figure().subplots(4), ["left"] * PLOTS[plot], 3):
        with pytest.raises(ArgumentError, match=f"ax: got .*, expected {PLOTS[plot]} axes"):
            plot(comparison, ax=wrong)
    for wrong in (comparison.table, models):
        with pytest.raises(UnsupportedError, match="use score_models"):
            plot(wrong)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_a_style_is_followed_and_without_one_colours_are_safe(plot, comparison):
    safe, _ = colours(plot(comparison))
    assert not {"#1f77b4", "#ff7f0e", "#2ca02c", "#d62728"} & set(safe)  # matplotlib's own
    assert {"#0072b2", "#e69f00", "#009e73"} <= set(safe)
    with style.context(["dark_background", {"axes.prop_cycle": cycler(color=["#123456"])}]):
        drawn, texts = colours(plot(comparison))
        assert "#123456" in drawn
        assert not {*safe, "#000000"} - {"#808080"} & set(drawn)
        assert set(texts) == {"#ffffff"}


@pytest.mark.parametrize("criterion", ["lml", "clml", None])
def test_dots_are_scores_and_triangles_paired_differences(comparison, criterion):
    table, axes = comparison.table, plot_compare(comparison, criterion)
    column = criterion or "loo"
    expected = (table[column] - table[column].iloc[0]).tolist()
    dots = [bars for bars in axes.containers if bars.lines[0].get_marker() == "o"]
    triangles = [bars for bars in axes.containers if bars.lines[0].get_marker() == "^"]
    assert [float(bars.lines[0].get_xdata()[0]) for bars in dots] == pytest.approx(expected)
    filled = [bars.lines[0].get_markerfacecolor() != "none" for bars in dots]
    assert filled == (table[column] == table[column].max()).tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == table.index.tolist()
    if column == "lml":
        assert not triangles
        assert not any(bars.has_xerr for bars in dots)
    else:
        assert [half_width(bars) for bars in dots] == pytest.approx(table[f"{column}_se"].tolist())
        ends = [float(bars.lines[0].get_xdata()[0]) for bars in triangles]
        assert ends == pytest.approx(expected[1:])
    if column == "loo":
        errors = table["difference_se"].tolist()[1:]
        assert [half_width(bars) for bars in triangles] == pytest.approx(errors)

    with pytest.raises(UnknownNameError, match="criterion: got 'waic'"):
        plot_compare(comparison, "waic")


def half_width(bars):
    (left, _), (right, _) = bars.lines[2][0].get_segments()[0]
    return (right - left) / 2


def test_far_models_do_not_hide_near_ones(comparison, data):
    x, y = data()
    far = GPRegression(x, y, standardize=False)
    compared = score_models({**comparison.models, "far": far}, orderings=5)
    above, below = plot_learning_curves(compared)
    assert below.get_yscale() == "symlog"
    assert plot_compare(compared).get_xscale() == "symlog"
    first = next(iter(comparison.scores.values())).curves.mean(0)
    low, high = above.get_ylim()
    assert high - low < 10 * float(first.max() - first.min() + 1)


def test_curves_end_at_the_difference_in_evidence(comparison):
    above, below = plot_learning_curves(comparison)
    assert len({line.get_linestyle() for line in above.lines[:3]}) == 3  # not colours alone
    table = comparison.table
    ends = [float(line.get_ydata()[-1]) for line in below.lines[:2]]
    assert ends == pytest.approx((table["lml"] - table["lml"].iloc[0]).tolist()[1:])
    scores = next(iter(comparison.scores.values()))
    line = above.lines[0]
    assert line.get_xdata()[0] == 1
    assert line.get_ydata()[0] == pytest.approx(float(scores.curves[:, 0].mean()))
    # Windows cover all terms once: the mean over windows, by width, is the whole.
    first = table.index[0]
    alone = score_models({first: comparison.models[first]}, orderings=4)
    total = float(plot_learning_curves(alone)[1].lines[0].get_ydata()[-1])
    assert total == pytest.approx(table["lml"].iloc[0])


def test_coverage_is_counted(comparison):
    above, below = plot_calibration(comparison)
    scores = next(iter(comparison.scores.values()))
    error = (comparison.targets - scores.loo_mean) / scores.loo_variance.sqrt()
    for share in (0.5, 0.9):
        inside = float((error.abs() <= norm.ppf((1 + share) / 2)).double().mean())
        line = below.lines[0]
        nearest = np.abs(line.get_xdata() - share).argmin()
        assert line.get_ydata()[nearest] == pytest.approx(inside - share, abs=1e-9)
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
    panels = plot_fit(score_models(models, orderings=3))
    assert all(model.training == training for model in models.values())
    for axes in panels:
        line, points = axes.lines
        name = axes.get_title()
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
    for axes, (name, scores) in zip(plot_fit(comparison), comparison.scores.items(), strict=True):
        assert axes.get_title() == name
        dots = axes.containers[0].lines[0]
        assert dots.get_xdata() == pytest.approx(scores.loo_mean.numpy())
        assert dots.get_ydata() == pytest.approx(comparison.targets.numpy())
