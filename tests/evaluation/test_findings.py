from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gpclml.errors import UnknownNameError
from gpclml.evaluation import compare, score_models
from gpclml.evaluation.findings import collect_findings
from gpclml.kernels import PolynomialFeatures
from gpclml.models import BayesianLinearModel, GPRegression


def warning_of(comparison, name):
    (found,) = (warning for warning in comparison.findings if warning.name == name)
    return found


def names_of(comparison):
    return {warning.name for warning in comparison.findings}


def test_the_criteria_disagree_on_the_fourier_models(fourier):
    comparison = score_models(fourier, m=85)
    table = comparison.table
    assert table.loc["M3", "lml"] == pytest.approx(53.803669, abs=1e-5)
    assert table.loc["M9", "lml"] == pytest.approx(28.918961, abs=1e-5)
    assert table.loc["M9", "clml"] > table.loc["M3", "clml"]
    assert table.index.tolist() == ["M9", "M3"]
    warning = warning_of(comparison, "criteria-disagree")
    assert warning.models == ("M9", "M3")
    assert "LML prefers M3 to M9 by 24.9 nats" in warning.text
    assert "CLML prefers M9 to M3 by 2." in warning.text
    assert "LOO prefers M9 to M3 by 15.6 ± 6.9 nats" in warning.text
    assert all("criteria-disagree" in names for names in table["findings"])
    assert "LML prefers M3; CLML and LOO prefer M9." in comparison.sentences
    # The first tenth of the points is where M9 loses, and its prior is why.
    assert warning_of(comparison, "first-terms").models == ("M9",)
    assert "prior-sensitive" in table.loc["M9", "findings"]


def test_agreeing_criteria_give_no_warning(data):
    x, y = data(n=120)
    good, bad = GPRegression(x, y), GPRegression(x, y)
    good.likelihood.noise = 0.05
    comparison = score_models({"good": good, "bad": bad})
    assert comparison.findings == ()
    assert comparison.table["findings"].tolist() == [(), ()]
    assert "LML, CLML and LOO all prefer good." in comparison.sentences


def test_points_that_are_copies_of_others_are_told(data):
    x, y = data(n=120)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.arange(120), torch.arange(40)])[order]
    models = {"a": GPRegression(x[rows], y[rows]), "b": GPRegression(x[rows], y[rows], "rbf")}
    found = warning_of(score_models(models), "copied-points")
    assert set(found.models) == {"a", "b"}
    assert found.text.startswith("40 of 160 points are copies of others")


def test_favourites_that_lead_by_little_do_not_disagree(fourier):
    comparison = score_models(fourier, m=85)
    scores = dict(comparison.scores)
    scores["M3"] = dataclasses.replace(scores["M3"], lml=scores["M9"].lml + 0.9)
    assert "criteria-disagree" not in {found.name for found in collect_findings(scores)}
    scores["M3"] = dataclasses.replace(scores["M3"], lml=scores["M9"].lml + 1.1)
    assert "criteria-disagree" in {found.name for found in collect_findings(scores)}


def vague_and_not(variance=1e6, n=120):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    y = 1 + 2 * x.squeeze(-1) - x.squeeze(-1) ** 2 + 0.3 * noise
    return {
        name: BayesianLinearModel(x, y, PolynomialFeatures(3), prior_variance=prior, noise=0.09)
        for name, prior in (("vague", variance), ("plain", 4.0))
    }


def test_a_vague_prior_loses_in_its_first_terms():
    comparison = score_models(vague_and_not())
    warning = warning_of(comparison, "first-terms")
    assert warning.models == ("vague",)
    plain, vague = (comparison.scores[name] for name in ("plain", "vague"))
    share = float((plain.curves - vague.curves)[:, :12].mean(0).sum()) / (plain.lml - vague.lml)
    assert share > 0.8
    assert warning.text.startswith(f"{share:.0%} of the {plain.lml - vague.lml:.1f} nats")
    assert "first 12 of 120 points" in warning.text
    assert "vague" in warning_of(comparison, "prior-sensitive").models
    # Its predictions are as good.
    assert "vague" in warning_of(comparison, "small-difference").models


def test_a_prior_that_predictions_hang_on_gives_no_warning(data):
    x, y = data(n=120)
    model = GPRegression(x, y)
    model.covar_module.base_kernel.lengthscale = 0.05
    comparison = score_models({"short": model})
    scores = comparison.scores["short"]
    change = abs(scores.wider_lml - scores.lml)
    assert change > 2
    assert abs(float((scores.wider_loo - scores.loo).sum())) > 0.1 * change
    assert "prior-sensitive" not in names_of(comparison)


def test_near_duplicates_in_single_precision(data):
    x, y = data(n=60)
    x, y = torch.cat([x, x + 1e-6]), torch.cat([y, y])
    pair = {}
    for name, dtype in (("single", torch.float32), ("double", torch.float64)):
        pair[name] = GPRegression(x.to(dtype), y.to(dtype))
        pair[name].likelihood.noise = 1e-4
    warning = warning_of(score_models(pair, orderings=5), "ill-conditioned")
    assert warning.models == ("single",)
    assert (
        f"{score_models(pair, orderings=5).scores['single'].condition_number:.1e}" in warning.text
    )


def test_few_points_and_small_differences(data):
    x, y = data(n=99)
    pair = {name: GPRegression(x, y, kernel=name) for name in ("rbf", "rq")}
    pair["rq"].likelihood.noise = pair["rbf"].likelihood.noise * 1.001
    comparison = score_models(pair)
    assert "99" in warning_of(comparison, "few-points").text
    pair["twin"] = pair["rbf"]
    table = compare(pair)
    assert "small-difference" not in table["findings"].iloc[0]
    assert "small-difference" in table.loc["twin", "findings"]
    x, y = data(n=100)
    assert "few-points" not in names_of(score_models({"a": GPRegression(x, y)}))


@pytest.mark.parametrize(("totals", "by_chance"), [(range(12), True), ([0] * 11 + [30], False)])
def test_the_best_of_many_models(fourier, totals, by_chance):
    scores = score_models(fourier, orderings=10).scores["M9"]
    count = len(scores.loo)
    many = {
        f"{place:02}": dataclasses.replace(scores, loo=scores.loo + total / count)
        for place, total in enumerate(sorted(totals, reverse=True))
    }
    found = {warning.name for warning in collect_findings(many)}
    assert ("many-models" in found) == by_chance
    del many["11"]
    assert "many-models" not in {warning.name for warning in collect_findings(many)}


def test_a_comparison_prints(fourier):
    comparison = score_models({"<M3>": fourier["M3"], "M9": fourier["M9"]}, m=85)
    text, page = repr(comparison), comparison._repr_html_()
    assert "CLML of 15 points given 85, mean over 1000 orderings; ranked by LOO" in text
    assert all(sentence in text for sentence in comparison.sentences)
    assert comparison.sentences[0] == "LOO ranks M9 first, 15.6 ± 6.9 nats ahead of <M3>."
    assert "&lt;M3&gt;" in page
    assert "<M3>" not in page
    assert page.count("<li>") == len(comparison.sentences)


def test_equal_models_in_words(data):
    x, y = data()
    comparison = score_models({name: GPRegression(x, y) for name in "ab"})
    assert "LML, CLML and LOO are the same for all models." in comparison.sentences
    assert score_models({"a": GPRegression(x, y)}).sentences == (
        "With n = 25, fewer than 100 points, standard errors over points are mostly too small; the "
        "true ones may be twice as large.",
    )


def test_what_is_wrong_with_a_fit_marks_its_row(models):
    problem = "The fit ended before an optimum."
    comparison = score_models(models, problems={"bad": problem, "good": ""})
    assert warning_of(comparison, "fit-failed").models == ("bad",)
    assert "fit-failed" in comparison.table.loc["bad", "findings"]
    assert "fit-failed" not in comparison.table.loc["good", "findings"]
    assert f"bad: {problem}" in comparison.sentences
    with pytest.raises(UnknownNameError, match="Did you mean 'good'"):
        score_models(models, problems={"god": problem})


def test_a_model_whose_fit_failed_is_not_ranked(models):
    first, *others = score_models(models).table.index
    comparison = score_models(models, problems={first: "The fit ended before an optimum."})
    assert list(comparison.table.index) == list(comparison.models) == [*others, first]
    assert comparison.table["rank"].tolist()[:-1] == list(range(len(others)))
    assert math.isnan(comparison.table.loc[first, "rank"])
    assert comparison.sentences[0].startswith(f"LOO ranks {others[0]} first, ")
    alone = score_models(models, problems=dict.fromkeys(others, "It failed."))
    assert alone.sentences[0] == f"{first} is the only model whose fit did not fail."
    neither = score_models(models, problems=dict.fromkeys(models, "It failed."))
    assert neither.table["rank"].isna().all()
    assert neither.sentences[0] == "No model is ranked, because each fit failed."


def test_a_model_that_predicts_the_mean_is_marked(models):
    models["bad"].covar_module.base_kernel.lengthscale = 0.002
    comparison = score_models(models)
    assert warning_of(comparison, "predicts-mean").models == ("bad",)
    assert "predicts-mean" in compare(models).loc["bad", "findings"]


def test_a_rational_quadratic_below_the_rbf_that_it_contains_is_marked(models, data):
    rq = GPRegression(*data(), kernel="rq")
    rq.load_state_dict(models["good"].state_dict(), strict=False)
    models["rq"] = rq
    rq.covar_module.base_kernel.alpha = 1e6
    assert "below-contained" not in names_of(score_models(models))
    rq.likelihood.noise = 3.0
    comparison = score_models(models)
    warning = warning_of(comparison, "below-contained")
    assert warning.models == ("rq",)
    below = comparison.table.loc["good", "lml"] - comparison.table.loc["rq", "lml"]
    assert f"rq is {below:.1f} nats below good in LML" in warning.text
    # One with other parts contains nothing of it.
    models["good"] = GPRegression(*data(), "rbf", mean="zero")
    assert "below-contained" not in names_of(score_models(models))
