"""Random splits and subsets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpclml.datasets import RegressionData, split, subset
from gpclml.errors import ArgumentError, ShapeError


@given(n=st.integers(10, 300), seed=st.integers(0, 10**6), fraction=st.floats(0.1, 0.9))
def test_a_split_parts_all_rows(n, seed, fraction):
    parts = split(n, seed, fraction)
    assert len(parts.test) == round(n * fraction)
    assert torch.cat([parts.train, parts.test]).sort().values.tolist() == list(range(n))
    assert parts.train.dtype == parts.test.dtype == torch.int64


@pytest.mark.parametrize(("n", "num_test"), [(506, 51), (1030, 103), (768, 77), (308, 31)])
def test_the_usual_sizes(n, num_test):
    assert len(split(n, 0).test) == num_test


def test_a_split_depends_on_the_seed_only():
    data = RegressionData("x", torch.zeros(100, 2), torch.zeros(100))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second, other = split(data, 3), split(100, 3), split(100, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.test, second.test)
    assert torch.equal(first.train, second.train)
    assert not torch.equal(first.test.sort().values, other.test.sort().values)


def test_a_generator_gives_one_split_after_another():
    generator = torch.Generator().manual_seed(3)
    first, second = split(100, generator), split(100, generator)
    assert torch.equal(first.test, split(100, 3).test)
    assert not torch.equal(first.test, second.test)


@pytest.mark.parametrize(
    ("n", "fraction"), [(10, 0.0), (10, 1.0), (10, -0.1), (10, float("nan")), (4, 0.1), (2, 0.9)]
)
def test_split_refuses(n, fraction):
    with pytest.raises(ArgumentError, match="test_fraction"):
        split(n, 0, fraction)


def test_subsets_are_nested_and_of_training_rows_only():
    train = split(200, 0).train
    small, large = subset(train, 50, seed=1), subset(train, 100, seed=1)
    assert torch.equal(large[:50], small)
    assert len(set(large.tolist())) == 100
    assert set(large.tolist()) <= set(train.tolist())
    assert not torch.equal(small, subset(train, 50, seed=2))
    assert torch.equal(subset(train, len(train), seed=1).sort().values, train.sort().values)


@pytest.mark.parametrize("n", [0, -1, 181])
def test_subset_refuses(n):
    with pytest.raises(ArgumentError, match=r"n: got -?\d+, expected 1 to 180"):
        subset(split(200, 0).train, n, seed=0)


def test_subset_takes_row_numbers_only():
    with pytest.raises(ShapeError, match="train"):
        subset(torch.zeros(5, 2, dtype=torch.long), 1, seed=0)
