"""Parsing: delimiters, headers, compression, target columns; files that are not as registered."""

from __future__ import annotations

import gzip
from dataclasses import replace

import pytest
import torch

from gpclml.datasets import uci_source
from gpclml.datasets._table import read_table
from gpclml.errors import DataError

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
