"""Inputs that new rows lack, levels that no training row has, codes and wild cells."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from gpclml import Regressor, StackedGP
from gpclml.tables.encoding import unusual_values
from gpclml.tables.missing import completions

FAST = ("linear", "matern", "categories")


def table(n, seed, correlation=0.0):
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(n, 3))
    x[:, 1] = correlation * x[:, 0] + math.sqrt(1 - correlation**2) * x[:, 1]
    level = draws.choice(4, n, p=[0.3, 0.3, 0.2, 0.2])
    y = x[:, 0] + x[:, 1] + np.array([0.0, 1.0, 2.0, -1.0])[level] + 0.3 * draws.normal(size=n)
    columns = {f"x{i}": x[:, i] for i in range(3)}
    dates = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.round(100 * x[:, 2]), "D")
    return pd.DataFrame(columns | {"level": np.array(list("abcd"))[level], "day": dates}), y


def held(made, rows, y):
    limits = made.predict(rows, quantiles=(0.05, 0.95))[1]
    return ((limits[:, 0] <= y) & (y <= limits[:, 1])).mean()


@pytest.fixture(scope="module", params=[0.0, 0.95])
def fitted(request):
    return Regressor(FAST).fit(*table(120, 0, request.param)), table(600, 1, request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"x0": np.nan}, {"level": None}, {"level": "new", "x1": np.nan},
        {"x0": np.nan, "x1": np.nan, "x2": np.nan, "level": None, "day": pd.NaT},
    ],
)  # fmt: skip
def test_intervals_hold_rows_that_lack_a_value(fitted, values):
    made, (new, y) = fitted
    lacking = new.assign(**values)
    with pytest.warns(
        UserWarning, match=r"600 of 600 rows have values missing, or levels, where .*'"
    ):
        assert 0.82 < held(made, lacking, y) < 0.97
    rows, lacking_one = new.head(5).copy(), new.head(5).copy()
    lacking_one.loc[2] = lacking.loc[2]
    with pytest.warns(UserWarning, match="1 of 5 rows"):
        mean, std = made.predict(lacking_one, return_std=True)
    expected, deviation = made.predict(rows, return_std=True)
    np.testing.assert_allclose(np.delete(mean, 2), np.delete(expected, 2), rtol=1e-12)
    assert std[2] > deviation[2]


@pytest.mark.slow
@pytest.mark.parametrize("lacking", [2, 20])
def test_few_or_several_training_rows_lack_the_value_too(lacking):
    rows, y = table(120, 0)
    rows.loc[: lacking - 1, "x0"] = np.nan
    made = Regressor(FAST).fit(rows, y)
    assert ("x0 is missing" in made.encoding_.names) == (lacking == 20)
    new, truth = table(600, 1)
    assert 0.85 < held(made, new, truth) < (0.97 if lacking == 2 else 1)  # noise is that of all
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert 0.8 < held(made, new.assign(x0=np.nan), truth) < 0.99
    assert len(caught) == (lacking == 2)


def test_completions_of_a_category_follow_the_other_inputs():
    draws = torch.Generator().manual_seed(0)
    number = torch.randn(400, generator=draws, dtype=torch.float64)
    high = (number > 0).double()
    x = torch.stack([number, high, 1 - high], -1)
    for value, least, most in ((1.5, 0.9, 1), (-1.5, 0, 0.1)):
        point = torch.tensor([[value, math.nan, math.nan]], dtype=torch.float64)
        values, shares = completions(point, point.isnan(), x, [[1, 2]])
        assert least <= float((shares * values[..., 1]).sum()) <= most


def test_a_stack_takes_missing_values_and_unknown_levels():
    rows, y = table(60, 0)
    levels = pd.get_dummies(rows["level"]).to_numpy(float)
    x = torch.from_numpy(np.column_stack([rows[["x0", "x1"]].to_numpy(), levels]))
    stack = StackedGP(["linear", "categories"]).fit(x, y, categories=[[2, 3, 4, 5]])
    point = x[:1].repeat(3, 1)
    point[1, 2:] = 0.0
    point[2, 3] = math.nan
    prediction = stack.predict(point)
    assert float(prediction.std[1]) > 2 * float(prediction.std[0])
    assert float(prediction.std[1]) == float(prediction.std[2])
    some = StackedGP(["linear"]).fit(x[:, 2:5], y, categories=[[0, 1, 2]])  # a level without column
    assert not some.unknown_inputs(x.new_zeros(1, 3)).any()


NUMBERS = np.random.default_rng(0).uniform(0, 40, 100)


@pytest.mark.parametrize(
    ("numbers", "codes", "limited"),
    [
        (NUMBERS, (), False),
        (np.exp(2 * np.random.default_rng(1).normal(size=200)), (), False),
        (np.r_[NUMBERS[:80], np.full(20, -999.0)], (-999.0,), True),
        (np.r_[NUMBERS[:70], np.full(20, -999.0), np.full(10, -998.0)], (-999.0, -998.0), True),
        (np.r_[NUMBERS[:80], np.full(20, 1e6)], (1e6,), True),
        (np.r_[NUMBERS[:97], 1e8, -1e4, 2e5], (), True),
        (np.r_[NUMBERS[:79], np.full(20, -999.0), 1e8], (-999.0,), True),
        (np.r_[NUMBERS[:60], 1e4 + NUMBERS[:40]], (), False),  # of two sorts
        (np.r_[np.zeros(80), NUMBERS[:20]], (), False),
        (np.tile([0.0, 1.0, 100.0], 30), (100.0,), True),  # which costs nothing: it is marked
        (np.array([]), (), False),
    ],
)  # fmt: skip
def test_unusual_values(numbers, codes, limited):
    codes_found, limits = unusual_values(numbers)
    assert set(codes_found) == set(codes)
    assert (limits is not None) == limited


@pytest.mark.slow
def test_wild_cells_and_codes_do_not_take_a_column_away(tmp_path):
    rows, y = table(100, 0)
    new, truth = table(500, 1)
    x, xnew = rows[["x0", "x1"]].assign(x0=2 * rows["x0"]), new[["x0", "x1"]]
    xnew = xnew.assign(x0=2 * xnew["x0"])
    clean = np.sqrt(np.mean((Regressor(FAST).fit(x, y).predict(xnew) - truth) ** 2))
    wild = x.copy()
    wild.loc[[5, 50], "x0"] = 3e7, -1e8
    with pytest.warns(UserWarning, match="'x0': 2 values are moved"):
        made = Regressor(FAST).fit(wild, y)
    assert np.sqrt(np.mean((made.predict(xnew) - truth) ** 2)) < 1.2 * clean
    with pytest.warns(UserWarning, match="Values far from all others .* in inputs 0"):
        StackedGP(["linear"]).fit(wild.to_numpy(), y)
    coded = x.copy()
    coded.loc[::5, "x0"] = -999.0
    with pytest.warns(UserWarning, match="20 values are -999, taken for missing"):
        made = Regressor(FAST).fit(coded, y)
    assert "x0 is missing" in made.encoding_.names
    assert np.sqrt(np.mean((made.predict(xnew) - truth) ** 2)) < 1.2 * clean
    lacking = xnew.assign(x0=-999.0)
    assert 0.85 < held(made, lacking, truth) < 0.97
    np.testing.assert_array_equal(
        made.predict(lacking.head()), made.predict(xnew.assign(x0=np.nan).head())
    )
    made.save(tmp_path / "made.pt")
    loaded = Regressor.load(tmp_path / "made.pt")
    np.testing.assert_array_equal(loaded.predict(lacking.head()), made.predict(lacking.head()))
