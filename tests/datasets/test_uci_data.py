"""Regression data sets: the registry, tables in the layout of each set, loading by name."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace

import pytest
import torch
from table_files import register, smooth_rows, write_table

from gpclml import datasets
from gpclml.datasets import uci_source, uci_sources
from gpclml.datasets.regression import read_table
from gpclml.errors import DataError, ShapeError, UnknownNameError


def test_names_are_the_registry_and_the_embedded():
    assert datasets.names() == tuple(sorted([*datasets.uci_sources(), "diabetes"]))


def test_unknown_name_lists_the_nearest():
    with pytest.raises(UnknownNameError, match=r"Did you mean 'diabetes'"):
        datasets.load("diabets")


def test_diabetes_needs_no_file(tmp_path):
    data = datasets.load("diabetes", folder=tmp_path / "absent")
    assert (data.num_data, data.num_features) == (442, 10)
    assert data.inputs.dtype == data.targets.dtype == torch.float64
    # Original units: the first patient is 59 years old with a target of 151.
    assert data.inputs[0, 0] == 59.0
    assert data.targets[0] == 151.0
    assert not (tmp_path / "absent").exists()


def test_shapes_must_belong_together():
    with pytest.raises(ShapeError, match=r"inputs: got \(3,\)"):
        datasets.RegressionData("x", torch.zeros(3), torch.zeros(3))
    with pytest.raises(ShapeError, match=r"targets: got \(3, 1\)"):
        datasets.RegressionData("x", torch.zeros(3, 2), torch.zeros(3, 1))


@pytest.mark.parametrize("name", sorted(datasets.uci_sources()))
def test_a_small_table_in_the_layout_of_each_set(tmp_path, monkeypatch, name):
    rows = smooth_rows(12, datasets.uci_source(name).num_features)
    rows[:, 1] = 0.5  # a constant column is kept
    register(monkeypatch, [write_table(tmp_path, name, rows)])
    data = datasets.load(name, folder=tmp_path)
    assert data.name == name
    assert data.inputs.dtype == data.targets.dtype == torch.float64
    expected = torch.tensor(rows)
    torch.testing.assert_close(data.inputs, expected[:, :-1], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(data.targets, expected[:, -1], rtol=1e-7, atol=1e-7)
    constant = (data.inputs == data.inputs[0]).all(dim=0)
    assert constant.nonzero().flatten().tolist() == [1]


def test_environment_names_made_data(tmp_path, monkeypatch):
    register(monkeypatch, [write_table(tmp_path, "yacht", smooth_rows(12, 6))])
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    assert datasets.fetch("yacht") == tmp_path / "uci" / "yacht.txt"


def test_one_changed_byte_of_a_made_table_is_found(tmp_path, monkeypatch):
    source = write_table(tmp_path, "yacht", smooth_rows(12, 6))
    register(monkeypatch, [source])
    path = tmp_path / "uci" / "yacht.txt"
    body = bytearray(path.read_bytes())
    body[100] ^= 1
    path.write_bytes(body)
    with pytest.raises(DataError, match=source.sha256):
        datasets.load("yacht", folder=tmp_path)
    assert not path.exists()


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "n", "d", "first_target"),
    [
        ("autompg", 392, 7, -4.4459),
        ("autos", 159, 25, -0.28564),
        ("bike", 17379, 17, 1.3855),
        ("boston", 506, 13, 24.0),
        ("challenger", 23, 4, 0.6087),
        ("concrete", 1030, 8, None),
        ("concreteslump", 103, 7, -59.605),
        ("energy", 768, 8, 15.55),
        ("fertility", 100, 9, 0.2232),
        ("forest", 517, 12, -1.111),
        ("kin40k", 40000, 8, None),
        ("kin8nm", 8192, 8, None),
        ("machine", 209, 7, 0.15692),
        ("naval", 11934, 16, 0.95),
        ("pendulum", 630, 9, 2.6662),
        ("pol", 15000, 26, None),
        ("power", 9568, 4, None),
        ("protein", 45730, 9, 17.284),
        ("pumadyn32nm", 8192, 32, None),
        ("servo", 167, 4, 0.53477),
        ("stock", 536, 11, 0.022417),
        ("tamielectric", 45781, 3, 0.48142),
        ("wine-red", 1599, 11, 5.0),
        ("wine-white", 4898, 11, 6.0),
        ("yacht", 308, 6, 0.11),
    ],
)
def test_every_set_loads(data_folder, name, n, d, first_target):
    data = datasets.load(name, folder=data_folder)
    assert data.name == name
    assert data.inputs.shape == (n, d)
    assert (data.num_data, data.num_features) == (n, d)
    assert data.targets.shape == (n,)
    assert data.inputs.dtype == data.targets.dtype == torch.float64
    assert data.inputs.isfinite().all()
    assert data.targets.isfinite().all()
    assert data.targets.std() > 0
    if first_target is not None:
        assert data.targets[0] == first_target


@pytest.mark.data
def test_naval_has_two_constant_columns(data_folder):
    inputs = datasets.load("naval", folder=data_folder).inputs
    constant = (inputs == inputs[0]).all(dim=0)
    assert constant.nonzero().flatten().tolist() == [8, 11]


@pytest.mark.data
def test_environment_names_the_data(data_folder, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    assert datasets.fetch("yacht") == data_folder / "uci" / "yacht.txt"


@pytest.mark.data
def test_one_changed_byte_is_found(data_folder, tmp_path):
    body = bytearray((data_folder / "uci" / "yacht.txt").read_bytes())
    body[100] ^= 1
    path = tmp_path / "uci" / "yacht.txt"
    path.parent.mkdir()
    path.write_bytes(body)
    with pytest.raises(DataError, match=datasets.uci_source("yacht").sha256):
        datasets.load("yacht", folder=tmp_path)
    assert not path.exists()


SOURCE = replace(
    uci_source("yacht"), num_data=3, num_features=2, target_column=2, delimiter="whitespace"
)


def written(folder, text: str, name: str = "table.txt"):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "name", "changes"),
    [
        ("  1 2\t3 \n4  5 6\n7 8 9.1\n", "table.txt", {}),
        ("1 2 3 0\n4 5 6 0\n7 8 9.1 0\n", "table.txt", {}),
        ("a,b,c\n1,2,3\n4,5,6\n7,8,9.1\n", "table.csv", {"delimiter": "comma", "header_lines": 1}),
        ("1,2,3\n4,5,6\n7,8,9.1\n", "table.csv.gz", {"delimiter": "comma", "target_column": -1}),
    ],
    ids=["whitespace", "columns after the target", "header", "gzip, last column"],
)
def test_layouts(tmp_path, text, name, changes):
    data = read_table(written(tmp_path, text, name), replace(SOURCE, **changes))
    assert data.inputs.tolist() == [[1, 2], [4, 5], [7, 8]]
    assert data.targets.tolist() == [3, 6, 9.1]
    assert data.inputs.dtype == data.targets.dtype == torch.float64
    assert (data.name, data.source, data.licence) == ("yacht", SOURCE.address, SOURCE.licence)


@pytest.mark.parametrize(
    ("text", "changes", "found"),
    [
        ("1 2 3\n4 5 6\n", {}, "2 rows of 3 columns"),
        ("1 2\n4 5\n7 8\n", {}, "3 rows of 2 columns"),
        ("1 2 3 4\n4 5 6 7\n7 8 9 9\n", {"target_column": -1}, "3 rows of 4 columns"),
        ("1 2 3\n4 nan 6\n7 8 9\n", {}, "nan in row 1, column 1"),
        ("1 2 3\n4 5 6\n7 8 -inf\n", {}, "-inf in row 2, column 2"),
        ("1 2 3\n4 5\n7 8 9\n", {}, "not a table of numbers"),
        ("1 2 3\n4 b 6\n7 8 9\n", {}, "not a table of numbers"),
    ],
)
def test_not_as_registered(tmp_path, text, changes, found):
    path = written(tmp_path, text)
    with pytest.raises(DataError, match=found) as caught:
        read_table(path, replace(SOURCE, **changes))
    assert str(path) in str(caught.value)


def test_broken_gzip(tmp_path):
    path = written(tmp_path, "1 2 3\n" * 1000, "table.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match="not a table of numbers"):
        read_table(path, SOURCE)


NAMES = [
    "autompg", "autos", "bike", "boston", "challenger", "concrete", "concreteslump", "energy",
    "fertility", "forest", "kin40k", "kin8nm", "machine", "naval", "pendulum", "pol", "power",
    "protein", "pumadyn32nm", "servo", "stock", "tamielectric", "wine-red", "wine-white", "yacht",
]  # fmt: skip


def test_names():
    assert sorted(uci_sources()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_pinned_and_complete(name):
    source = uci_source(name)
    assert source.name == name
    assert re.fullmatch(r"[0-9a-f]{64}", source.sha256)
    assert re.fullmatch(
        r"https://raw\.githubusercontent\.com/[\w-]+/[\w-]+/[0-9a-f]{40}/[\w/.-]+", source.address
    )
    assert source.delimiter in ("comma", "whitespace")
    assert source.target_column in (-1, source.num_features)
    assert source.bytes > 100
    assert source.note
    assert source.licence


def test_files_are_distinct():
    sources = uci_sources().values()
    count = len(sources)
    assert len({source.file for source in sources}) == len({s.sha256 for s in sources}) == count


def test_registry_is_read_only():
    with pytest.raises(TypeError):
        uci_sources()["new"] = uci_source("yacht")


@pytest.mark.parametrize("name", ["wine", None, ["yacht"]])
def test_unknown_name(name):
    with pytest.raises(UnknownNameError, match="wine-red"):
        uci_source(name)
