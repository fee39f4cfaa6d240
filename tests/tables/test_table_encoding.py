"""How columns of a table become inputs; predictions do not depend on the units of the columns."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpclml import Regressor
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.tables.data import read_table_data
from gpclml.tables.encoding import InputEncoding, fit_inputs, kind_of
from gpclml.tables.reading import read_table
from gpclml.tables.recipes import TableOptions


def table_of(n=40, **columns):
    rng = np.random.default_rng(0)
    return pandas.DataFrame({"y": rng.standard_normal(n), "x": rng.standard_normal(n), **columns})


def with_missing(values, rows):
    values = list(values)
    for row in rows:
        values[row] = None
    return values


@pytest.fixture
def read(tmp_path):
    """The rows of a command's table in a file."""

    def written(table, **options):
        table.to_csv(tmp_path / "table.csv", index=False)
        options = TableOptions(tmp_path / "table.csv", "y", 4000, **options)
        return read_table_data(options, tests=False)

    return written


def test_the_command_encodes_as_the_regressor_does(read):
    n = 60
    days = pandas.date_range("2024-01-01", periods=n)
    table = table_of(
        n,
        yes=np.arange(n) % 3 == 0,
        day=days.strftime("%Y-%m-%d"),
        town=with_missing(["a", "b", "c", "d"] * (n // 4), [7]),
        gaps=with_missing(np.arange(n) ** 0.5, range(0, n, 5)),
        few=with_missing(np.arange(n) ** 1.5, [3]),
        codes=np.where(np.arange(n) % 6 == 0, -999.0, np.arange(n) % 7),
    )
    data = read(table)
    with pytest.warns(UserWarning, match="-999, taken for missing"):
        regressor = Regressor(["linear"]).fit(table.drop(columns="y"), table["y"])
    assert data.encoding == regressor.encoding_
    np.testing.assert_array_equal(data.train[0], regressor.stack_._x)
    assert not bool(data.train[0].isnan().any())


def test_columns_that_are_left_out_have_a_reason(read):
    n = 80
    table = table_of(
        n,
        same=[3] * n,
        nearly=with_missing(["a"] * n, [4]),
        none=[None] * n,
        name=[f"name {i}" for i in range(n)],
        day=[f"{1 + i % 28}/{1 + i % 12}/2024" for i in range(n)],
        asked=range(n),
    )
    encoding = read(table, drop=("asked",)).encoding
    assert [column.name for column in encoding.columns] == ["x"]
    assert encoding.left_out == {
        "asked": "as asked",
        "same": "the same value in all rows",
        "nearly": "the same value in all rows",
        "none": "no values",
        "name": "80 different texts, more than 50",
        "day": "80 different texts, more than 50; write dates as 2024-05-31",
    }
    assert len(read(table, categories=("name",)).encoding.names) == 1 + 1 + 50


def test_numbers_as_categories_also_where_missing_values_make_them_decimal(read):
    encoding = read(table_of(code=[1, 2, 10, 3] * 10), categories=("code",)).encoding
    assert encoding.names == ("x", "code = 1", "code = 10", "code = 2", "code = 3")
    decimal = pandas.DataFrame({"x": [0.0, 0.0], "code": [10.0, 2.0]})
    assert encoding.encode(decimal).tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]


def test_mixed_columns_are_refused_with_rows_and_mends(read):
    table = table_of(size=[1, 2, "unknown", 4] * 10)
    message = r"column 'size'.*10 of 40 values such as 'unknown' \(row 3\).*--drop or --categories"
    with pytest.raises(ArgumentError, match=message):
        read(table)
    assert read(table, categories=("size",)).encoding.names[-1] == "size = unknown"
    encoding = read(table_of(size=range(40))).encoding
    with pytest.raises(ArgumentError, match=r"'unknown' \(row 3\).*expected numbers"):
        encoding.encode(table)


def test_infinite_values_are_refused(read):
    with pytest.raises(ArgumentError, match=r"column 'z'.*1 infinite values \(row 1\)"):
        read(table_of(z=[np.inf, *range(39)]))


def test_names_that_are_not_there(read):
    table = table_of()
    with pytest.raises(UnknownNameError, match="drop"):
        read(table, drop=("z",))
    with pytest.raises(ArgumentError, match="not the target"):
        read(table, drop=("y",))
    with pytest.raises(ArgumentError, match=r"no usable column .*'x': as asked"):
        read(table, drop=("x",))
    with pytest.raises(ArgumentError, match=r"no column 'x', .*there are 'y'\."):
        read(table).encoding.encode(table[["y"]])


def test_row_numbers_are_mentioned_and_kept(read):
    data = read(table_of(key=range(100, 140), customer_id=[*range(20), *range(60, 40, -1)]))
    said = [note for note in data.notes if "another whole number in every row" in note]
    assert len(said) == 2
    assert "'key'" in said[0]
    assert "--drop 'customer_id'" in said[1]
    assert data.encoding.names == ("x", "key", "customer_id")


numbers = st.floats(-1e6, 1e6, allow_subnormal=False) | st.none()
levels = st.sampled_from(["a", "b", 'c "d"', "ä, ö"]) | st.none()
dates = st.dates().map(lambda date: f"{date.year:04d}-{date:%m-%d}") | st.none()
values = {
    "number": numbers,
    "category": levels,
    "boolean": st.booleans() | st.none(),
    "date": dates,
}


@st.composite
def tables(draw):
    n = draw(st.integers(5, 20))
    chosen = draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=4))
    table = {"y": np.arange(n, dtype=float), "x": np.arange(n) % 5 + 0.5}
    for index, kind in enumerate(chosen):
        table[f"{kind} {index}"] = draw(st.lists(values[kind], min_size=n, max_size=n))
    return pandas.DataFrame(table)


@settings(max_examples=60, deadline=None)
@given(tables(), st.randoms(use_true_random=False))
def test_properties_of_any_encoding(tmp_path_factory, table, random):
    encoding = fit_inputs(table, {name: kind_of(table[name]) for name in table})
    x = encoding.encode(table)
    assert x.shape == (len(table), len(encoding.names))
    missing = {column.name: table[column.name].isna().to_numpy() for column in encoding.columns}
    for column in encoding.columns:
        inputs = x[:, encoding.slices[column.name]]
        assert not np.isnan(inputs[~missing[column.name]]).any()
        if column.has_missing:
            np.testing.assert_array_equal(inputs[:, -1], missing[column.name])
        else:
            assert np.isnan(inputs[missing[column.name]]).all()
    order = random.sample(range(len(table)), len(table))
    np.testing.assert_array_equal(encoding.encode(table.iloc[order]), x[order])
    assert InputEncoding.from_content(json.loads(json.dumps(asdict(encoding)))) == encoding
    path = tmp_path_factory.getbasetemp() / "table.csv"
    table.to_csv(path, index=False)
    np.testing.assert_array_equal(encoding.encode(read_table(path)), x)


SCALES = range(-12, 13)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    x = rng.random((40, 2))
    price = 3 + np.sin(5 * x[:, 0]) + 0.1 * rng.standard_normal(40)
    return pandas.DataFrame({"size": x[:, 0], "age": x[:, 1], "price": price})


@pytest.mark.parametrize(
    "powers", [(-12, -6, 12), pytest.param(SCALES, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_fit_and_predict_scale_with_target_and_columns(table, gpclml, tmp_path, powers):
    def predictions(power, of_inputs):
        data, new = tmp_path / "train.csv", tmp_path / "new.csv"
        scaled = table.assign(
            price=table["price"] * 10.0**power,
            size=table["size"] * 10.0**of_inputs,
            age=table["age"] * 10.0**of_inputs,
        )
        scaled.head(30).to_csv(data, index=False)
        scaled.tail(10).to_csv(new, index=False)
        model, out = tmp_path / f"model {power} {of_inputs}", tmp_path / "out.csv"
        result = gpclml("fit", data, "--target", "price", "--model", "rbf", "--out", model)
        assert result.exit_code == 0, result.output
        result = gpclml("predict", model, new, "--out", out)
        assert result.exit_code == 0, result.output
        coverage = re.search(r"(\d+)\W%\W+in their 90", result.stderr)
        assert coverage is not None, result.stderr
        return pandas.read_csv(out) / 10.0**power, coverage[1]

    expected, coverage = predictions(0, 0)
    assert coverage != "100"
    for power in powers:
        found, covered = predictions(power, -power)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert covered == coverage


def test_a_report_says_the_same_of_targets_in_billionths(table, gpclml, tmp_path):
    reports = {}
    for power in (0, -9):
        data, out = tmp_path / f"{power}.csv", tmp_path / f"report {power}"
        table.assign(price=table["price"] * 10.0**power).to_csv(data, index=False)
        options = "--models", "rbf,matern", "--out", out
        result = gpclml("compare", data, "--target", "price", *options)
        assert result.exit_code == 0, result.output
        reports[power] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert reports[-9]["sentences"] == reports[0]["sentences"]
    nats = math.log(1e9)
    for name, expected in reports[0]["models"].items():
        scores = reports[-9]["models"][name]
        assert scores["test_rmse"] * 1e9 == pytest.approx(expected["test_rmse"], rel=1e-6)
        assert scores["test_nll"] + nats == pytest.approx(expected["test_nll"], abs=1e-6)
        assert scores["lml"] - 32 * nats == pytest.approx(expected["lml"], abs=1e-6)
        assert scores["loo"] - 32 * nats == pytest.approx(expected["loo"], abs=1e-6)
        same = "test_coverage", "difference", "difference_se", "weight", "findings"
        for key in same:
            assert scores[key] == pytest.approx(expected[key], abs=1e-6)
