"""The estimator of scikit-learn: its own checks, tables with categories, files, bad input."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator

from gpclml import Regressor, StackedGP
from gpclml.errors import ArgumentError, DataError, UnknownNameError, UnsupportedError
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
def test_the_checks_of_scikit_learn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns left out, and of skipped checks
        results = check_estimator(Regressor(FAST), on_fail=None, on_skip=None)
    assert len(results) > 40
    failed = {
        result["check_name"]: result["exception"]
        for result in results
        if result["status"] == "failed"
    }
    assert not failed


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


@pytest.mark.slow
def test_more_rows_than_are_fitted_to():
    x, y = arrays(50)
    with pytest.warns(UserWarning, match="20 of 50 rows, drawn at random") as caught:
        regressor = Regressor(FAST, max_rows=20, random_state=3).fit(x, y)
    assert caught[0].filename == __file__
    assert regressor.n_rows_ == 20
    with pytest.warns(UserWarning, match="20 of 50"):
        same, other = (Regressor(FAST, max_rows=20, random_state=s).fit(x, y) for s in (3, 4))
    np.testing.assert_array_equal(same.predict(x), regressor.predict(x))
    assert not np.array_equal(other.predict(x), regressor.predict(x))


def test_draws():
    x, y = arrays()
    regressor = Regressor(FAST).fit(x, y)
    draws = regressor.sample_y(x[:5], n_samples=400, random_state=1)
    assert draws.shape == (5, 400)
    np.testing.assert_array_equal(draws, regressor.sample_y(x[:5], 400, random_state=1))
    mean, std = regressor.predict(x[:5], return_std=True)
    assert (abs(draws.mean(1) - mean) < 5 * std / 20).all()


@pytest.mark.slow
def test_pickles_and_files_give_the_same_predictions(tmp_path):
    table, y = frame()
    table.loc[3:9, "size"] = np.nan
    # Arguments may come from arrays, as in a search.
    budget = {"time_budget": np.float64(60), "random_state": np.int64(5)}
    regressor = Regressor(list(FAST), **budget).fit(table, y)
    expected = regressor.predict(table, return_std=True, quantiles=[0.05])
    regressor.save(tmp_path / "regressor.pt")
    torch.load(tmp_path / "regressor.pt", weights_only=True)
    loaded = Regressor.load(tmp_path / "regressor.pt")
    for other in (pickle.loads(pickle.dumps(regressor)), loaded):
        got = other.predict(table, return_std=True, quantiles=[0.05])
        np.testing.assert_array_equal(np.column_stack(got), np.column_stack(expected))
    assert loaded.n_features_in_ == 5
    assert list(loaded.feature_names_in_) == list(table.columns)
    assert loaded.get_params() == regressor.get_params()
    with pytest.raises(ValueError, match="feature names"):
        loaded.predict(table.rename(columns={"size": "mass"}))
    with pytest.raises(DataError, match="no file"):
        Regressor.load(tmp_path / "none.pt")
    regressor.stack_.save(tmp_path / "stack.pt")
    with pytest.raises(DataError, match=r"not a gpclml.Regressor"):
        Regressor.load(tmp_path / "stack.pt")


@pytest.mark.slow
def test_several_processes_give_the_same_fit():
    x, y = arrays()
    single, several = Regressor().fit(x, y), Regressor(n_jobs=2).fit(x, y)
    names = [[component.name for component in each.stack_.components] for each in (single, several)]
    assert names[0] == names[1]
    np.testing.assert_allclose(single.predict(x), several.predict(x), rtol=1e-6)


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


BAD = [  # changes of inputs and of targets, and of the estimator
    ({"x": lambda x: x[:4], "y": lambda y: y[:4]}, {}, ArgumentError, "n_samples = 4"),
    ({"x": lambda x: np.where(x == x[3, 1], np.inf, x)}, {}, ValueError, "infinity"),
    ({"x": lambda x: pd.DataFrame(np.where(x == x[3, 1], np.inf, x))}, {}, ArgumentError,
     "infinite values"),
    ({"x": lambda x: pd.DataFrame(x, columns=["a", "a", "b"])}, {}, ArgumentError,
     "several columns named 'a'"),
    ({"x": lambda x: pd.DataFrame({"code": [1, "x"] * 20})}, {}, ArgumentError,
     r"column .code.: .* by astype"),
    ({"y": lambda y: np.where(y == y[3], np.nan, y)}, {}, ValueError, "y contains NaN"),
    ({"y": lambda y: None}, {}, ValueError, "requires y"),
    ({"y": lambda y: ["low"] * 40}, {}, ArgumentError, r"y: got texts .* expected numbers"),
    ({}, {"candidates": ("matrn",)}, UnknownNameError, "matrn"),
    ({}, {"candidates": "linear"}, ArgumentError, "got 'linear', expected names in a list"),
    ({}, {"max_rows": 2}, ArgumentError, "max_rows: got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "arguments", "error", "message"), BAD)
def test_fits_that_are_refused(changes, arguments, error, message):
    x, y = arrays()
    x, y = changes.get("x", lambda x: x)(x), changes.get("y", lambda y: y)(y)
    with pytest.raises(error, match=message):
        Regressor(**{"candidates": FAST, **arguments}).fit(x, y)


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
