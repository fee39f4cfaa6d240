"""Rows that are there several times are one observation, unless they were measured anew."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch

from gpclml import Regressor, StackedGP
from gpclml.errors import ArgumentError
from gpclml.evaluation.copies import copied_rows

N = 60


def table(seed=0, n=N):
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(n, 4))
    return x, x[:, 0] + np.sin(2 * x[:, 1]) + 0.3 * draws.normal(size=n)


def repeats(how, n=N, seed=0):
    """Numbers of the rows of a table in which rows are copied."""
    draws = np.random.default_rng(seed)
    times = {
        "twice": np.full(n, 2), "five times": np.full(n, 5),
        "half": 1 + np.arange(n) % 2, "two to five times": draws.integers(2, 6, n),
    }[how]  # fmt: skip
    return draws.permutation(np.repeat(np.arange(n), times))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("numbers", "five times"), ("categories", "half"), ("single precision", "five times"),
        ("single precision", "two to five times"), ("no sale", "half"),
        ("counts", "two to five times"),
    ],
)  # fmt: skip
def test_copies_are_found(how, kind):
    x, y = table()
    if kind == "categories":  # of which rows share all by chance, with other targets
        x = np.digitize(x[:, :2], [-0.5, 0.5]).astype(float)
    if kind == "no sale":
        y = np.maximum(y, 0.0)
    if kind == "counts":
        y = np.round(y)
    rows = repeats(how)
    x, y = x[rows], y[rows]
    if kind == "single precision":  # as after a join with a file of single precision
        y[::2] = y[::2].astype(np.float32)
        x[::3] = x[::3].astype(np.float32)
    copied = copied_rows(x, y)
    assert copied.sum() == len(rows) - N
    assert len(np.unique(rows[~copied])) == N


@pytest.mark.parametrize(("seed", "levels"), [(0, 2), (1, 5), (2, 100)])
def test_ratings_of_equal_things_are_no_copies(levels, seed):
    draws = np.random.default_rng(seed)
    things, categories = np.repeat(table(seed)[0], 3, axis=0), draws.integers(0, 3, (180, 3))
    for x in (things, categories.astype(float)):
        latent = x[:, 0] + 0.5 * draws.normal(size=180)
        ratings = np.round((levels - 1) * (latent.clip(-2, 2) + 2) / 4)
        assert not copied_rows(x, ratings).any()


def test_targets_that_follow_from_few_categories_are_no_copies():
    x = np.random.default_rng(0).integers(0, 3, (200, 3)).astype(float)
    assert not copied_rows(x, x @ [1.3, 2.7, 0.1]).any()


def test_far_from_zero_values_are_compared_as_they_are():
    x, y = table()
    assert not copied_rows(1e9 + np.tile(x, (2, 1)), 1e9 + np.r_[y, y + 1e-3]).any()


@pytest.mark.slow
def test_a_stack_of_copies_is_that_of_the_rows(tmp_path):
    x, y = map(torch.from_numpy, table())
    rows = torch.from_numpy(repeats("half"))
    first = np.unique(rows.numpy(), return_index=True)[1]
    expected = StackedGP(["linear", "matern"]).fit(x[rows][np.sort(first)], y[rows][np.sort(first)])
    with pytest.warns(UserWarning, match="30 of 90 rows are copies of others") as caught:
        stack = StackedGP(["linear", "matern"]).fit(x[rows], y[rows])
    assert caught[0].filename == __file__
    assert stack.copies == 30
    assert torch.equal(stack.predict(x).mean, expected.predict(x).mean)
    assert torch.equal(stack.predict(x).std, expected.predict(x).std)
    stack.save(tmp_path / "stack.pt")
    for other in (StackedGP.load(tmp_path / "stack.pt"), pickle.loads(pickle.dumps(stack))):
        assert other.copies == 30


def test_copies_of_too_few_rows():
    x, y = table(n=4)
    with pytest.raises(ArgumentError, match=r"x: got 36 of 40 rows are copies.* 5 different rows"):
        StackedGP(["linear"]).fit(np.tile(x, (10, 1)), np.tile(y, 10))


@pytest.mark.parametrize("how", ["twice", "two to five times"])
def test_intervals_hold_new_rows_where_rows_are_copied(how):
    x, y = table(seed=2)
    rows = repeats(how)
    names = [f"x{i}" for i in range(4)]
    with pytest.warns(UserWarning, match="copies of others"):
        made = Regressor(["linear", "matern"]).fit(pd.DataFrame(x[rows], columns=names), y[rows])
    assert made.n_rows_ == N
    new, truth = table(seed=1, n=1000)
    limits = made.predict(pd.DataFrame(new, columns=names), quantiles=(0.05, 0.95))[1]
    assert 0.85 < ((limits[:, 0] <= truth) & (truth <= limits[:, 1])).mean() < 0.97
