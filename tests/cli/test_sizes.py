"""Which models are compared, by the size of the table, and what is said of it."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch

from gpclml.cli.fitting import check_size, default_models, threads_for
from gpclml.cli.options import TableOptions
from gpclml.cli.report import MODELS
from gpclml.cli.table_data import read_table_data
from gpclml.errors import ArgumentError


@pytest.mark.parametrize(
    ("n", "d", "left_out"),
    [
        (40, 5, ()),
        (400, 8, ()),
        (600, 8, ("sm",)),
        (2000, 8, ("sm",)),
        (2001, 8, ("rq and matern", "sm")),
        (4000, 1, ("rq and matern", "sm")),
    ],
)
def test_models_by_size(n, d, left_out):
    names, notes = default_models(n, d)
    absent = [name for name in MODELS if name not in names]
    assert " ".join(absent) == " ".join(left_out).replace(" and", "")
    assert [note.partition(" is left")[0].partition(" are left")[0] for note in notes] == list(
        left_out
    )
    if "sm" in names:
        check_size(names, n, d)


def test_too_large_for_memory():
    check_size(("sm",), 1000, 8)
    with pytest.raises(ArgumentError, match="--rows 1000"):
        check_size(("sm",), 1001, 8)
    check_size(("rbf",), 4000, 100)


def test_more_rows_than_are_trained_on_are_test_rows(tmp_path):
    rng = np.random.default_rng(0)
    table = pandas.DataFrame(rng.standard_normal((6000, 2)), columns=["x", "y"])
    table.to_csv(tmp_path / "data.csv", index=False)
    data = read_table_data(TableOptions(tmp_path / "data.csv", "y", rows=4000), tests=True)
    assert len(data.train[1]) == 4000
    assert len(data.test[1]) == 2000
    assert data.notes[1] == (
        "4000 random rows are compared and fitted, the limit of --rows; all 2000 others are test "
        "rows."
    )
    data = read_table_data(TableOptions(tmp_path / "data.csv", "y", rows=5000), tests=True)
    assert (len(data.train[1]), len(data.test[1])) == (5000, 1000)
    assert len(data.notes) == 1


def test_threads_are_as_before():
    before = torch.get_num_threads()
    with threads_for(1000):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with threads_for(1001):
        assert torch.get_num_threads() == before
