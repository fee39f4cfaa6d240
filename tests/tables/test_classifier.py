"""The classifier of scikit-learn: its own checks, labels of all kinds, tables, files, bad input."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel
from sklearn.exceptions import DataConversionWarning
from sklearn.model_selection import cross_val_score

from gpclml import Classifier, FitWarning, LaplaceMarginalLogLikelihood, fit_mll
from gpclml.likelihoods import LogisticLikelihood
from gpclml.models import GPClassification
from gpclml.tables import averages
from gpclml.tables.averages import AVERAGED, KERNELS, AdditiveMatern, class_kernel

FAST = ("rbf",)


def arrays(n=40, d=2, seed=0):
    draws = np.random.default_rng(seed)
    x = draws.uniform(0, 3, (n, d))
    return x, (np.sin(2 * x[:, 0]) + 0.3 * draws.standard_normal(n) > 0).astype(int)


def frame(n=60, seed=0):
    draws = np.random.default_rng(seed)
    table = pd.DataFrame({"size": draws.uniform(0, 3, n), "kind": draws.choice(["a", "b", "c"], n)})
    shift = table["kind"].map({"a": -2.0, "b": 2.0, "c": 0.0}).to_numpy(float)
    score = shift + table["size"] - 1.5 + 0.3 * draws.standard_normal(n)
    return table, np.where(score > 0, "yes", "no")


def powered(p, power):
    return 1 / (1 + (1 / p - 1) ** power)


@pytest.mark.slow
def test_probabilities_are_the_mean_of_those_of_the_members():
    x, y = arrays()
    new = arrays(9, seed=1)[0]
    classifier = Classifier().fit(x, y)
    assert tuple(classifier.models_.models) == AVERAGED
    members = [model.predict(new) for [model] in classifier.models_.models.values()]
    power = classifier.models_.power
    each = [powered(member.probabilities.numpy(), power) for member in members]
    expected = np.mean(each, axis=0)
    found = classifier.predict_proba(new)
    np.testing.assert_allclose(found[:, 1], expected, rtol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1.0)
    classifier = Classifier(["matern52"]).fit(x, y)
    single = classifier.predict_proba(new)[:, 1]
    kernel = class_kernel("matern52", torch.from_numpy(x))
    model = GPClassification(x, y, kernel, likelihood=LogisticLikelihood())
    fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
    expected = powered(model.predict(new).probabilities.numpy(), classifier.models_.power)
    np.testing.assert_allclose(single, expected, rtol=1e-6)


@pytest.mark.slow
def test_odds_are_raised_where_classes_are_told_apart_well():
    x, _ = arrays(80)
    generator = np.random.default_rng(0)
    clear, noisy = x[:, 0] > 1, (x[:, 0] + 2 * generator.normal(size=80)) > 1
    power = [Classifier(["linear", "rbf"]).fit(x, y).models_.power for y in (clear, noisy)]
    assert power[0] > 1.1
    assert 0.7 < power[1] < 1.2


def test_lengthscales_are_shrunk_towards_a_common_one():
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=draws, dtype=torch.float64)
    kernel = class_kernel("rbf", x)
    [(_, module_, prior, of_module, _)] = [
        named for named in kernel.named_priors() if "lengthscale" in named[0]
    ]
    start = of_module(module_).detach()
    common, single = start + 1.0, start + torch.eye(6).to(x)[0]
    prices = [prior.log_prob(prior.loc) - prior.log_prob(v) for v in (common, single)]
    # All of them move by the weak prior, one of them away from the others by the narrow one.
    assert float(prices[0]) < 0.3 < 1.5 < float(prices[1])


def test_the_additive_kernel_is_a_mean_over_columns():
    draws = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 3, generator=draws, dtype=torch.float64) for n in (6, 4))
    kernel = AdditiveMatern(ard_num_dims=3).double()
    kernel.lengthscale = torch.tensor([0.3, 1.0, 4.0])
    each = [MaternKernel(1.5).double() for _ in range(3)]
    for single, length in zip(each, kernel.lengthscale[0], strict=True):
        single.lengthscale = length.item()
    expected = sum(single(x[:, [i]], new[:, [i]]).to_dense() for i, single in enumerate(each)) / 3
    torch.testing.assert_close(kernel(x, new).to_dense(), expected)
    torch.testing.assert_close(kernel(x).diagonal(), torch.ones(6).double())
    assert torch.autograd.gradcheck(
        lambda raw: torch.func.functional_call(kernel, {"raw_lengthscale": raw}, (x,)).to_dense(),
        (kernel.raw_lengthscale,),
    )


@pytest.fixture(scope="module")
def of_numbers():
    """A classifier of labels 0 and 1."""
    return Classifier(FAST).fit(*arrays())


@pytest.mark.parametrize(
    "labels",
    [
        [False, True], [-1, 1], [1, 2], [0.0, 1.0], ["no", "yes"], np.array([3, 7], dtype=object),
        pd.Categorical(["b", "d"]), pd.array([0, 1], dtype="Int64"),
        pd.array([False, True], dtype="boolean"), pd.array(["u", "v"], dtype="string"),
    ],
)  # fmt: skip
def test_labels_of_any_type(labels, of_numbers):
    x, y = arrays()
    given = pd.Series(labels).take(y) if hasattr(labels, "take") else np.array(labels)[y]
    classifier = Classifier(FAST).fit(x, given)
    np.testing.assert_array_equal(classifier.classes_, list(labels))
    np.testing.assert_array_equal(classifier.predict_proba(x), of_numbers.predict_proba(x))
    np.testing.assert_array_equal(
        classifier.predict(x), np.array(list(labels))[of_numbers.predict(x)]
    )
    assert classifier.score(x, np.array(list(labels))[y]) > 0.8


def test_a_column_of_labels_is_taken_with_a_warning():
    x, y = arrays()
    with pytest.warns(DataConversionWarning, match="column-vector y"):
        column = Classifier(FAST).fit(x, y[:, None])
    np.testing.assert_array_equal(column.predict(x), Classifier(FAST).fit(x, y).predict(x))


@pytest.mark.slow
def test_data_frames_with_categories_and_missing_values():
    table, y = frame()
    assert cross_val_score(Classifier(FAST), table, y, cv=3).mean() > 0.85
    classifier = Classifier(FAST).fit(table, y)
    assert classifier.encoding_.names == ("size", "kind = a", "kind = b", "kind = c")
    new = pd.DataFrame({"size": [1.5, 1.5, np.nan], "kind": ["a", "b", "b"]})
    with pytest.warns(UserWarning, match="1 of 3 rows have values missing") as caught:
        low, high, lacks = classifier.predict_proba(new)[:, 1]
    assert caught[0].filename == __file__
    # Nothing is known of the size: as sure as on average over sizes, less than at the best.
    each = new.iloc[[1] * 60].assign(size=table["size"].to_numpy())
    average = classifier.predict_proba(each)[:, 1].mean()
    assert low < 0.2 < 0.8 < high
    assert lacks == pytest.approx(average, abs=0.1)
    table.loc[::5, "size"] = np.nan
    marked = Classifier(FAST).fit(table, y)
    assert "size is missing" in marked.encoding_.names
    assert np.isfinite(marked.predict_proba(table)).all()


@pytest.mark.slow
def test_classes_that_a_line_parts_and_one_row_of_a_class():
    x, _ = arrays(60)
    for kernel in KERNELS:
        classifier = Classifier([kernel]).fit(x, x[:, 0] > 1.5)
        assert classifier.score(x, x[:, 0] > 1.5) > 0.95
        rare = Classifier([kernel]).fit(x, np.arange(60) == 7)
        assert rare.predict_proba(x)[:, 1].mean() == pytest.approx(1 / 60, abs=0.05)


@pytest.mark.slow
def test_many_classes():
    x, _ = arrays(60)
    y = np.array(["low", "middle", "high", "top"])[(x[:, 0] > 1).astype(int) + (x[:, 1] > 1.5) * 2]
    y[0] = "one"  # a class of one row
    classifier = Classifier(["rbf", "additive"]).fit(x, y)
    assert list(classifier.classes_) == ["high", "low", "middle", "one", "top"]
    found = classifier.predict_proba(x)
    assert classifier.score(x, y) > 0.9
    np.testing.assert_allclose(found.sum(1), 1.0)
    each = []
    for models in classifier.models_.models.values():
        p = np.stack([model.predict(x).probabilities.numpy() for model in models], axis=1)
        odds = (p / (1 - p)) ** classifier.models_.power
        each.append(odds / odds.sum(1, keepdims=True))
    np.testing.assert_allclose(found, np.mean(each, axis=0), rtol=1e-6)


@pytest.mark.slow
def test_rows_are_left_out_as_if_the_model_was_fitted_without_them():
    x, y = map(torch.from_numpy, arrays(50))
    model = GPClassification(x, y.double(), likelihood=LogisticLikelihood())
    fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
    expected = []
    for row in range(50):
        others = torch.arange(50) != row
        without = GPClassification(x[others], y[others].double(), likelihood=LogisticLikelihood())
        without.load_state_dict(model.state_dict())
        expected.append(without.predict(x[row : row + 1]).probabilities)
    found = averages._left_out(model).probabilities
    torch.testing.assert_close(found, torch.cat(expected), atol=0.03, rtol=0.0)


def test_equal_rows_with_other_labels_share_their_probability():
    x = np.repeat([[0.0], [1.0]], 20, axis=0)
    y = np.arange(40) % 20 < np.repeat([5, 15], 20)
    found = Classifier(FAST).fit(x, y).predict_proba([[0.0], [1.0]])[:, 1]
    assert found == pytest.approx([0.25, 0.75], abs=0.08)


@pytest.mark.slow
def test_kernels_whose_fit_fails_are_left_out(monkeypatch):
    x, y = arrays()
    fit = averages.fit_mll
    broken: tuple = (LinearKernel,)

    def fails(mll, **options):
        if isinstance(mll.model.covar_module.base_kernel, broken):
            raise RuntimeError("no factor")
        return fit(mll, **options)

    monkeypatch.setattr(averages, "fit_mll", fails)
    with pytest.warns(FitWarning, match=r"linear \(RuntimeError: no factor\)") as caught:
        classifier = Classifier(["linear", "rbf"]).fit(x, y)
    assert caught[0].filename == __file__
    assert list(classifier.models_.models) == ["rbf"]
    alone = Classifier(["rbf"]).fit(x, y)
    np.testing.assert_array_equal(classifier.predict_proba(x), alone.predict_proba(x))
    broken = (Kernel,)
    with pytest.raises(RuntimeError, match="no factor"):
        Classifier(["linear", "rbf"]).fit(x, y)
