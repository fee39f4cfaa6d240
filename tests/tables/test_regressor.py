"""The estimator of scikit-learn: its own checks, tables with categories, files, bad input."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import cross_val_score

from gpclml import Regressor, StackedGP
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.tables import DEFAULT_CANDIDATES, stacked

FAST = ("linear", "matern")


def arrays(n=40, d=3, seed=0):
    draws = np.random.default_rng(seed)
    x = draws.uniform(0, 3, (n, d))
    return x, np.sin(2 * x[:, 0]) + x[:, 1] + 0.05 * draws.standard_normal(n)


def frame(n=60, seed=0):
    draws = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "size": draws.uniform(0, 3, n),
            "count": draws.integers(0, 5, n),
            "kind": draws.choice(["a", "b", "c"], n),
            "place": pd.Categorical(draws.choice(["north", "south"], n)),
            "new": draws.random(n) < 0.5,
        }
    )
    shift = table["kind"].map({"a": 0.0, "b": 3.0, "c": -2.0}).to_numpy(float)
    y = shift + table["size"] + 0.5 * table["new"] + 0.05 * draws.standard_normal(n)
    return table, y.to_numpy()


@pytest.mark.slow
def test_it_is_the_stack_of_its_rows():
    x, y = arrays()
    regressor = Regressor(FAST).fit(x, y)
    stack = StackedGP(FAST).fit(torch.from_numpy(x), torch.from_numpy(y))
    new = arrays(7, seed=1)[0]
    expected = stack.predict(torch.from_numpy(new))
    mean, std, limits = regressor.predict(new, return_std=True, quantiles=(0.1, 0.9))
    np.testing.assert_array_equal(mean, expected.mean.numpy())
    np.testing.assert_array_equal(std, expected.std.numpy())
    np.testing.assert_array_equal(limits, expected.quantile([0.1, 0.9]).numpy())
    np.testing.assert_array_equal(regressor.predict(new), mean)
    assert len(regressor.predict(new, quantiles=[0.5])) == 2
    assert regressor.n_rows_ == 40
    assert regressor.score(x, y) > 0.9


@pytest.mark.slow
def test_categories_booleans_and_dates():
    table, y = frame()
    table["date"] = pd.date_range("2024-01-01", periods=60)
    regressor = Regressor(FAST).fit(table, y)
    assert regressor.encoding_.names == (
        "size", "count", "kind = a", "kind = b", "kind = c", "place = north", "place = south",
        "new", "date",
    )  # fmt: skip
    assert list(regressor.feature_names_in_) == list(table.columns)
    encoded = regressor.encoding_.encode(table)
    np.testing.assert_array_equal(encoded[:, 2:5].sum(1), 1.0)
    np.testing.assert_array_equal(encoded[:, 7], table["new"].astype(float))
    assert cross_val_score(Regressor(FAST), table, y, cv=3).mean() > 0.9
    new, expected = frame(100, seed=1)
    new["date"] = table["date"].iloc[0]
    assert np.sqrt(np.mean((regressor.predict(new) - expected) ** 2)) < 0.4


@pytest.mark.parametrize("kind", ["array", "frame"])
def test_missing_values_are_marked(kind):
    x, y = arrays(50)
    x[::7, 1] = np.nan
    X = x if kind == "array" else pd.DataFrame(x, columns=["x0", "x1", "x2"])
    regressor = Regressor(FAST).fit(X, y)
    assert regressor.encoding_.names == ("x0", "x1", "x1 is missing", "x2")
    encoded = regressor.encoding_.encode(pd.DataFrame(x, columns=["x0", "x1", "x2"]))
    marked = np.isnan(x[:, 1])
    np.testing.assert_array_equal(encoded[:, 2], marked)
    np.testing.assert_array_equal(encoded[:, 1], x[:, 1])
    assert np.isfinite(regressor.predict(X)).all()


def test_a_constant_target_and_more_columns_than_rows():
    x, _ = arrays()
    mean, std = Regressor(FAST).fit(x, np.full(40, 7.0)).predict(x, return_std=True)
    np.testing.assert_allclose(mean, 7.0)
    assert (std < 0.1).all()
    draws = np.random.default_rng(0)
    wide = draws.standard_normal((12, 40))
    y = wide[:, 0] + 0.1 * draws.standard_normal(12)
    mean, std = Regressor(FAST).fit(wide, y).predict(wide, return_std=True)
    assert np.isfinite(mean).all()
    assert (std > 0).all()


def categorical(n=40, seed=0):
    """A column of numbers, three levels and two; the level of the first shifts the target."""
    draws = np.random.default_rng(seed)
    kinds, sides = draws.choice([0, 1, 2], n, p=[0.6, 0.3, 0.1]), draws.integers(0, 2, n)
    number = draws.uniform(0, 5, n)
    y = np.sin(number) + 2.0 * kinds + 0.1 * draws.standard_normal(n)
    names = {"kind": np.array(["a", "b", "c"])[kinds], "side": np.array(["left", "right"])[sides]}
    return pd.DataFrame({"number": number} | names), y


def test_categories_have_a_kernel_of_their_own(tmp_path):
    table, y = categorical()
    made = Regressor(["linear", "categories"]).fit(table, y)
    assert made.encoding_.categories == [[1, 2, 3], [4, 5]]
    models = {component.name: component.model for component in made.stack_.components}
    rows, model = torch.from_numpy(made.encoding_.encode(table)), models["categories"]
    with torch.no_grad():
        prior = model.forward(rows).covariance_matrix
        scale = model.covar_module
        kinds, sides, matern = scale.base_kernel.kernels
        numbers = model.input_standardizer.transform(rows)
        expected = scale.outputscale * matern(numbers).to_dense()
        for column, kernel in (("kind", kinds), ("side", sides)):
            unlike = torch.from_numpy(table[column].to_numpy()[:, None] != table[column].to_numpy())
            expected = expected * torch.exp(-unlike.double() / kernel.lengthscale.square())
    torch.testing.assert_close(prior, expected)
    # Where the level does not matter its rows are all alike.
    assert sides.lengthscale.item() > kinds.lengthscale.item()
    new, truth = categorical(200, seed=1)
    assert float(np.square(made.predict(new) - truth).mean()) < 0.1
    made.save(tmp_path / "made.pt")
    loaded = Regressor.load(tmp_path / "made.pt")
    np.testing.assert_array_equal(loaded.predict(new), made.predict(new))


def test_without_categories_there_is_no_such_candidate():
    table, y = categorical()
    stack = Regressor(["linear", "categories"]).fit(table[["number"]], y).stack_
    assert [component.name for component in stack.components] == ["linear"]
    assert not stack.failures
    only = Regressor(["categories"]).fit(table[["kind"]], y).stack_  # without numbers
    assert [component.name for component in only.components] == ["categories"]


@pytest.mark.parametrize("groups", [[[0], [0, 1]], [[]], [[3]], [[-1]]])
def test_columns_of_categories_that_are_none(groups):
    x = torch.eye(8, 3, dtype=torch.float64)
    with pytest.raises(ArgumentError, match="categories: got"):
        StackedGP(["linear"]).fit(x, x[:, 0], categories=groups)


def models_of(regressor):
    return {component.name for component in regressor.stack_.components}


@pytest.mark.slow
def test_deep_is_fitted_from_so_many_rows_on(monkeypatch, tmp_path):
    monkeypatch.setattr(stacked, "DEEP_ROWS", 40)
    for rows in (39, 40):
        regressor = Regressor().fit(*arrays(rows))
        assert ("deep" in models_of(regressor)) == (rows == 40)
    regressor.save(tmp_path / "regressor.pt")
    loaded = Regressor.load(tmp_path / "regressor.pt")
    assert loaded.stack_.candidates is None
    new = arrays(7, seed=1)[0]
    np.testing.assert_array_equal(loaded.predict(new), regressor.predict(new))
    assert "deep" not in models_of(Regressor(DEFAULT_CANDIDATES).fit(*arrays()))


def test_predictions_that_are_refused():
    table, target = frame()
    with pytest.warns(UserWarning, match="'none': no values"):
        regressor = Regressor(("linear",)).fit(table.assign(none=None), target)
    table = table.assign(none=None)
    for call, error, message in (
        (lambda: regressor.predict(table.assign(size="much")), ArgumentError, "column 'size'"),
        (lambda: regressor.predict(table.drop(columns="size")), ValueError, "feature names"),
        (lambda: regressor.predict(table, quantiles=[5, 95]), ArgumentError,
         r"quantiles: got \[5, 95\]"),
        (lambda: regressor.predict(table, quantiles=0.5), UnsupportedError,
         r"quantiles: got 0\.5, expected a sequence"),
        (lambda: regressor.sample_y(table, 0), ArgumentError, "n_samples: got 0, expected an int"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
