from __future__ import annotations

import math

import pandas
import pytest
import torch
from scipy.stats import norm

from gpclml.errors import ShapeError
from gpclml.evaluation import compare, paired_difference, score_models, stacking_weights
from gpclml.models import GPRegression

COLUMNS = [
    "rank", "lml", "clml", "clml_se", "loo", "loo_se", "difference", "difference_se", "p_worse",
    "weight", "findings", "failure",
]  # fmt: skip


def test_the_table_is_made_of_the_scores(models):
    comparison = score_models(models, m=20, orderings=50)
    table = comparison.table
    assert list(table.columns) == COLUMNS
    assert table["rank"].tolist() == [0, 1, 2]
    assert table["loo"].is_monotonic_decreasing
    first, *_ = comparison.scores.values()
    logs = torch.stack([one.loo for one in comparison.scores.values()])
    assert table["weight"].tolist() == pytest.approx(stacking_weights(logs).tolist())
    for name, scores in comparison.scores.items():
        row = table.loc[name]
        assert row["loo"] == pytest.approx(float(scores.loo.sum()))
        assert row["loo_se"] == pytest.approx(5 * float(scores.loo.std()))
        assert row["clml"] == pytest.approx(float(scores.clml.mean()))
        assert row["clml_se"] == pytest.approx(float(scores.clml.std()) / math.sqrt(50))
        apart = scores.loo - first.loo
        assert row["difference"] == pytest.approx(float(apart.sum()))
        assert row["difference_se"] == pytest.approx(5 * float(apart.std()))
        if row["rank"]:
            expected = norm.cdf(0, row["difference"], row["difference_se"])
            assert row["p_worse"] == pytest.approx(expected)
        else:
            assert math.isnan(row["p_worse"])
    assert comparison.pointwise["good"].sum() == pytest.approx(table.loc["good", "loo"])
    alone = compare(models, m=20, orderings=50)
    pandas.testing.assert_frame_equal(alone, table, check_flags=False)
    assert alone.attrs == {
        "m": 20, "orderings": 50, "curves": 50, "rank_by": "loo", "units": "original",
        "num_data": 25,
    }  # fmt: skip


@pytest.mark.parametrize("criterion", ["lml", "clml", "loo"])
def test_each_criterion_ranks(fourier, criterion):
    comparison = score_models(fourier, m=85, rank_by=criterion)
    table = comparison.table
    assert table.index[0] == ("M3" if criterion == "lml" else "M9")
    expected = table[criterion] - table[criterion].iloc[0]
    assert table["difference"].tolist() == pytest.approx(expected.tolist())
    first, second = comparison.scores.values()
    error = table["difference_se"].iloc[1]
    if criterion == "lml":
        assert math.isnan(error)
        assert table["p_worse"].iloc[1] < 0.05  # what the LML ranks second predicts better
    if criterion == "clml":
        apart = second.clml - first.clml
        assert error == pytest.approx(float(apart.std()) / math.sqrt(len(apart)))


def test_equal_models_differ_by_nothing(data):
    x, y = data()
    table = compare({name: GPRegression(x, y) for name in ("b", "a")})
    assert table.index.tolist() == ["a", "b"]
    assert table["difference"].tolist() == [0.0, 0.0]
    assert table["difference_se"].tolist() == [0.0, 0.0]
    assert table["p_worse"].iloc[1] == 0.5
    assert table["weight"].tolist() == pytest.approx([0.5, 0.5])
    assert "criteria-disagree" not in table.loc["a", "findings"]


def test_standardized_and_raw_models_of_one_density_agree(data):
    x, y = data()
    standardized = GPRegression(x, y)
    standardized.covar_module.outputscale = 1.3
    standardized.likelihood.noise = 0.07
    standardized.mean_module.constant = 0.2
    raw = GPRegression(x, y, standardize=False)
    scale, of_inputs = standardized.target_scale, standardized.input_standardizer.scale
    raw.covar_module.outputscale = 1.3 * scale**2
    raw.likelihood.noise = 0.07 * scale**2
    raw.mean_module.constant = 0.2 * scale + y.mean()
    lengthscale = standardized.covar_module.base_kernel.lengthscale
    raw.covar_module.base_kernel.lengthscale = lengthscale * of_inputs
    comparison = score_models({"raw": raw, "standardized": standardized})
    first, second = (comparison.table.iloc[i] for i in range(2))
    for column in ("lml", "clml", "clml_se", "loo", "loo_se"):
        assert first[column] == pytest.approx(second[column], rel=1e-7)
    assert second["p_worse"] == 0.5
    one, other = comparison.scores.values()
    torch.testing.assert_close(one.loo_mean, other.loo_mean)
    torch.testing.assert_close(one.loo_variance, other.loo_variance)


def test_the_order_of_the_models_does_not_matter(models):
    usual = compare(models, orderings=20)
    reversed_ = compare(dict(reversed(models.items())), orderings=20)
    pandas.testing.assert_frame_equal(usual, reversed_, check_exact=False, atol=1e-6)


def test_a_seed_is_all_there_is_to_it(models):
    state = torch.random.get_rng_state()
    first = compare(models, orderings=5, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(10)
    pandas.testing.assert_frame_equal(first, compare(models, orderings=5, seed=3))
    other = compare(models, orderings=5, seed=4)
    assert not (first["clml"] == other["clml"]).any()
    assert first["loo"].tolist() == other["loo"].tolist()
    given = score_models(models, orderings=5, seed=3).orders
    pandas.testing.assert_frame_equal(
        first, compare(models, orderings=given), check_exact=False, check_flags=False
    )


@pytest.mark.parametrize("training", [True, False])
def test_models_stay_as_they_are(models, training):
    x = next(iter(models.values())).train_inputs[0]
    for model in models.values():
        model.train(training)
        model.likelihood.train(not training)  # a mode of its own
        if not training:
            with torch.no_grad():
                model(x[:2])  # fills its cache
    before = {
        name: (
            {key: value.clone() for key, value in model.state_dict().items()},
            [module.training for module in model.modules()],
            model.prediction_strategy,
            model.train_inputs[0],
        )
        for name, model in models.items()
    }
    compare(models)
    for name, (state, modes, strategy, inputs) in before.items():
        model = models[name]
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key])
        assert [module.training for module in model.modules()] == modes
        assert model.prediction_strategy is strategy
        assert (strategy is None) == training
        assert model.train_inputs[0] is inputs
        assert all(parameter.grad is None for parameter in model.parameters())


def test_one_model_gives_one_row(models):
    comparison = score_models({"good": models["good"]})
    row = comparison.table.iloc[0]
    assert (row["rank"], row["difference"], row["weight"]) == (0, 0.0, 1.0)
    assert math.isnan(row["p_worse"])
    assert "good" in repr(comparison)


def test_numbers_of_orderings_follow_the_size(data):
    x, y = data(n=700)
    comparison = score_models({"a": GPRegression(x, y)}, m=0, orderings=None, curves=2)
    assert comparison.orders.shape == (68, 700)
    small = score_models({"a": GPRegression(x[:40], y[:40])})
    assert small.m == 36
    assert small.orders.shape == (1000, 40)
    assert small.scores["a"].curves.shape == (100, 40)


def test_a_single_point(data):
    x, y = data(n=1)
    table = compare({"a": GPRegression(x, y), "b": GPRegression(x, y, kernel="rq")})
    assert table["clml"].tolist() == pytest.approx(table["lml"].tolist())
    assert table["loo"].tolist() == pytest.approx(table["lml"].tolist())
    assert table["loo_se"].isna().all()


def test_paired_differences():
    terms, reference = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.5, 2.5, 3.0])
    found = paired_difference(terms, reference)
    assert found.value == pytest.approx(0.0)
    assert found.standard_error == pytest.approx(math.sqrt(3) * math.sqrt(0.75))
    assert found.p_worse == pytest.approx(0.5)
    assert paired_difference(terms, terms + 1.0).p_worse == 1.0
    assert paired_difference(terms + 1.0, terms).p_worse == 0.0
    assert math.isnan(paired_difference(terms[:1], reference[:1]).p_worse)
    with pytest.raises(ShapeError, match="reference"):
        paired_difference(terms, reference[:2])
