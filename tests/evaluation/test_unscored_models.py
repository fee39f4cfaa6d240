"""A model or a diagnostic that cannot be computed takes nothing else along."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.utils.errors import NotPSDError
from matplotlib import pyplot

from gpclml.errors import NonFiniteError
from gpclml.evaluation import (
    compare,
    model_scores,
    plot_calibration,
    plot_compare,
    plot_fit,
    plot_learning_curves,
    ranking,
    score_models,
)
from gpclml.linalg import DenseCovariance, LowRankPlusDiagonal
from gpclml.models import GPRegression

pytestmark = pytest.mark.filterwarnings("ignore:A not p.d.")

OPTIONS = {"m": 20, "orderings": 10, "curves": 4}
PLOTS = plot_calibration, plot_compare, plot_fit, plot_learning_curves
# What fails, and the columns or fields that are NaN then.
PARTS = {
    "observed_gaussian": ("lml", "clml", "loo"),
    "log_density": ("lml",),
    "_tail_densities": ("clml",),
    "_leave_one_out": ("loo",),
    "learning_curve": (),
    "condition_number": (),
}


class Negative(gpytorch.kernels.RBFKernel):
    """No kernel, but beside noise of twice its largest eigenvalue the sum is a covariance."""

    def __init__(self, x, noise):
        super().__init__()
        self.to(x)
        self.share = 1.0
        self.share = 0.5 * noise / float(torch.linalg.eigvalsh(-self(x).to_dense().detach()).max())

    def forward(self, x1, x2, diag=False, **params):
        return -self.share * super().forward(x1, x2, diag=diag, **params)


class NegativeGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, noise=1.0):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood().to(x))
        self.likelihood.noise = noise
        self.mean = gpytorch.means.ZeroMean()
        self.kernel = Negative(x, noise)

    def forward(self, x):
        return MultivariateNormal(self.mean(x), self.kernel(x))


@pytest.fixture(autouse=True)
def _close():
    yield
    pyplot.close("all")


@pytest.fixture
def failing(monkeypatch):
    """Makes a function of ``model_scores`` or of covariances fail for the models of these names."""

    def make(function, names, error=NotPSDError):
        current = [""]
        own = hasattr(model_scores, function)
        owners = [model_scores] if own else [DenseCovariance, LowRankPlusDiagonal]
        score = model_scores.score_model

        def tracked(name, *arguments):
            current[0] = name
            return score(name, *arguments)

        def failing(computed):
            def compute(*arguments, **options):
                if current[0] in names:
                    raise error(f"{function} of {current[0]} failed")
                return computed(*arguments, **options)

            return compute

        monkeypatch.setattr(ranking, "score_model", tracked)
        for owner in owners:
            monkeypatch.setattr(owner, function, failing(getattr(owner, function)))

    return make


def broken(x, y):
    model = GPRegression(x, y)
    with torch.no_grad():
        model.covar_module.base_kernel.raw_lengthscale.fill_(torch.nan)
    return model


def test_a_model_without_a_covariance_is_a_row_and_the_others_are_as_they_are(models, data):
    alone = score_models(models, **OPTIONS)
    found = score_models({"broken": broken(*data()), **models}, **OPTIONS)
    assert found.table.index.tolist() == [*alone.table.index, "broken"]
    shared = found.table.iloc[:3].drop(columns="findings")
    assert shared.equals(alone.table.drop(columns="findings"))
    assert shared["failure"].tolist() == ["", "", ""]
    row = found.table.loc["broken"]
    for column in ("lml", "clml", "loo", "difference", "p_worse", "weight"):
        assert math.isnan(row[column])
    assert row["findings"] == ("not-scored", "few-points")
    assert row["failure"].startswith("no LML, CLML, LOO, learning curves or condition")
    assert "wider prior" in row["failure"]
    assert "non-finite" in row["failure"]
    (warning,) = (one for one in found.findings if one.name == "not-scored")
    assert warning.models == ("broken",)
    assert warning.text == f"broken has {row['failure']}."
    assert warning.text in str(found)
    assert found.sentences[:2] == alone.sentences[:2]
    assert found.favourites == alone.favourites


def test_a_diagnostic_that_fails_leaves_the_criteria(data):
    """The prior of the wider function is no covariance where that of the model is one."""
    x, y = data()
    model, other = NegativeGP(x, y), GPRegression(x, y, standardize=False)
    found = compare({"negative": model, "other": other}, **OPTIONS)
    row = found.loc["negative"]
    assert all(math.isfinite(row[column]) for column in ("lml", "clml", "loo", "weight"))
    assert "not-scored" in row["findings"]
    assert row["failure"].startswith("no wider prior (covariance of shape (25, 25)")
    noisy = model.kernel(x).to_dense().detach() + torch.eye(25, dtype=x.dtype)
    expected = torch.distributions.MultivariateNormal(torch.zeros_like(y), noisy)
    assert row["lml"] == pytest.approx(float(expected.log_prob(y)))
    assert found.loc["other", "failure"] == ""


@pytest.mark.parametrize("names", [("good",), ("bad",), ("good", "linear")])
@pytest.mark.parametrize("rank_by", ["lml", "clml", "loo"])
@pytest.mark.parametrize("part", PARTS)
def test_whatever_fails_the_rest_is_told_and_drawn(part, rank_by, names, models, failing):
    whole = score_models(models, rank_by=rank_by, **OPTIONS).table
    failing(part, names)
    found = score_models(models, rank_by=rank_by, **OPTIONS)
    table = found.table
    for name in models:
        for column in ("lml", "clml", "loo"):
            if name in names and column in PARTS[part]:
                assert math.isnan(table.loc[name, column])
            else:
                assert table.loc[name, column] == whole.loc[name, column]
        assert bool(table.loc[name, "failure"]) == (name in names)
        assert ("not-scored" in table.loc[name, "findings"]) == (name in names)
    values = table[rank_by].dropna()
    assert values.is_monotonic_decreasing
    assert table[rank_by].tolist()[: len(values)] == values.tolist()  # the others are last
    scored = table["loo"].notna()
    assert table["weight"].notna().tolist() == scored.tolist()
    assert table["weight"].sum() == pytest.approx(1.0)
    for criterion, best in found.favourites.items():
        assert best == table[criterion].idxmax()
    told = " ".join(found.sentences)
    assert "nan" not in told.lower()
    for name in names:
        assert f"of {name} failed" in told
    assert "nan" not in found._repr_html_().lower()
    for plot in PLOTS:
        plot(found)


def test_a_criterion_that_no_model_has_is_left_out(models, failing):
    failing("_tail_densities", tuple(models))
    found = score_models(models, **OPTIONS)
    assert set(found.favourites) == {"lml", "loo"}
    assert found.table["clml"].isna().all()
    assert any(sentence.startswith("LML and LOO both prefer") for sentence in found.sentences)
    for plot in PLOTS:
        plot(found)


@pytest.mark.parametrize("part", ["_leave_one_out", "observed_gaussian"])
def test_without_any_ranking_the_first_error_is_raised(part, models, failing):
    failing(part, tuple(models))
    with pytest.raises(NotPSDError, match="of good failed") as caught:
        score_models(models, **OPTIONS)
    assert caught.value.__notes__ == ["This happened in the scores of models['good']."]


def test_any_error_of_a_model_is_its_own(models, failing):
    failing("learning_curve", ("bad",), RuntimeError)
    found = compare(models, **OPTIONS)
    assert found.loc["bad", "failure"] == "no learning curves (learning_curve of bad failed)"


def test_an_interrupt_passes_through(models, failing):
    failing("learning_curve", ("bad",), KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        score_models(models, **OPTIONS)


def test_warnings_that_are_errors_pass_through(models, failing):
    failing("learning_curve", ("bad",), UserWarning)
    with pytest.raises(UserWarning, match="of bad"):
        score_models(models, **OPTIONS)


def test_a_single_model_raises_its_own_error(data):
    with pytest.raises(NonFiniteError) as caught:
        score_models({"broken": broken(*data())})
    assert "models['broken']" in caught.value.__notes__[0]


def test_of_equal_models_the_first_ranked_is_every_favourite(data):
    x, y = data()
    twins = score_models({"b": GPRegression(x, y), "a": GPRegression(x, y)}, **OPTIONS)
    assert twins.table.index.tolist() == ["a", "b"]
    assert set(twins.favourites.values()) == {"a"}


def test_of_models_equal_by_one_criterion_the_first_ranked_is_its_favourite(models, monkeypatch):
    monkeypatch.setattr(DenseCovariance, "log_density", lambda *_: torch.tensor(-3.0))
    found = score_models({name: models[name] for name in ("good", "bad")}, **OPTIONS)
    first = found.table.index[0]
    assert first == "good"  # by name "bad" would come first
    assert found.favourites["lml"] == first
