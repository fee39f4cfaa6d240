"""The estimators of scikit-learn: its checks, files, and what each predicts; bad input."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel
from scipy.stats import nbinom
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from gpclml import (
    Classifier,
    FitWarning,
    LaplaceMarginalLogLikelihood,
    Regressor,
    StackedGP,
    fit_mll,
)
from gpclml.errors import ArgumentError, DataError, UnknownNameError, UnsupportedError
from gpclml.likelihoods import (
    LogisticLikelihood,
    LogNegativeBinomialLikelihood,
    TargetMixture,
    TargetPrediction,
)
from gpclml.models import GPClassification, GPCounts
from gpclml.tables import DEFAULT_CANDIDATES, averages, stacked
from gpclml.tables.averages import AVERAGED, KERNELS, AdditiveMatern, class_kernel

KINDS = "numbers", "counts", "classes"


CANDIDATES, COUNT_KERNELS, CLASS_KERNELS = ("linear", "matern"), ("linear", "rbf"), ("rbf",)


def made(kind, **options):
    """An estimator of quick models."""
    if kind == "classes":
        return Classifier(**{"kernels": COUNT_KERNELS, **options})
    names = COUNT_KERNELS if kind == "counts" else CANDIDATES
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
        estimator = Classifier(CLASS_KERNELS, max_rows=60)
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
    options: dict = {"random_state": np.int64(5), "kernels": list(COUNT_KERNELS)}
    if kind != "classes":
        options["candidates"] = options.pop("kernels")
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
    (["counts"], {}, {"restarts": 2}, ArgumentError, "restarts: got 2, expected none for counts"),
    (["numbers"], {}, {"restarts": -1}, ArgumentError, "restarts: got -1, expected"),
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


def columns_of_all_kinds(n=60, seed=0):
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
    x, y = arrays("numbers")
    regressor = Regressor(CANDIDATES).fit(x, y)
    stack = StackedGP(CANDIDATES).fit(torch.from_numpy(x), torch.from_numpy(y))
    new = arrays("numbers", 7, seed=1)[0]
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
    table, y = columns_of_all_kinds()
    table["date"] = pd.date_range("2024-01-01", periods=60)
    regressor = Regressor(CANDIDATES).fit(table, y)
    assert regressor.encoding_.names == (
        "size", "count", "kind = a", "kind = b", "kind = c", "place = north", "place = south",
        "new", "date",
    )  # fmt: skip
    assert list(regressor.feature_names_in_) == list(table.columns)
    encoded = regressor.encoding_.encode(table)
    np.testing.assert_array_equal(encoded[:, 2:5].sum(1), 1.0)
    np.testing.assert_array_equal(encoded[:, 7], table["new"].astype(float))
    assert cross_val_score(Regressor(CANDIDATES), table, y, cv=3).mean() > 0.9
    new, expected = columns_of_all_kinds(100, seed=1)
    new["date"] = table["date"].iloc[0]
    assert np.sqrt(np.mean((regressor.predict(new) - expected) ** 2)) < 0.4


@pytest.mark.parametrize("kind", ["array", "frame"])
def test_missing_values_are_marked(kind):
    x, y = arrays("numbers", 50)
    x[::7, 1] = np.nan
    X = x if kind == "array" else pd.DataFrame(x, columns=["x0", "x1"])
    regressor = Regressor(CANDIDATES).fit(X, y)
    assert regressor.encoding_.names == ("x0", "x1", "x1 is missing")
    encoded = regressor.encoding_.encode(pd.DataFrame(x, columns=["x0", "x1"]))
    marked = np.isnan(x[:, 1])
    np.testing.assert_array_equal(encoded[:, 2], marked)
    np.testing.assert_array_equal(encoded[:, 1], x[:, 1])
    assert np.isfinite(regressor.predict(X)).all()


def test_a_constant_target_and_more_columns_than_rows():
    x, _ = arrays("numbers")
    mean, std = Regressor(CANDIDATES).fit(x, np.full(40, 7.0)).predict(x, return_std=True)
    np.testing.assert_allclose(mean, 7.0)
    assert (std < 0.1).all()
    draws = np.random.default_rng(0)
    wide = draws.standard_normal((12, 40))
    y = wide[:, 0] + 0.1 * draws.standard_normal(12)
    mean, std = Regressor(CANDIDATES).fit(wide, y).predict(wide, return_std=True)
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
        regressor = Regressor().fit(*arrays("numbers", rows))
        assert ("deep" in models_of(regressor)) == (rows == 40)
    regressor.save(tmp_path / "regressor.pt")
    loaded = Regressor.load(tmp_path / "regressor.pt")
    assert loaded.stack_.candidates is None
    new = arrays("numbers", 7, seed=1)[0]
    np.testing.assert_array_equal(loaded.predict(new), regressor.predict(new))
    assert "deep" not in models_of(Regressor(DEFAULT_CANDIDATES).fit(*arrays("numbers")))


def test_predictions_that_are_refused():
    table, target = columns_of_all_kinds()
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


def mixture():
    """Two negative binomials whose latent values are all but known, and their laws."""
    members, laws = [], []
    for size, logs in ((2.0, [0.0, 1.0, 3.0]), (5.0, [1.0, 1.0, 4.0])):
        likelihood = LogNegativeBinomialLikelihood().double()
        likelihood.size = size
        mean = torch.tensor(logs).double()
        members.append(TargetPrediction(likelihood, mean, 1e-12 + 0 * mean))
        laws.append(nbinom(size, size / (size + np.exp(logs))))
    return TargetMixture(members), laws


def test_a_mixture_is_the_average_of_its_members():
    prediction, laws = mixture()
    y = np.array([0.0, 2.0, 30.0])

    def average(value):
        return np.mean([value(law) for law in laws], axis=0)

    mean = average(lambda law: law.mean())
    np.testing.assert_allclose(prediction.mean, mean)
    variance = average(lambda law: law.var() + law.mean() ** 2) - mean**2
    np.testing.assert_allclose(prediction.variance, variance)
    np.testing.assert_allclose(prediction.std, variance**0.5)
    np.testing.assert_allclose(prediction.log_prob(y), np.log(average(lambda law: law.pmf(y))))
    np.testing.assert_allclose(prediction.cdf(y), average(lambda law: law.cdf(y)))
    levels = [0.05, 0.5, 0.95]
    quantiles = prediction.quantile(levels).numpy()
    assert quantiles.shape == (3, 3)
    for column, level in zip(quantiles.T, levels, strict=True):
        assert (prediction.cdf(column) >= level).all()
        assert (prediction.cdf(column - 1) < level).all()
    np.testing.assert_array_equal(torch.stack(prediction.interval(0.9), 1), quantiles[:, [0, 2]])
    draws = prediction.sample(20000, seed=1).numpy()
    np.testing.assert_array_equal(draws, prediction.sample(20000, seed=1))
    assert not np.array_equal(draws, prediction.sample(20000, seed=2))
    np.testing.assert_allclose((draws <= y).mean(0), prediction.cdf(y), atol=0.02)
    for call, message in (
        (lambda: TargetMixture([]), "members: got none"),
        (lambda: prediction.interval(1.0), "level: got 1.0"),
        (lambda: prediction.quantile([0.5, 2.0]), "probability: got 2.0"),
        (lambda: prediction.sample(0), "count: got 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()


@pytest.mark.slow
def test_it_is_the_average_of_models_of_counts():
    x, y = arrays("counts")
    new, new_y = arrays("counts", 9, seed=1)
    regressor = Regressor(counts=True).fit(x, y)
    assert tuple(regressor.models_.models) == AVERAGED
    members = []
    for name in AVERAGED:
        model = GPCounts(x, y, class_kernel(name, torch.from_numpy(x), scale=1.0))
        fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
        members.append(model.predict(new))
    expected, prediction = TargetMixture(members), regressor.predict_distribution(new)
    np.testing.assert_allclose(prediction.log_prob(new_y), expected.log_prob(new_y), rtol=1e-6)
    mean, std, limits = regressor.predict(new, return_std=True, quantiles=(0.1, 0.9))
    np.testing.assert_allclose(mean, expected.mean, rtol=1e-6)
    np.testing.assert_allclose(std, expected.std, rtol=1e-6)
    np.testing.assert_array_equal(limits, expected.quantile([0.1, 0.9]))
    assert regressor.score(x, y) > 0.3
    assert regressor.n_rows_ == 40


def test_missing_values_and_unknown_levels_are_averaged_over():
    table, y = frame("counts")
    regressor = Regressor(COUNT_KERNELS, counts=True).fit(table, y)
    new = pd.DataFrame({"size": [1.5] * 4, "kind": ["a", "b", "c", "elsewhere"]})
    with pytest.warns(UserWarning, match="kind") as caught:
        mean, std = regressor.predict(new, return_std=True)
    assert caught[0].filename == __file__
    shares = table["kind"].value_counts(normalize=True)[["a", "b", "c"]].to_numpy()
    average = shares @ mean[:3]
    assert mean[3] == pytest.approx(average, rel=0.1)
    # The total variance: within the levels and between them.
    total = shares @ (std[:3] ** 2 + (mean[:3] - average) ** 2)
    assert std[3] ** 2 == pytest.approx(total, rel=0.2)


@pytest.mark.slow
def test_tools_of_scikit_learn():
    x, y = arrays("counts")
    regressor = clone(Regressor(COUNT_KERNELS).set_params(counts=True))
    assert regressor.counts
    assert cross_val_score(make_pipeline(StandardScaler(), regressor), x, y, cv=2).shape == (2,)
    regressor.fit(x, y)
    # What was fitted predicts, until there is another fit.
    mean = regressor.predict(x)
    np.testing.assert_array_equal(regressor.set_params(counts=False).predict(x), mean)
    regressor.set_params(candidates=["linear"]).fit(x, y)
    assert not hasattr(regressor, "models_")
    assert not np.array_equal(regressor.predict(x), mean)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [lambda y: 0 * y, lambda y: 0 * y + 7, lambda y: np.where(np.arange(40) == 3, 1e6, y)],
    ids=["zeros", "a constant", "a million"],
)
def test_odd_counts(change):
    x, y = arrays("counts")
    y = change(y)
    prediction = Regressor(COUNT_KERNELS, counts=True).fit(x, y).predict_distribution(x)
    lower, upper = prediction.interval(0.9)
    assert torch.isfinite(prediction.mean).all()
    assert (lower <= upper).all()
    assert torch.isfinite(prediction.log_prob(y)).all()
    if y.max() == y.min():
        assert float(prediction.mean.mean()) == pytest.approx(y[0], abs=0.1)


def powered(p, power):
    return 1 / (1 + (1 / p - 1) ** power)


@pytest.mark.slow
def test_probabilities_are_the_mean_of_those_of_the_members():
    x, y = arrays("classes")
    new = arrays("classes", 9, seed=1)[0]
    classifier = Classifier().fit(x, y)
    assert tuple(classifier.models_.models) == AVERAGED
    members = [model.predict(new) for [model] in classifier.models_.models.values()]
    power = classifier.models_.power
    each = [powered(member.probabilities.numpy(), power) for member in members]
    expected = np.mean(each, axis=0)
    p = classifier.predict_proba(new)
    np.testing.assert_allclose(p[:, 1], expected, rtol=1e-6)
    np.testing.assert_allclose(p.sum(1), 1.0)
    classifier = Classifier(["matern52"]).fit(x, y)
    single = classifier.predict_proba(new)[:, 1]
    kernel = class_kernel("matern52", torch.from_numpy(x))
    model = GPClassification(x, y, kernel, likelihood=LogisticLikelihood())
    fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
    expected = powered(model.predict(new).probabilities.numpy(), classifier.models_.power)
    np.testing.assert_allclose(single, expected, rtol=1e-6)


@pytest.mark.slow
def test_odds_are_raised_where_classes_are_told_apart_well():
    x, _ = arrays("classes", 80)
    generator = np.random.default_rng(0)
    clear, noisy = x[:, 0] > 1, (x[:, 0] + 2 * generator.normal(size=80)) > 1
    power = [Classifier(["linear", "rbf"]).fit(x, y).models_.power for y in (clear, noisy)]
    assert power[0] > 1.1
    assert 0.7 < power[1] < 1.2


def test_lengthscales_are_shrunk_towards_a_common_one():
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=draws, dtype=torch.float64)
    kernel = class_kernel("rbf", x)
    [(_, module_, prior, log_lengthscale, _)] = [
        named for named in kernel.named_priors() if "lengthscale" in named[0]
    ]
    start = log_lengthscale(module_).detach()
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
    # Of rows too, one of them twice, in batches, and once more.
    several = torch.stack([x, x + 1]).requires_grad_(), torch.cat([x[:1], new]).requires_grad_()
    assert torch.autograd.gradcheck(kernel.forward, several)
    assert torch.autograd.gradgradcheck(kernel.forward, several)


@pytest.fixture(scope="module")
def number_labels():
    """A classifier of labels 0 and 1."""
    return Classifier(CLASS_KERNELS).fit(*arrays("classes"))


@pytest.mark.parametrize(
    "labels",
    [
        [False, True], [-1, 1], [1, 2], [0.0, 1.0], ["no", "yes"], np.array([3, 7], dtype=object),
        pd.Categorical(["b", "d"]), pd.array([0, 1], dtype="Int64"),
        pd.array([False, True], dtype="boolean"), pd.array(["u", "v"], dtype="string"),
    ],
)  # fmt: skip
def test_labels_of_any_type(labels, number_labels):
    x, y = arrays("classes")
    given = pd.Series(labels).take(y) if hasattr(labels, "take") else np.array(labels)[y]
    classifier = Classifier(CLASS_KERNELS).fit(x, given)
    np.testing.assert_array_equal(classifier.classes_, list(labels))
    np.testing.assert_array_equal(classifier.predict_proba(x), number_labels.predict_proba(x))
    np.testing.assert_array_equal(
        classifier.predict(x), np.array(list(labels))[number_labels.predict(x)]
    )
    assert classifier.score(x, np.array(list(labels))[y]) > 0.8


@pytest.mark.slow
def test_data_frames_with_categories_and_missing_values():
    table, y = frame("classes")
    assert cross_val_score(Classifier(CLASS_KERNELS), table, y, cv=3).mean() > 0.85
    classifier = Classifier(CLASS_KERNELS).fit(table, y)
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
    marked = Classifier(CLASS_KERNELS).fit(table, y)
    assert "size is missing" in marked.encoding_.names
    assert np.isfinite(marked.predict_proba(table)).all()


@pytest.mark.slow
def test_classes_that_a_line_parts_and_one_row_of_a_class():
    x, _ = arrays("classes", 60)
    for kernel in KERNELS:
        classifier = Classifier([kernel]).fit(x, x[:, 0] > 1.5)
        assert classifier.score(x, x[:, 0] > 1.5) > 0.95
        rare = Classifier([kernel]).fit(x, np.arange(60) == 7)
        assert rare.predict_proba(x)[:, 1].mean() == pytest.approx(1 / 60, abs=0.05)


@pytest.mark.slow
def test_many_classes():
    x, _ = arrays("classes", 60)
    y = np.array(["low", "middle", "high", "top"])[(x[:, 0] > 1).astype(int) + (x[:, 1] > 1.5) * 2]
    y[0] = "one"  # a class of one row
    classifier = Classifier(["rbf", "additive"]).fit(x, y)
    assert list(classifier.classes_) == ["high", "low", "middle", "one", "top"]
    predicted = classifier.predict_proba(x)
    assert classifier.score(x, y) > 0.9
    np.testing.assert_allclose(predicted.sum(1), 1.0)
    each = []
    for models in classifier.models_.models.values():
        p = np.stack([model.predict(x).probabilities.numpy() for model in models], axis=1)
        odds = (p / (1 - p)) ** classifier.models_.power
        each.append(odds / odds.sum(1, keepdims=True))
    weights = classifier.models_.weights.tolist()
    np.testing.assert_allclose(predicted, np.average(each, axis=0, weights=weights), rtol=1e-6)


@pytest.mark.slow
def test_kernels_that_tell_many_classes_apart_count_more():
    generator = np.random.default_rng(0)
    y = np.arange(60) % 6
    x = np.eye(6)[y] + 0.25 * generator.normal(size=(60, 6))
    x = np.hstack([x, generator.normal(size=(60, 10))])  # columns that say nothing
    classifier = Classifier(["linear", "matern12"]).fit(x, y)
    weights = classifier.models_.weights
    assert float(weights.sum()) == pytest.approx(1.0)
    single = [Classifier([kernel]).fit(x, y).models_._log_odds(averages._left_out)[0]
              for kernel in ("linear", "matern12")]  # fmt: skip
    losses = [-odds.log_softmax(0)[y, range(60)].mean() for odds in single]
    assert (losses[0] < losses[1]) == bool(weights[0] > weights[1])
    assert 0.05 < float(weights.min()) < 0.45
    two = Classifier(["linear", "matern12"]).fit(x, y > 2)
    assert two.models_.weights.tolist() == [0.5, 0.5]


@pytest.mark.slow
def test_rows_are_left_out_as_if_the_model_was_fitted_without_them():
    x, y = map(torch.from_numpy, arrays("classes", 50))
    model = GPClassification(x, y.double(), likelihood=LogisticLikelihood())
    fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
    expected = []
    for row in range(50):
        others = torch.arange(50) != row
        without = GPClassification(x[others], y[others].double(), likelihood=LogisticLikelihood())
        without.load_state_dict(model.state_dict())
        expected.append(without.predict(x[row : row + 1]).probabilities)
    p = averages._left_out(model).probabilities
    torch.testing.assert_close(p, torch.cat(expected), atol=0.03, rtol=0.0)


def test_equal_rows_with_other_labels_share_their_probability():
    x = np.repeat([[0.0], [1.0]], 20, axis=0)
    y = np.arange(40) % 20 < np.repeat([5, 15], 20)
    p = Classifier(CLASS_KERNELS).fit(x, y).predict_proba([[0.0], [1.0]])[:, 1]
    assert p == pytest.approx([0.25, 0.75], abs=0.08)


@pytest.mark.slow
def test_kernels_whose_fit_fails_are_left_out(monkeypatch):
    x, y = arrays("classes")
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
