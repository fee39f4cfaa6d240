"""Random splits and subsets, and published splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpclml import datasets
from gpclml.datasets import RegressionData, split, subset
from gpclml.errors import ArgumentError, DataError, ShapeError, UnknownNameError


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


TEN = ["bike", "kin40k", "pol", "pumadyn32nm"]


TWENTY = ["boston", "concrete", "energy", "kin8nm", "naval", "power", "wine-red", "yacht"]


COUNTS = {**dict.fromkeys(TEN, 10), **dict.fromkeys(TWENTY, 20), "protein": 5}


@pytest.mark.data
@pytest.mark.parametrize("name", sorted(COUNTS))
def test_published_splits_part_all_rows(data_folder, name):
    n = datasets.uci_source(name).num_data
    splits = datasets.load_published_splits(name, folder=data_folder)
    assert len(splits) == COUNTS[name]
    assert datasets.num_published_splits(name, folder=data_folder) == COUNTS[name]
    for parts in splits:
        assert parts.train.dtype == parts.test.dtype == torch.int64
        times_used = torch.bincount(torch.cat([parts.train, parts.test]), minlength=n)
        assert times_used.tolist() == [1] * n
        assert abs(len(parts.test) - n / 10) <= 1
    assert not torch.equal(splits[0].test, splits[1].test)
    last = datasets.load_published_split(name, len(splits) - 1, folder=data_folder)
    assert torch.equal(last.test, splits[-1].test)


def save(folder, name="yacht", **arrays):
    (folder / "uci" / "splits").mkdir(parents=True)
    path = folder / "uci" / "splits" / f"{name}.npz"
    np.savez(path, **arrays)
    return path


def parts(n=308, num_test=31) -> dict[str, np.ndarray]:
    return {"train_0": np.arange(num_test, n), "test_0": np.arange(num_test)}


def test_a_user_s_own_file(tmp_path):
    save(tmp_path, **parts())
    assert datasets.num_published_splits("yacht", folder=tmp_path) == 1
    only = datasets.load_published_split("yacht", 0, folder=tmp_path)
    assert only.test.tolist() == list(range(31))
    assert only.train.tolist() == list(range(31, 308))


@pytest.mark.parametrize("index", [-1, 1])
def test_index_out_of_range(tmp_path, index):
    save(tmp_path, **parts())
    with pytest.raises(ArgumentError, match=rf"index: got {index}, expected 0 to 0"):
        datasets.load_published_split("yacht", index, folder=tmp_path)


def test_no_file(tmp_path):
    assert datasets.num_published_splits("wine-white", folder=tmp_path) == 0
    for read in (
        lambda: datasets.load_published_split("wine-white", 0, folder=tmp_path),
        lambda: datasets.load_published_splits("wine-white", folder=tmp_path),
    ):
        with pytest.raises(DataError, match=r"wine-white\.npz: no such file.*split\(data, seed\)"):
            read()


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        (parts(n=307), "do not divide rows 0 to 307"),
        ({**parts(), "test_0": np.arange(32)}, "do not divide rows"),
        ({**parts(), "test_0": np.arange(31.0)}, "do not divide rows"),
        ({"train_0": np.arange(308)}, "found arrays train_0"),
        ({**parts(), "train_2": np.arange(3), "test_2": np.arange(3)}, "found arrays"),
        ({"train_0": np.array([None] * 308), "test_0": np.arange(0)}, "allow_pickle"),
        ({}, "found arrays none"),
    ],
)
def test_arrays_that_cannot_be_used(tmp_path, arrays, found):
    path = save(tmp_path, **arrays)
    with pytest.raises(DataError, match=found) as caught:
        datasets.load_published_splits("yacht", folder=tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "changed"])
def test_a_damaged_file(tmp_path, damage):
    path = save(tmp_path, **parts())
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = bytes([whole[middle] ^ 255])
    path.write_bytes(
        {
            "cut": whole[:middle],
            "garbage": b"not an archive",
            "empty": b"",
            "changed": whole[:middle] + flipped + whole[middle + 1 :],
        }[damage]
    )
    with pytest.raises(DataError, match=r"yacht\.npz: cannot be used"):
        datasets.load_published_splits("yacht", folder=tmp_path)


def test_a_single_array_is_no_archive(tmp_path):
    path = save(tmp_path, **parts())
    with path.open("wb") as stream:
        np.save(stream, np.arange(308))
    with pytest.raises(DataError, match="found a single array"):
        datasets.load_published_split("yacht", 0, folder=tmp_path)


def test_an_embedded_set_has_none(tmp_path):
    assert datasets.num_published_splits("diabetes", folder=tmp_path) == 0


def test_unknown_name(tmp_path):
    with pytest.raises(UnknownNameError, match="yacht"):
        datasets.load_published_splits("yatch", folder=tmp_path)
