"""The targets of a table, and which rows are trained and tested on."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.tables.reading import (
    num_test_rows,
    read_targets,
    split,
    split_rows,
    subset,
    subset_rows,
)


@given(n=st.integers(10, 300), seed=st.integers(0, 10**6), fraction=st.floats(0.1, 0.9))
def test_a_split_parts_all_rows(n, seed, fraction):
    parts = split(n, seed, fraction)
    assert len(parts.test) == round(n * fraction)
    assert torch.cat([parts.train, parts.test]).sort().values.tolist() == list(range(n))


def test_a_split_depends_on_the_seed_only():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    parts, other = split(100, 3), split(100, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert parts.test[:5].tolist() == [86, 42, 89, 92, 3]
    assert not torch.equal(parts.test.sort().values, other.test.sort().values)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(split(100, generator).test, parts.test)
    assert not torch.equal(split(100, generator).test, parts.test)


def test_subsets_are_nested_and_of_training_rows_only():
    train = split(200, 0).train
    small, large = subset(train, 50, seed=1), subset(train, 100, seed=1)
    assert torch.equal(large[:50], small)
    assert len(set(large.tolist())) == 100
    assert set(large.tolist()) <= set(train.tolist())
    assert not torch.equal(small, subset(train, 50, seed=2))


@pytest.mark.parametrize(
    ("n", "train", "test"),
    [(25, 20, 5), (442, 354, 88), (5000, 4000, 1000), (5001, 4000, 1001), (30000, 4000, 26000)],
)
def test_sizes_of_the_parts(n, train, test):
    parts = split_rows(torch.zeros(n))
    assert (len(parts.train), len(parts.test)) == (train, test)
    assert torch.cat([parts.train, parts.test]).sort().values.tolist() == list(range(n))
    assert num_test_rows(n) == min(round(0.2 * n), 1000)


def test_parts_have_targets_follow_the_seed_and_the_limit():
    targets = torch.arange(100.0)
    targets[::10] = torch.nan
    parts = split_rows(targets, seed=3, most_rows=30)
    assert (len(parts.train), len(parts.test)) == (30, 60)
    assert not bool(targets[torch.cat([parts.train, parts.test])].isnan().any())
    assert torch.equal(parts.train, split_rows(targets, seed=3, most_rows=30).train)
    assert not torch.equal(parts.train, split_rows(targets, seed=4, most_rows=30).train)
    assert torch.equal(subset_rows(targets), (~targets.isnan()).nonzero()[:, 0])
    some = subset_rows(targets, seed=1, most_rows=7)
    assert len(some) == 7
    assert some.tolist() == sorted(some.tolist())


def test_targets_are_numbers_missing_ones_nan():
    table = pandas.DataFrame({"y": [f" {i}" for i in range(30)], "z": range(30)})
    table.loc[4, "y"] = None
    targets = read_targets(table, "y")
    assert targets.dtype == torch.float64
    assert targets.isnan().nonzero().tolist() == [[4]]
    assert targets[29] == 29


BAD = {
    "texts": (["a", "b"] * 20, "texts.*Columns of numbers: x"),
    "mixed": ([*range(39), "?"], r"'\?' \(row 40\)"),
    "true": ([True, False] * 20, "Write 0 and 1"),
    "dates": (pandas.date_range("2024-01-01", periods=40), "dates"),
    "none": ([None] * 40, "no value at all"),
    "constant": ([7] * 40, "same value 7 in all 40 rows"),
    "few": ([*range(10), *[None] * 30], "10 rows with a value, of 40"),
    "infinite": ([np.inf, *range(39)], "infinite"),
}


@pytest.mark.parametrize("name", BAD)
def test_columns_that_are_no_target(name):
    values, message = BAD[name]
    table = pandas.DataFrame({"price": values, "x": np.arange(40.0)})
    with pytest.raises(ArgumentError, match=message) as error:
        read_targets(table, "price")
    assert "'price'" in str(error.value)


def test_a_target_that_is_not_there_has_a_neighbour():
    with pytest.raises(UnknownNameError, match="Did you mean 'price'"):
        read_targets(pandas.DataFrame({"price": [1], "x": [2]}), "prize")


def test_a_table_without_numbers_says_so():
    table = pandas.DataFrame({"name": ["a", "b"] * 20, "town": ["c", "d"] * 20})
    with pytest.raises(ArgumentError, match="no column of numbers"):
        read_targets(table, "name")
