"""Tables whose rows have a time: the latest rows are test rows, or the option is named."""

from __future__ import annotations

import json
import re
import shlex

import numpy as np
import pandas
import pytest
import torch

from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.tables.reading import read_times, split_rows, subset_rows

NAME = '<i>day</i> & "hour"'


def dated(n=60, per_day=1):
    rng = np.random.default_rng(0)
    days = pandas.to_datetime("2024-01-01") + pandas.to_timedelta(np.arange(n) // per_day, "D")
    x = rng.standard_normal(n)
    table = pandas.DataFrame({NAME: days.strftime("%Y-%m-%d"), "x": x, "y": 2 * x + np.arange(n)})
    return table.sample(frac=1, random_state=0)


def test_the_latest_rows_are_test_rows():
    times = torch.randperm(100, generator=torch.Generator().manual_seed(0)).double()
    targets = torch.zeros(100)
    targets[3], times[5] = torch.nan, torch.nan
    for limit, count in ((4000, 78), (30, 30)):
        parts = split_rows(targets, seed=1, most_rows=limit, times=times)
        assert len(parts.train) == count
        assert len(parts.test) == 20
        assert not {3, 5} & {*parts.train.tolist(), *parts.test.tolist()}
        assert parts.train.tolist() == sorted(parts.train.tolist())
        assert parts.test.tolist() == sorted(parts.test.tolist())
        used = times[~(times.isnan() | targets.isnan())].sort().values
        assert times[parts.train].sort().values.tolist() == used[:78][-count:].tolist()
        assert times[parts.test].sort().values.tolist() == used[78:].tolist()
    latest = subset_rows(targets, most_rows=7, times=times)
    assert times[latest].min() > times[times.isnan().logical_not()].sort().values[-9]
    assert latest.tolist() == sorted(latest.tolist())


def test_rows_of_one_time_stay_together():
    times = torch.arange(90).div(9, rounding_mode="floor").double()
    parts = split_rows(torch.zeros(90), times=times)
    assert set(times[parts.test].tolist()) == {8.0, 9.0}
    times = (torch.arange(90) > 80).double() + (torch.arange(90) > 84)  # 72 to 80 are of the first
    parts = split_rows(torch.zeros(90), times=times)
    assert parts.test.tolist() == list(range(81, 90))


@pytest.mark.parametrize("times", [torch.zeros(60), torch.arange(60) > 56])
def test_times_that_part_nothing(times):
    with pytest.raises(ArgumentError, match=r"--time-column: got \d different times in 60 rows"):
        split_rows(torch.zeros(60), times=times.double())


def test_columns_that_are_no_time():
    table = pandas.DataFrame({"a": ["x", "y"] * 3, "b": [None] * 6, "c": [True, False] * 3})
    assert read_times(table, None) is None
    for name, got in (("a", "texts"), ("b", "no values"), ("c", "true and false")):
        with pytest.raises(ArgumentError, match=f"--time-column: got '{name}', a column of {got}"):
            read_times(table, name)
    with pytest.raises(UnknownNameError, match="--time-column: got 'd'"):
        read_times(table, "d")
    dates = read_times(pandas.DataFrame({"t": ["1970-01-02", None, "1970-01-03T12:00"]}), "t")
    assert dates[[0, 2]].tolist() == [1.0, 2.5]
    assert bool(dates[1].isnan())


def test_compare_tests_on_the_latest_rows(gpclml, tmp_path):
    data, out = tmp_path / "data.csv", tmp_path / "out"
    table = dated()
    table.loc[table.index[0], NAME] = None
    table.to_csv(data, index=False)
    words = data, "--target", "y", "--models", "linear", "--out", out
    result = gpclml("compare", *words)
    assert result.exit_code == 0, result.output
    assert f"test on the latest: --time-column {NAME!r}." in result.stderr
    result = gpclml("compare", *words, "--time-column", NAME)
    assert result.exit_code == 0, result.output
    assert f"Left out: 1 row without {NAME}." in result.stderr
    assert f"The test rows are the latest: those from {NAME} 2024-02-18 on." in result.stderr
    assert f"--drop {NAME!r}" in result.stderr
    assert "drawn at random" not in result.output
    assert f"the latest 12 rows by {NAME}" in " ".join(result.stdout.split())
    page = " ".join((out / "index.html").read_text().split())
    assert "<i>day</i>" not in page
    assert "the latest 12 rows by &lt;i&gt;day&lt;/i&gt; &amp; &#34;hour&#34;" in page
    record = json.loads((out / "report.json").read_text())
    assert shlex.join(["--time-column", NAME]) in record["command"]


def test_fit_takes_the_latest_rows_and_says_so(gpclml, tmp_path):
    data = tmp_path / "data.csv"
    dated(per_day=2).to_csv(data, index=False)
    words = data, "--target", "y", "--model", "linear", "--rows", 30, "--out", tmp_path / "m"
    result = gpclml("fit", *words, "--time-column", NAME, "--drop", NAME)
    assert result.exit_code == 0, result.output
    assert "30 latest rows of 60 are fitted, the limit of --rows." in result.stderr
    assert "are the latest" not in result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("y", "--time-column: got 'y', expected a column that is not the target"),
        ("dya", "--time-column: got 'dya'"),
        ("group", "--time-column: got 'group', a column of texts, expected a column of dates"),
        ("year", "--time-column: got 1 different times in 60 rows"),
    ],
)
def test_what_is_refused_is_refused_before_any_fit(gpclml, tmp_path, no_fit, name, said):
    table = dated().assign(group=["a", "b"] * 30, year=2024)
    table.to_csv(tmp_path / "data.csv", index=False)
    words = "--target", "y", "--time-column", name, "--out", tmp_path / "out"
    result = gpclml("compare", tmp_path / "data.csv", *words)
    assert result.exit_code == 2, result.output
    assert re.sub(r"\s+", " ", result.stderr).startswith(f"Error: {said}")
    assert not (tmp_path / "out").exists()
