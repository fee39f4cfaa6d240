"""Regression tables by name: the registry, files in the layout of each, published splits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from table_files import register, smooth_rows, write_table

from benchmarks.data import load, load_published_split, names, split, subset
from benchmarks.data.files import data_files
from gpclml.errors import DataError, UnknownNameError

UCI = [name for name in names() if name != "diabetes"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    return tmp_path


def test_unknown_name_lists_the_nearest():
    with pytest.raises(UnknownNameError, match=r"Did you mean 'diabetes'"):
        load("diabets")


def test_diabetes_needs_no_file():
    data = load("diabetes")
    assert data.inputs.shape == (442, 10)
    assert data.inputs.dtype == data.targets.dtype == torch.float64
    # Original units: the first patient is 59 years old with a target of 151.
    assert data.inputs[0, 0] == 59.0
    assert data.targets[0] == 151.0


@pytest.mark.parametrize("name", UCI)
def test_a_small_table_in_the_layout_of_each_set(folder, monkeypatch, name):
    rows = smooth_rows(12, data_files()[name][0].num_features)
    rows[:, 1] = 0.5  # a constant column is kept
    register(monkeypatch, [write_table(folder, name, rows)])
    data = load(name)
    assert data.inputs.dtype == data.targets.dtype == torch.float64
    expected = torch.tensor(rows)
    torch.testing.assert_close(data.inputs, expected[:, :-1], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(data.targets, expected[:, -1], rtol=1e-7, atol=1e-7)


def test_columns_after_the_target_are_not_read(folder, monkeypatch):
    rows = np.column_stack([smooth_rows(12, 16), np.full(12, 9.0)])
    register(monkeypatch, [replace(write_table(folder, "naval", rows), num_features=16)])
    data = load("naval")
    assert data.inputs.shape == (12, 16)
    torch.testing.assert_close(data.targets, torch.tensor(rows[:, 16]), rtol=1e-7, atol=1e-7)


@pytest.mark.data
@pytest.mark.parametrize("name", UCI)
def test_every_set_loads(data_folder, monkeypatch, name):
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    data, [file] = load(name), data_files()[name]
    assert data.inputs.shape == (file.num_data, file.num_features)
    assert data.targets.shape == (file.num_data,)
    assert data.inputs.isfinite().all()
    assert data.targets.isfinite().all()
    assert data.targets.std() > 0


@pytest.mark.data
def test_targets_are_those_of_the_files(data_folder, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    first = {"boston": 24.0, "energy": 15.55, "naval": 0.95, "wine-white": 6.0, "yacht": 0.11}
    for name, target in first.items():
        assert load(name).targets[0] == target


COUNTS = {
    "bike": 10, "boston": 20, "concrete": 20, "energy": 20, "kin40k": 10, "kin8nm": 20, "naval": 20,
    "pol": 10, "power": 20, "protein": 5, "pumadyn32nm": 10, "wine-red": 20, "yacht": 20,
}  # fmt: skip


@pytest.mark.data
@pytest.mark.parametrize("name", COUNTS)
def test_published_splits_part_all_rows(data_folder, monkeypatch, name):
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    splits = [load_published_split(name, k) for k in range(COUNTS[name])]
    for fold in splits:
        assert fold.train.dtype == fold.test.dtype == torch.int64
        assert abs(len(fold.test) - data_files()[name][0].num_data / 10) <= 1
    assert not torch.equal(splits[0].test, splits[1].test)


def save_split(folder, **arrays):
    (folder / "uci" / "splits").mkdir(parents=True)
    np.savez(folder / "uci" / "splits" / "yacht.npz", **arrays)


def test_a_published_split(folder):
    with pytest.raises(DataError, match=r"yacht\.npz: no such file"):
        load_published_split("yacht", 0)
    save_split(folder, train_0=np.arange(31, 308), test_0=np.arange(31))
    only = load_published_split("yacht", 0)
    assert only.test.tolist() == list(range(31))
    assert only.train.tolist() == list(range(31, 308))


@pytest.mark.parametrize(("first", "end"), [(31, 307), (30, 308)])
def test_a_published_split_that_leaves_out_or_repeats_rows(folder, first, end):
    save_split(folder, train_0=np.arange(first, end), test_0=np.arange(31))
    with pytest.raises(DataError, match="train_0 and test_0 do not divide 308 rows"):
        load_published_split("yacht", 0)


def test_a_split_depends_on_the_seed_only():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    halves, other = split(100, 3), split(100, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert halves.test[:5].tolist() == [86, 42, 89, 92, 3]
    assert not torch.equal(halves.test.sort().values, other.test.sort().values)
    assert torch.cat([halves.train, halves.test]).sort().values.tolist() == list(range(100))
    assert len(split(101, 3, 0.34).test) == 34


def test_subsets_are_nested_and_of_training_rows_only():
    train = split(200, 0).train
    small, large = subset(train, 50, seed=1), subset(train, 100, seed=1)
    assert torch.equal(large[:50], small)
    assert len(set(large.tolist())) == 100
    assert set(large.tolist()) <= set(train.tolist())
    assert not torch.equal(small, subset(train, 50, seed=2))
