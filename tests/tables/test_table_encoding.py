"""How columns become inputs; predictions do not depend on the units of the columns."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpclml.datasets.columns import CategoryColumn, NumberColumn
from gpclml.errors import ArgumentError, DataError, UnknownNameError
from gpclml.tables.encoding import TableEncoding, fit_encoding


def table_of(n=40, **columns):
    rng = np.random.default_rng(0)
    return pandas.DataFrame({"y": rng.standard_normal(n), "x": rng.standard_normal(n), **columns})


def with_missing(values, rows):
    values = list(values)
    for row in rows:
        values[row] = None
    return values


def kinds(encoding):
    return {column.name: column for column in encoding.columns}


def test_columns_by_kind():
    n = 40
    days = pandas.date_range("2024-01-01", periods=n)
    table = table_of(
        whole=np.arange(n) % 7,
        yes=np.arange(n) % 2 == 0,
        texts=[f"{0.5 * i} " for i in range(n)],
        day=days.strftime("%Y-%m-%d"),
        time=days + pandas.Timedelta(hours=6),
        zone=days.strftime("%Y-%m-%dT12:00:00+02:00"),
        town=["a", "b", "c", "d"] * (n // 4),
        long=pandas.to_timedelta(np.arange(n), unit="D"),
    )
    encoding = fit_encoding(table, "y")
    found = kinds(encoding)
    assert found["whole"] == NumberColumn("whole")
    assert found["yes"] == NumberColumn("yes", "boolean")
    assert found["texts"] == NumberColumn("texts")
    assert found["town"] == CategoryColumn("town", ("a", "b", "c", "d"))
    assert {found[name].kind for name in ("day", "time", "zone")} == {"date"}
    inputs = dict(zip(encoding.inputs, encoding.encode(table).inputs.T, strict=True))
    first = 19723.0  # days from 1970 to 2024
    np.testing.assert_array_equal(inputs["day"], first + np.arange(n))
    np.testing.assert_array_equal(inputs["time"], first + 0.25 + np.arange(n))
    np.testing.assert_allclose(inputs["zone"], first + 10 / 24 + np.arange(n), rtol=1e-15)
    np.testing.assert_array_equal(inputs["long"], np.arange(n))
    np.testing.assert_array_equal(inputs["texts"], 0.5 * np.arange(n))
    np.testing.assert_array_equal(inputs["town = c"], (np.arange(n) % 4 == 2).astype(float))


def test_columns_that_are_left_out_have_a_reason():
    n = 40
    table = table_of(
        same=[3] * n,
        nearly=with_missing(["a"] * n, [4]),
        none=[None] * n,
        name=[f"name {i}" for i in range(n)],
        lists=[[i] for i in range(n)],
        day=[f"{1 + i % 28}/{1 + i % 12}/2024" for i in range(n)],
        asked=range(n),
    )
    encoding = fit_encoding(table, "y", drop=["asked"])
    assert [column.name for column in encoding.columns] == ["x"]
    assert encoding.left_out == {
        "asked": "as asked",
        "same": "the same value in all rows",
        "nearly": "the same value in all rows",
        "none": "no values",
        "name": "40 different texts, more than 20",
        "lists": "its values are lists or objects",
        "day": "40 different texts, more than 20; write dates as 2024-05-31",
    }
    assert len(encoding.encode(table).rows) == n


def test_few_rows_with_missing_values_are_not_encoded():
    table = table_of(z=with_missing(np.arange(40.0) ** 2, [3]))
    encoding = fit_encoding(table, "y")
    assert kinds(encoding)["z"].fill is None
    encoded = encoding.encode(table)
    assert encoded.rows.tolist() == [row for row in range(40) if row != 3]
    assert encoded.missing == {"z": 1}
    assert encoded.notes == ("Column 'z': 1 value is missing; such rows are left out.",)
    x, y = encoding.tensors(table)
    assert x.shape == (39, 2)
    np.testing.assert_array_equal(y, table["y"].drop(3))


def test_many_missing_values_are_filled_and_marked():
    table = table_of(
        z=with_missing(range(40), [0, 1, 2]),
        yes=with_missing([True] * 30 + [False] * 10, [5]),
        town=with_missing(["a", "b"] * 20, [7]),
    )
    encoding = fit_encoding(table, "y")
    assert kinds(encoding)["z"].fill == 21.0
    assert kinds(encoding)["yes"].fill == 1.0
    inputs = dict(zip(encoding.inputs, encoding.encode(table).inputs.T, strict=True))
    assert inputs["z"][:4].tolist() == [21, 21, 21, 3]
    assert inputs["z is missing"].nonzero()[:, 0].tolist() == [0, 1, 2]
    assert inputs["yes is missing"].nonzero()[:, 0].tolist() == [5]
    assert inputs["town is missing"].nonzero()[:, 0].tolist() == [7]
    # A column that is complete in the training rows stays one that must be there.
    other = table.assign(x=with_missing(table["x"], [9]))
    assert encoding.encode(other).missing == {"x": 1}


def test_new_levels_have_zeros_and_are_told():
    table = table_of(town=["a", "b"] * 20)
    encoding = fit_encoding(table, "y")
    encoded = encoding.encode(pandas.DataFrame({"x": [1.0, 2.0], "town": ["c", "b"]}))
    assert encoded.inputs.tolist() == [[1, 0, 0], [2, 0, 1]]
    assert encoded.unknown == {"town": {"c": 1}}
    assert "'c' (1)" in encoded.notes[0]


def test_numbers_as_categories_also_where_missing_values_make_them_decimal():
    table = table_of(code=[1, 2, 10, 3] * 10)
    encoding = fit_encoding(table, "y", categories=["code"])
    assert kinds(encoding)["code"].levels == ("1", "10", "2", "3")
    decimal = pandas.DataFrame({"x": [0.0, 0.0, 0.0], "code": [10.0, np.nan, 2.0]})
    encoded = encoding.encode(decimal)
    assert encoded.rows.tolist() == [0, 2]
    assert not encoded.unknown


def test_mixed_columns_are_refused_with_rows_and_mends():
    table = table_of(size=[1, 2, "unknown", 4] * 10)
    message = r"column 'size'.*10 of 40 values such as 'unknown' \(row 3\).*--drop or --categories"
    with pytest.raises(ArgumentError, match=message):
        fit_encoding(table, "y")
    assert kinds(fit_encoding(table, "y", categories=["size"]))["size"].levels[-1] == "unknown"
    encoding = fit_encoding(table_of(size=range(40)), "y")
    with pytest.raises(ArgumentError, match=r"'unknown' \(row 3\).*expected numbers"):
        encoding.encode(table)


def test_infinite_values_are_refused():
    with pytest.raises(ArgumentError, match=r"column 'z'.*1 infinite values \(row 1\)"):
        fit_encoding(table_of(z=[np.inf, *range(39)]), "y").encode(table_of(z=[np.inf, *range(39)]))


def test_names_that_are_not_there():
    table = table_of()
    with pytest.raises(UnknownNameError, match="drop"):
        fit_encoding(table, "y", drop=["z"])
    with pytest.raises(ArgumentError, match="not the target"):
        fit_encoding(table, "y", drop=["y"])
    with pytest.raises(ArgumentError, match=r"no usable column .*'x': as asked"):
        fit_encoding(table, "y", drop=["x"])
    with pytest.raises(ArgumentError, match=r"no column 'x', .*there are 'y'\."):
        fit_encoding(table, "y").encode(table[["y"]])


def test_row_numbers_are_mentioned_and_kept():
    encoding = fit_encoding(
        table_of(key=range(100, 140), customer_id=[*range(20), *range(60, 40, -1)]), "y"
    )
    assert len(encoding.notes) == 2
    assert "'key'" in encoding.notes[0]
    assert "--drop 'customer_id'" in encoding.notes[1]
    assert encoding.inputs == ("x", "key", "customer_id")


def test_files_that_are_no_encoding(tmp_path):
    path = tmp_path / "table.json"
    with pytest.raises(DataError, match="no file"):
        TableEncoding.load(path)
    for text in ("", "[]", '{"format": "else", "version": 1}', "{}"):
        path.write_text(text)
        with pytest.raises(DataError, match="damaged or not a table encoding"):
            TableEncoding.load(path)


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
    for place, kind in enumerate(chosen):
        table[f"{kind} {place}"] = draw(st.lists(values[kind], min_size=n, max_size=n))
    return pandas.DataFrame(table)


@settings(max_examples=60, deadline=None)
@given(tables(), st.randoms(use_true_random=False))
def test_properties_of_any_encoding(tmp_path_factory, table, random):
    encoding = fit_encoding(table, "y")
    encoded = encoding.encode(table)
    assert encoded.inputs.shape == (len(encoded.rows), len(encoding.inputs))
    assert encoded.inputs.dtype == torch.float64
    assert bool(encoded.inputs.isfinite().all())
    assert not encoded.unknown
    names = [column.name for column in encoding.columns]
    complete = ~table[names].isna().any(axis=1)
    filled = complete.mean() <= 0.95
    assert len(encoded.rows) == (len(table) if filled else complete.sum())

    at = 0
    for column in encoding.columns:
        part = encoded.inputs[:, at : at + len(column.inputs)]
        at += len(column.inputs)
        if isinstance(column, CategoryColumn):
            assert bool((part.sum(1) == 1).all())

    order = random.sample(range(len(table)), len(table))
    again = encoding.encode(table.iloc[order])
    places = {row: place for place, row in enumerate(encoded.rows.tolist())}
    expected = encoded.inputs[[places[order[row]] for row in again.rows.tolist()]]
    assert torch.equal(again.inputs, expected)

    path = tmp_path_factory.getbasetemp() / "table.json"
    encoding.save(path)
    assert TableEncoding.load(path) == encoding
    assert json.loads(encoding.to_json())["target"] == "y"


@settings(max_examples=30, deadline=None)
@given(tables())
def test_a_table_on_disk_is_encoded_alike(tmp_path_factory, table):
    from gpclml.tables.reading import read_table

    path = tmp_path_factory.getbasetemp() / "table.csv"
    table.to_csv(path, index=False)
    encoding = fit_encoding(table, "y")
    assert torch.equal(encoding.encode(read_table(path)).inputs, encoding.encode(table).inputs)


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
