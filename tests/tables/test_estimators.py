"""What the estimators of numbers, counts and classes share: checks, files, drawn rows, refusals."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.utils.estimator_checks import check_estimator

from gpclml import Classifier, Regressor
from gpclml.errors import ArgumentError, DataError, UnknownNameError

KINDS = "numbers", "counts", "classes"


def made(kind, **options):
    """An estimator of two quick models."""
    if kind == "classes":
        return Classifier(**{"kernels": ("linear", "rbf"), **options})
    names = ("linear", "rbf") if kind == "counts" else ("linear", "matern")
    return Regressor(**{"candidates": names, "counts": kind == "counts", **options})


def targets(kind, values, draws):
    if kind == "counts":
        return draws.poisson(np.exp(values))
    values = values + 0.1 * draws.standard_normal(len(values))
    return values if kind == "numbers" else (values > np.median(values)).astype(int)


def arrays(kind, n=40, seed=0):
    draws = np.random.default_rng(seed)
    x = draws.uniform(0, 3, (n, 2))
    return x, targets(kind, np.sin(2 * x[:, 0]) + 0.5 * x[:, 1], draws)


def frame(kind, n=60, seed=0):
    draws = np.random.default_rng(seed)
    table = pd.DataFrame({"size": draws.uniform(0, 3, n), "kind": draws.choice(["a", "b", "c"], n)})
    shift = table["kind"].map({"a": -1.0, "b": 1.0, "c": 0.0}).to_numpy(float)
    y = targets(kind, shift + 0.5 * table["size"].to_numpy(), draws)
    return table, np.array(["no", "yes"])[y] if kind == "classes" else y


def predictions(kind, estimator, x):
    if kind == "classes":
        return estimator.predict_proba(x)
    return np.column_stack(estimator.predict(x, return_std=True, quantiles=[0.05]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_the_checks_of_scikit_learn(kind):
    estimator = made(kind)
    if kind == "classes":
        estimator = Classifier(("rbf",), max_rows=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows and columns left out, and of skipped checks
        results = check_estimator(estimator, on_fail=None, on_skip=None)
    assert len(results) > 40
    failed = {
        result["check_name"]: result["exception"]
        for result in results
        if result["status"] == "failed"
    }
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_pickles_and_files_give_the_same_predictions(tmp_path, kind):
    table, y = frame(kind)
    table.loc[3:9, "size"] = np.nan
    # Arguments may come from arrays, as in a search.
    names = "kernels" if kind == "classes" else "candidates"
    options: dict = {"random_state": np.int64(5), names: ["linear", "rbf"]}
    if kind == "numbers":
        options["time_budget"] = np.float64(60)
    estimator = made(kind, **options).fit(table, y)
    expected = predictions(kind, estimator, table)
    estimator.save(tmp_path / "made.pt")
    torch.load(tmp_path / "made.pt", weights_only=True)
    loaded = type(estimator).load(tmp_path / "made.pt")
    for other in (pickle.loads(pickle.dumps(estimator)), loaded):
        np.testing.assert_array_equal(predictions(kind, other, table), expected)
        np.testing.assert_array_equal(other.predict(table), estimator.predict(table))
    assert loaded.n_features_in_ == 2
    assert list(loaded.feature_names_in_) == list(table.columns)
    assert loaded.get_params() == estimator.get_params()
    if kind == "classes":
        assert loaded.classes_.dtype == estimator.classes_.dtype
    with pytest.raises(ValueError, match="feature names"):
        loaded.predict(table.rename(columns={"size": "mass"}))
    with pytest.raises(DataError, match="no file"):
        type(estimator).load(tmp_path / "none.pt")
    model = estimator.stack_ if kind == "numbers" else estimator.models_
    model.save(tmp_path / "model.pt")
    with pytest.raises(DataError, match=f"not a gpclml.{type(estimator).__name__}"):
        type(estimator).load(tmp_path / "model.pt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_than_are_fitted_to(kind):
    x, y = arrays(kind, 60)
    if kind == "classes":
        y[3] = 5  # a class of one row
    fits = []
    for seed in (3, 3, 4):
        with pytest.warns(UserWarning, match="20 of 60 rows, drawn at random") as caught:
            fits.append(made(kind, max_rows=20, random_state=seed).fit(x, y))
        assert caught[0].filename == __file__
    assert fits[0].n_rows_ == 20
    first, same, other = (predictions(kind, estimator, x) for estimator in fits)
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
    if kind == "classes":
        shares = np.bincount(fits[0].models_.targets) / 20
        assert shares == pytest.approx(np.unique(y, return_counts=True)[1] / 60, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_give_the_same_fit(kind):
    x, y = arrays(kind)
    single, several = (made(kind, n_jobs=jobs).fit(x, y) for jobs in (None, 2))
    np.testing.assert_allclose(
        predictions(kind, single, x), predictions(kind, several, x), rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["numbers", "counts"])
def test_draws(kind):
    x, y = arrays(kind)
    regressor = made(kind).fit(x, y)
    draws = regressor.sample_y(x[:5], n_samples=400, random_state=1)
    assert draws.shape == (5, 400)
    np.testing.assert_array_equal(draws, regressor.sample_y(x[:5], 400, random_state=1))
    mean, std = regressor.predict(x[:5], return_std=True)
    assert (abs(draws.mean(1) - mean) < 5 * std / 20).all()
    if kind == "counts":
        assert (draws == draws.round()).all()
        assert (draws >= 0).all()


def infinite(x):
    return np.where(x == x[3, 1], np.inf, x)


def without_one(y):
    return np.where(np.arange(40) == 3, np.nan, y)


BAD = [  # the kinds, changes of inputs and of targets, arguments, error and message
    (KINDS, {"x": infinite}, {}, ValueError, "infinity"),
    (KINDS, {"x": lambda x: pd.DataFrame(infinite(x))}, {}, ArgumentError, "infinite values"),
    (KINDS, {"x": lambda x: pd.DataFrame(x, columns=["a", "a"])}, {}, ArgumentError,
     "several columns named 'a'"),
    (KINDS, {"x": lambda x: pd.DataFrame({"code": [1, "x"] * 20})}, {}, ArgumentError,
     r"column .code.: .* by astype"),
    (KINDS, {"y": without_one}, {}, ValueError, "y contains NaN"),
    (KINDS, {"y": lambda y: None}, {}, ValueError, "requires y"),
    (KINDS, {}, {"max_rows": 1}, ArgumentError, "max_rows: got 1"),
    (KINDS[:2], {"x": lambda x: x[:4], "y": lambda y: y[:4]}, {}, ArgumentError, "n_samples = 4"),
    (KINDS[:2], {"y": lambda y: ["low"] * 40}, {}, ArgumentError,
     r"y: got texts .* expected numbers"),
    (KINDS[:2], {}, {"candidates": ("matrn",)}, UnknownNameError, "candidates: got 'matrn'"),
    (KINDS[:2], {}, {"candidates": "linear"}, ArgumentError,
     "candidates: got 'linear', expected names in a list"),
    (KINDS[:2], {}, {"candidates": ()}, ArgumentError, "candidates: got none"),
    (["counts"], {"y": lambda y: y + 0.5}, {}, ArgumentError,
     r"y: got \d\.5 among them, expected whole numbers from"),
    (["counts"], {"y": lambda y: y - 9.0}, {}, ArgumentError,
     r"y: got -\d among them.*Leave out counts=True"),
    (["counts"], {}, {"time_budget": 3.0}, ArgumentError, r"time_budget: got 3\.0, expected none"),
    (["classes"], {"y": lambda y: 0 * y}, {}, ArgumentError, "y: got one class, 0"),
    (["classes"], {"y": lambda y: np.where(y == 1, "a", None)}, {}, ValueError, "missing labels"),
    (["classes"], {"y": lambda y: np.array([1, "a"] * 20, dtype=object)}, {}, ValueError, "label"),
    (["classes"], {"y": lambda y: y + 0.3 * np.arange(40)}, {}, ValueError, "Unknown label type"),
    (["classes"], {}, {"kernels": ("matern",)}, UnknownNameError, "matern32"),
    (["classes"], {}, {"kernels": "rbf"}, ArgumentError, "got 'rbf', expected names in a list"),
    (["classes"], {}, {"kernels": ()}, ArgumentError, "at least one name"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "arguments", "error", "message"),
    [(kind, *case) for kinds, *case in BAD for kind in kinds],
)
def test_fits_that_are_refused(kind, changes, arguments, error, message):
    x, y = arrays(kind)
    x, y = changes.get("x", lambda x: x)(x), changes.get("y", lambda y: y)(y)
    with pytest.raises(error, match=message):
        made(kind, **arguments).fit(x, y)
