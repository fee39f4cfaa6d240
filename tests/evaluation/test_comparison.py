"""Comparisons: their table, what they refuse, findings, sentences, and models that fail."""

import dataclasses
import math

import gpytorch
import pandas
import pytest
import torch
from botorch.models import KroneckerMultiTaskGP, SingleTaskGP
from botorch.models.transforms import Log
from exact_gps import PlainGP
from gpytorch.kernels import RBFKernel
from gpytorch.means import ZeroMean
from linear_operator.utils.errors import NotPSDError
from matplotlib import pyplot
from scipy.stats import norm

from gpclml.errors import (
    ArgumentError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.evaluation import (
    compare,
    paired_difference,
    plot_calibration,
    plot_compare,
    plot_fit,
    plot_learning_curves,
    score_models,
    stacking_weights,
)
from gpclml.evaluation.comparison import find_in_scores
from gpclml.kernels import PolynomialFeatures
from gpclml.linalg import DenseCovariance, LowRankPlusDiagonal
from gpclml.models import BayesianLinearModel, GPRegression

pytestmark = pytest.mark.filterwarnings("ignore:.*scaled|.*unit cube|.*standard|Sparse|A not p.d.")

COLUMNS = [
    "rank", "lml", "clml", "clml_se", "loo", "loo_se", "difference", "difference_se", "p_worse",
    "weight", "findings", "failure",
]  # fmt: skip


def test_the_table_is_made_of_the_scores(models):
    result = score_models(models, m=20, orderings=50)
    table = result.table
    assert list(table.columns) == COLUMNS
    assert table["rank"].tolist() == [0, 1, 2]
    assert table["loo"].is_monotonic_decreasing
    first, *_ = result.scores.values()
    logs = torch.stack([scores.loo for scores in result.scores.values()])
    assert table["weight"].tolist() == pytest.approx(stacking_weights(logs).tolist())
    for name, scores in result.scores.items():
        row = table.loc[name]
        assert row["loo"] == pytest.approx(float(scores.loo.sum()))
        assert row["loo_se"] == pytest.approx(5 * float(scores.loo.std()))
        assert row["clml"] == pytest.approx(float(scores.clml.mean()))
        assert row["clml_se"] == pytest.approx(float(scores.clml.std()) / math.sqrt(50))
        apart = scores.loo - first.loo
        assert row["difference"] == pytest.approx(float(apart.sum()))
        assert row["difference_se"] == pytest.approx(5 * float(apart.std()))
        expected = norm.cdf(0, row["difference"], row["difference_se"]) if row["rank"] else math.nan
        assert row["p_worse"] == pytest.approx(expected, nan_ok=True)
    alone = compare(dict(reversed(models.items())), m=20, orderings=50)  # in another order
    pandas.testing.assert_frame_equal(alone, table, check_flags=False, check_exact=False)
    assert alone.attrs == {
        "m": 20, "orderings": 50, "curves": 50, "rank_by": "loo", "units": "original",
        "num_data": 25,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["lml", "clml", "loo"])
def test_each_criterion_ranks(fourier, criterion):
    result = score_models(fourier, m=85, rank_by=criterion)
    table = result.table
    assert table.index[0] == ("M3" if criterion == "lml" else "M9")
    expected = table[criterion] - table[criterion].iloc[0]
    assert table["difference"].tolist() == pytest.approx(expected.tolist())
    first, second = result.scores.values()
    error = table["difference_se"].iloc[1]
    if criterion == "lml":
        assert math.isnan(error)
        assert table["p_worse"].iloc[1] < 0.05  # what the LML ranks second predicts better
    if criterion == "clml":
        apart = second.clml - first.clml
        assert error == pytest.approx(float(apart.std()) / math.sqrt(len(apart)))


def test_paired_differences():
    terms, reference = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.5, 2.5, 3.0])
    difference = paired_difference(terms, reference)
    assert difference.value == pytest.approx(0.0)
    assert difference.standard_error == pytest.approx(math.sqrt(3) * math.sqrt(0.75))
    assert difference.p_worse == pytest.approx(0.5)
    assert paired_difference(terms, terms + 1.0).p_worse == 1.0
    assert paired_difference(terms + 1.0, terms).p_worse == 0.0
    assert math.isnan(paired_difference(terms[:1], reference[:1]).p_worse)
    with pytest.raises(ShapeError, match="reference"):
        paired_difference(terms, reference[:2])


def test_equal_models_differ_by_nothing(data):
    x, y = data()
    result = score_models({name: GPRegression(x, y) for name in ("b", "a")})
    table = result.table
    assert table.index.tolist() == ["a", "b"]
    assert table["difference"].tolist() == table["difference_se"].tolist() == [0.0, 0.0]
    assert table["p_worse"].iloc[1] == 0.5
    assert table["weight"].tolist() == pytest.approx([0.5, 0.5])
    assert "LML, CLML and LOO are the same for all models." in result.sentences


def test_standardized_and_raw_models_of_one_density_agree(data):
    x, y = data()
    standardized = GPRegression(x, y)
    standardized.covar_module.outputscale = 1.3
    standardized.likelihood.noise = 0.07
    standardized.mean_module.constant = 0.2
    raw = GPRegression(x, y, standardize=False)
    scale, input_scale = standardized.target_scale, standardized.input_standardizer.scale
    raw.covar_module.outputscale = 1.3 * scale**2
    raw.likelihood.noise = 0.07 * scale**2
    raw.mean_module.constant = 0.2 * scale + y.mean()
    lengthscale = standardized.covar_module.base_kernel.lengthscale
    raw.covar_module.base_kernel.lengthscale = lengthscale * input_scale
    result = score_models({"raw": raw, "standardized": standardized})
    first, second = (result.table.iloc[i] for i in range(2))
    for column in ("lml", "clml", "clml_se", "loo", "loo_se"):
        assert first[column] == pytest.approx(second[column], rel=1e-7)
    assert second["p_worse"] == 0.5
    first, second = result.scores.values()
    torch.testing.assert_close(first.loo_mean, second.loo_mean)
    torch.testing.assert_close(first.loo_variance, second.loo_variance)


def test_a_seed_is_all_there_is_to_it(models):
    state = torch.random.get_rng_state()
    first = compare(models, orderings=5, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    pandas.testing.assert_frame_equal(first, compare(models, orderings=5, seed=3))
    other = compare(models, orderings=5, seed=4)
    assert not (first["clml"] == other["clml"]).any()
    assert first["loo"].tolist() == other["loo"].tolist()
    given = compare(models, orderings=score_models(models, orderings=5, seed=3).orders)
    pandas.testing.assert_frame_equal(first, given, check_exact=False, check_flags=False)


def snapshot(model):
    values = [value.clone() for value in model.state_dict().values()]
    modes = [module.training for module in model.modules()]
    return values, (modes, id(model.prediction_strategy), id(model.train_inputs[0]))


@pytest.mark.parametrize("training", [True, False])
def test_models_stay_as_they_are(models, training):
    x = next(iter(models.values())).train_inputs[0]
    for model in models.values():
        model.train(training)
        model.likelihood.train(not training)  # a mode of its own
        if not training:
            with torch.no_grad():
                model(x[:2])  # fills its cache
    before = {name: snapshot(model) for name, model in models.items()}
    compare(models)
    for name, model in models.items():
        values, others = snapshot(model)
        assert all(map(torch.equal, values, before[name][0]))
        assert others == before[name][1]
        assert (model.prediction_strategy is None) == training
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_numbers_of_orderings_follow_the_size(data):
    x, y = data(n=700)
    assert score_models({"a": GPRegression(x, y)}, m=0).orders.shape == (68, 700)
    small = score_models({"a": GPRegression(x[:40], y[:40])})
    assert small.m == 36
    assert small.orders.shape == (1000, 40)
    assert small.scores["a"].curves.shape == (100, 40)
    single = compare({name: GPRegression(x[:1], y[:1], kernel=name) for name in ("rbf", "rq")})
    for criterion in ("clml", "loo"):
        assert single[criterion].tolist() == pytest.approx(single["lml"].tolist())
    assert single["loo_se"].isna().all()


def changed(y, row=4, value=math.nan):
    other = y.clone()
    other[row] = value
    return other


# What is compared with a model of the data, the error, and what its message matches.
REFUSED = {
    "fewer points": (
        lambda x, y: GPRegression(x[:9], y[:9]), ShapeError, "got 9 training points, expected the",
    ),
    "another order": (
        lambda x, y: GPRegression(x, y.flip(0)), ArgumentError, "got target .* in row .*same order",
    ),
    "a target that is near": (
        lambda x, y: GPRegression(x, y + 1e-3), ArgumentError, "got target .* in row",
    ),
    "a missing target": (
        lambda x, y: GPRegression(x, changed(y)), ArgumentError, "got row 4 missing",
    ),
    "several outputs": (
        lambda x, y: SingleTaskGP(x, torch.stack([y, y.sin()], -1)), ShapeError, "got targets of",
    ),
    "several tasks": (
        lambda x, y: KroneckerMultiTaskGP(x, torch.stack([y, -y], -1)), ShapeError, "got targets",
    ),
    "a batch": (
        lambda x, y: GPRegression(torch.stack([x, x]), torch.stack([y, y])),
        ShapeError,
        "got targets of shape",
    ),
    "a batch of kernels": (
        lambda x, y: PlainGP(x, y, RBFKernel(batch_shape=torch.Size([2])), mean=ZeroMean()).to(x),
        ShapeError,
        r"got a covariance of shape \(2, 25, 25\)",
    ),
    "a logarithm": (
        lambda x, y: SingleTaskGP(x, y.exp().unsqueeze(-1), outcome_transform=Log()),
        UnsupportedError,
        "got an outcome transform Log",
    ),
    "no GP": (lambda x, y: torch.nn.Linear(1, 1), UnsupportedError, "got Linear"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name, data):
    x, y = data()
    y = y / 37.0
    make, error, match = REFUSED[name]
    with (
        gpytorch.settings.observation_nan_policy("mask"),
        pytest.raises(error, match=rf"models\['b'\]: {match}"),
    ):
        compare({"a": GPRegression(x, y, standardize=False), "b": make(x, y)})


def test_arguments_that_are_refused(data):
    x, y = data()
    model, raw = GPRegression(x, y), GPRegression(x, y, standardize=False)
    for models, options, error, match in (
        ({}, {}, ArgumentError, "models: got none"),
        ([model], {}, UnsupportedError, "models: got list"),
        ({1: model}, {}, ArgumentError, "models, a name in it: got"),
        ({"a": model, "b": raw}, {"units": "training"}, ArgumentError, "in units='original'"),
        ({"a": model}, {"units": "orginal"}, ArgumentError, "units: got 'orginal'"),
        ({"a": model}, {"rank_by": "loss"}, UnknownNameError, "clml, lml, loo"),
        ({"good": model}, {"problems": {"god": "It failed."}}, UnknownNameError, "mean 'good'"),
    ):
        with pytest.raises(error, match=match):
            compare(models, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"m": 25}, "m: got 25, expected an integer from 0 to 24"),
        ({"m": 2.5}, "m: got 2.5"),
        ({"m": True}, "m: got True"),
        ({"orderings": 0}, "orderings: got 0"),
        ({"orderings": torch.zeros(2, 25, dtype=torch.long)}, "no permutations"),
        ({"orderings": torch.arange(25)}, "orderings"),
    ],
)
def test_numbers_out_of_range(data, options, match):
    with pytest.raises(ArgumentError, match=match):
        compare({"a": GPRegression(*data())}, **options)


def test_models_that_compare(data):
    """Rounding and standardization make no other data, nor does a transform that all share."""
    x, y = data()
    far = y + 1e4
    single, double = GPRegression(x.float(), far.float()), GPRegression(x, far)
    raw = GPRegression(x.float(), far.float(), standardize=False)
    assert len(compare({"double": double, "single": single, "raw": raw}, orderings=3)) == 3
    logarithm = SingleTaskGP(x, (y - y.min() + 1).unsqueeze(-1), outcome_transform=Log())
    assert len(compare({"a": logarithm, "b": logarithm}, units="training", orderings=3)) == 2


# Findings and sentences


def finding_of(result, name):
    (finding,) = (finding for finding in result.findings if finding.name == name)
    return finding


def names_of(findings):
    return {finding.name for finding in findings}


@pytest.mark.slow
def test_the_criteria_disagree_on_the_fourier_models(fourier):
    result = score_models({"<M3>": fourier["M3"], "M9": fourier["M9"]}, m=85)
    table = result.table
    assert table.loc["<M3>", "lml"] == pytest.approx(53.803669, abs=1e-5)
    assert table.loc["M9", "lml"] == pytest.approx(28.918961, abs=1e-5)
    assert table.index.tolist() == ["M9", "<M3>"]
    finding = finding_of(result, "criteria-disagree")
    assert finding.models == ("M9", "<M3>")
    assert "LML prefers <M3> to M9 by 24.9 nats" in finding.text
    assert "CLML prefers M9 to <M3> by 2." in finding.text
    assert "LOO prefers M9 to <M3> by 15.6 ± 6.9 nats" in finding.text
    assert "LML prefers <M3>; CLML and LOO prefer M9." in result.sentences
    assert result.sentences[0] == "LOO ranks M9 first, 15.6 ± 6.9 nats ahead of <M3>."
    # The first tenth of the points is where M9 loses.
    assert finding_of(result, "first-terms").models == ("M9",)
    text, page = repr(result), result._repr_html_()
    assert "CLML of 15 points given 85, mean over 1000 orderings; ranked by LOO" in text
    assert all(sentence in text for sentence in result.sentences)
    assert "&lt;M3&gt;" in page
    assert "<M3>" not in page
    assert page.count("<li>") == len(result.sentences)
    # Favourites that lead by little do not disagree.
    scores = dict(result.scores)
    for lead, disagree in ((0.9, False), (1.1, True)):
        scores["<M3>"] = dataclasses.replace(scores["<M3>"], lml=scores["M9"].lml + lead)
        assert ("criteria-disagree" in names_of(find_in_scores(scores))) == disagree


def test_agreeing_criteria_give_no_finding(data):
    x, y = data(n=120)
    good, bad = GPRegression(x, y), GPRegression(x, y)
    good.likelihood.noise = 0.05
    result = score_models({"good": good, "bad": bad})
    assert result.findings == ()
    assert result.table["findings"].tolist() == [(), ()]
    assert "LML, CLML and LOO all prefer good." in result.sentences


def test_points_that_are_copies_of_others_are_told(data):
    x, y = data(n=120)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.arange(120), torch.arange(40)])[order]
    models = {"a": GPRegression(x[rows], y[rows]), "b": GPRegression(x[rows], y[rows], "rbf")}
    finding = finding_of(score_models(models), "copied-points")
    assert set(finding.models) == {"a", "b"}
    assert finding.text.startswith("40 of 160 points are copies of others")


@pytest.mark.slow
def test_a_vague_prior_loses_in_its_first_terms():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(120, generator=generator, dtype=torch.float64)
    y = 1 + 2 * x.squeeze(-1) - x.squeeze(-1) ** 2 + 0.3 * noise
    models = {
        name: BayesianLinearModel(x, y, PolynomialFeatures(3), prior_variance=prior, noise=0.09)
        for name, prior in (("vague", 1e6), ("plain", 4.0))
    }
    result = score_models(models)
    finding = finding_of(result, "first-terms")
    assert finding.models == ("vague",)
    plain, vague = (result.scores[name] for name in ("plain", "vague"))
    share = float((plain.curves - vague.curves)[:, :12].mean(0).sum()) / (plain.lml - vague.lml)
    assert share > 0.8
    assert finding.text.startswith(f"{share:.0%} of the {plain.lml - vague.lml:.1f} nats")
    assert "first 12 of 120 points" in finding.text
    # Its predictions are as good.
    assert "vague" in finding_of(result, "small-difference").models


def test_near_duplicates_in_single_precision(data):
    x, y = data(n=60)
    x, y = torch.cat([x, x + 1e-6]), torch.cat([y, y])
    pair = {}
    for name, dtype in (("single", torch.float32), ("double", torch.float64)):
        pair[name] = GPRegression(x.to(dtype), y.to(dtype))
        pair[name].likelihood.noise = 1e-4
    result = score_models(pair, orderings=5)
    finding = finding_of(result, "ill-conditioned")
    assert finding.models == ("single",)
    assert f"{result.scores['single'].condition_number:.1e}" in finding.text


def test_few_points_and_small_differences(data):
    x, y = data(n=100)
    assert "few-points" not in names_of(score_models({"a": GPRegression(x, y)}).findings)
    x, y = x[:99], y[:99]
    pair = {name: GPRegression(x, y, kernel=name) for name in ("rbf", "rq")}
    pair["twin"] = pair["rbf"]
    result = score_models(pair)
    assert "99" in finding_of(result, "few-points").text
    assert "small-difference" not in result.table["findings"].iloc[0]
    assert "small-difference" in result.table.loc["twin", "findings"]
    single = score_models({"a": pair["rbf"]})
    row = single.table.iloc[0]
    assert (row["rank"], row["difference"], row["weight"]) == (0, 0.0, 1.0)
    assert single.sentences == (
        "With n = 99, fewer than 100 points, standard errors over points are mostly too small; the "
        "true ones may be twice as large.",
    )


@pytest.mark.slow
def test_a_model_whose_fit_failed_is_not_ranked(models):
    problem = "The fit ended before an optimum."
    first, *others = score_models(models).table.index
    result = score_models(models, problems={first: problem, others[0]: ""})
    assert finding_of(result, "fit-failed").models == (first,)
    assert f"{first}: {problem}" in result.sentences
    assert list(result.table.index) == list(result.models) == [*others, first]
    assert result.table["rank"].tolist()[:-1] == list(range(len(others)))
    assert math.isnan(result.table.loc[first, "rank"])
    assert ["fit-failed" in names for names in result.table["findings"]] == [False, False, True]
    assert result.sentences[0].startswith(f"LOO ranks {others[0]} first, ")
    alone = score_models(models, problems=dict.fromkeys(others, problem))
    assert alone.sentences[0] == f"{first} is the only model whose fit did not fail."
    neither = score_models(models, problems=dict.fromkeys(models, problem))
    assert neither.table["rank"].isna().all()
    assert neither.sentences[0] == "No model is ranked, because each fit failed."


def test_a_model_that_predicts_the_mean_is_marked(models):
    models["bad"].covar_module.base_kernel.lengthscale = 0.002
    assert finding_of(score_models(models), "predicts-mean").models == ("bad",)


# A model or a diagnostic that cannot be computed takes nothing else along.

OPTIONS = {"m": 20, "orderings": 10}
PLOTS = plot_calibration, plot_compare, plot_fit, plot_learning_curves
NAMES = {DenseCovariance: ("good", "bad"), LowRankPlusDiagonal: ("linear",)}  # of their models


@pytest.fixture
def failing(monkeypatch):
    """Makes a method of all covariances of a kind fail."""

    def make(kind, method, error=NotPSDError):
        def fail(*arguments, **options):
            raise error(f"{method} failed")

        monkeypatch.setattr(kind, method, fail)

    yield make
    pyplot.close("all")


def broken(x, y):
    model = GPRegression(x, y)
    with torch.no_grad():
        model.covar_module.base_kernel.raw_lengthscale.fill_(torch.nan)
    return model


def test_a_model_without_a_covariance_is_a_row_and_the_others_are_as_they_are(models, data):
    alone = score_models(models, **OPTIONS)
    result = score_models({"broken": broken(*data()), **models}, **OPTIONS)
    assert result.table.index.tolist() == [*alone.table.index, "broken"]
    shared = result.table.iloc[:3].drop(columns="findings")
    assert shared.equals(alone.table.drop(columns="findings"))
    row = result.table.loc["broken"]
    assert row[["lml", "clml", "loo", "difference", "p_worse", "weight"]].isna().all()
    assert row["findings"] == ("not-scored", "few-points")
    assert row["failure"].startswith("no LML, CLML, LOO, learning curves or condition")
    assert "non-finite" in row["failure"]
    finding = finding_of(result, "not-scored")
    assert finding.models == ("broken",)
    assert finding.text == f"broken has {row['failure']}."
    assert result.sentences[:2] == alone.sentences[:2]
    with pytest.raises(NonFiniteError) as caught:
        score_models({"broken": broken(*data())})
    assert "models['broken']" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("kind", "method", "criterion"),
    [
        (LowRankPlusDiagonal, "log_density", "lml"),
        (DenseCovariance, "block_log_densities", "clml"),
        (DenseCovariance, "leave_one_out", "loo"),
        (LowRankPlusDiagonal, "leave_one_out", "loo"),
        (DenseCovariance, "sequential", None),
        (LowRankPlusDiagonal, "condition_number", None),
    ],
)
def test_whatever_fails_the_others_are_told_and_drawn(kind, method, criterion, models, failing):
    rank_by = criterion or "loo"
    whole = score_models(models, rank_by=rank_by, **OPTIONS).table
    failing(kind, method)
    result = score_models(models, rank_by=rank_by, **OPTIONS)
    table = result.table
    for name in models:
        fails = name in NAMES[kind]
        for column in ("lml", "clml", "loo"):
            if fails and column == criterion:
                assert math.isnan(table.loc[name, column])
            else:
                assert table.loc[name, column] == whole.loc[name, column]
        assert bool(table.loc[name, "failure"]) == fails
        assert ("not-scored" in table.loc[name, "findings"]) == fails
    values = table[rank_by].dropna()
    assert values.is_monotonic_decreasing
    assert table[rank_by].tolist()[: len(values)] == values.tolist()  # the others are last
    assert table["weight"].notna().tolist() == table["loo"].notna().tolist()
    assert table["weight"].sum() == pytest.approx(1.0)
    sentences = " ".join(result.sentences)
    assert "nan" not in sentences.lower() + result._repr_html_().lower()
    assert f"{method} failed" in sentences
    for plot in PLOTS:
        plot(result)


def test_a_criterion_that_no_model_has_is_left_out(models, failing):
    del models["linear"]
    failing(DenseCovariance, "block_log_densities")
    result = score_models(models, **OPTIONS)
    assert result.table["clml"].isna().all()
    assert any(sentence.startswith("LML and LOO both prefer") for sentence in result.sentences)
    for plot in PLOTS:
        plot(result)
    assert "could not be computed" in plot_compare(result, "clml").texts[0].get_text()
    for method in ("leave_one_out", "sequential"):
        failing(DenseCovariance, method)
    result = score_models(models, rank_by="lml", **OPTIONS)
    for plot in (plot_calibration, plot_fit, plot_learning_curves):
        assert "could not be computed" in plot(result)[0].texts[0].get_text()
    with pytest.raises(NotPSDError, match="failed") as caught:
        score_models(models, rank_by="clml", **OPTIONS)
    assert caught.value.__notes__ == ["This happened in the scores of models['good']."]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, UserWarning])
def test_errors_are_kept_but_interrupts_and_warnings_pass_through(models, failing, error):
    failing(DenseCovariance, "sequential", error)
    if error is RuntimeError:
        failure = compare(models, **OPTIONS).loc["bad", "failure"]
        assert failure == "no learning curves (sequential failed)"
        return
    with pytest.raises(error, match="sequential failed"):
        score_models(models, **OPTIONS)


@pytest.mark.filterwarnings("ignore:A covariance of shape")
def test_scores_that_are_not_finite_name_the_model():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([1.0, 2.0, 2.5], dtype=torch.float64)
    # Nothing but its own target says what the first weight is, and the prior says nothing.
    model = BayesianLinearModel(x, y, prior_variance=1e20, noise=1e-3)
    with pytest.raises(NonFiniteError, match=r"models\['a'\]: .* add noise"):
        compare({"a": model})


def test_of_models_equal_by_one_criterion_the_first_ranked_is_its_favourite(models, monkeypatch):
    monkeypatch.setattr(DenseCovariance, "log_density", lambda *_: torch.tensor(-3.0))
    result = score_models({name: models[name] for name in ("good", "bad")}, **OPTIONS)
    assert result.table.index[0] == "good"  # by name "bad" would come first
    assert "LML, CLML and LOO all prefer good." in result.sentences
