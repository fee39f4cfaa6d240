"""Rows of a table: targets, times, splits, what is said of them, and how columns become inputs."""

import json
import re
import shlex
from dataclasses import asdict

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpclml import Regressor
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.tables.data import TableOptions, read_table_data, read_times, split_rows
from gpclml.tables.encoding import InputEncoding, fit_inputs, kind_of
from gpclml.tables.reading import read_table


def test_splits_have_targets_follow_the_seed_and_the_limit():
    targets = torch.arange(100.0)
    targets[::10] = torch.nan
    train, test = split_rows(targets, seed=3, most_rows=30)
    assert (len(train), len(test)) == (30, 60)
    assert not bool(targets[torch.cat([train, test])].isnan().any())
    assert torch.equal(train, split_rows(targets, seed=3, most_rows=30)[0])
    assert not torch.equal(train, split_rows(targets, seed=4, most_rows=30)[0])
    whole, none = split_rows(targets, tests=False)
    assert torch.equal(whole, (~targets.isnan()).nonzero()[:, 0])
    assert len(none) == 0
    some = split_rows(targets, seed=1, most_rows=7, tests=False)[0].tolist()
    assert len(some) == 7
    assert some == sorted(some)
    for n, *counts in ((442, 354, 88), (5001, 4000, 1001), (30000, 4000, 26000)):
        assert [len(rows) for rows in split_rows(torch.zeros(n))] == counts


BAD = {
    "texts": (["a", "b"] * 20, "texts.*Columns of numbers: x"),
    "mixed": ([*range(39), "?"], r"'\?' \(row 40\)"),
    "true": ([True, False] * 20, "Pass --task classification, or write 0 and 1"),
    "dates": (pandas.date_range("2024-01-01", periods=40), "dates"),
    "none": ([None] * 40, "no value at all"),
    "constant": ([7] * 40, "same value 7 in all 40 rows"),
    "few": ([*range(10), *[None] * 30], "10 rows with a value, of 40"),
    "copies": ([*range(10)] * 4, "10 rows with a value, of 10"),
    "infinite": ([np.inf, *range(39)], "infinite"),
}


@pytest.mark.parametrize("name", BAD)
def test_columns_that_are_no_target(tmp_path, name):
    values, message = BAD[name]
    x = np.arange(40.0) % 10 if name == "copies" else np.arange(40.0)
    pandas.DataFrame({"price": values, "x": x}).to_csv(tmp_path / "table.csv", index=False)
    options = TableOptions(tmp_path / "table.csv", "price", 4000, task="regression")
    with pytest.raises(ArgumentError, match=message) as error:
        read_table_data(options, tests=True)
    assert "'price'" in str(error.value)


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
    used = times[~(times.isnan() | targets.isnan())].sort().values
    for limit, count in ((4000, 78), (30, 30)):
        train, test = split_rows(targets, seed=1, most_rows=limit, times=times)
        assert (len(train), len(test)) == (count, 20)
        assert not {3, 5} & {*train.tolist(), *test.tolist()}
        assert train.tolist() == sorted(train.tolist())
        assert test.tolist() == sorted(test.tolist())
        assert times[train].sort().values.tolist() == used[:78][-count:].tolist()
        assert times[test].sort().values.tolist() == used[78:].tolist()
    latest = split_rows(targets, most_rows=7, times=times, tests=False)[0]
    assert times[latest].sort().values.tolist() == used[-7:].tolist()
    assert latest.tolist() == sorted(latest.tolist())


def test_rows_of_one_time_stay_together():
    times = torch.arange(90).div(9, rounding_mode="floor").double()
    test = split_rows(torch.zeros(90), times=times)[1]
    assert set(times[test].tolist()) == {8.0, 9.0}
    times = (torch.arange(90) > 80).double() + (torch.arange(90) > 84)  # 72 to 80 are of the first
    assert split_rows(torch.zeros(90), times=times)[1].tolist() == list(range(81, 90))


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


@pytest.mark.slow
@pytest.mark.usefixtures("plain_pictures")
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


N = 200


def noise(**columns):
    rng = np.random.default_rng(0)
    made = {"a": rng.normal(size=N), "b": rng.uniform(size=N), "y": rng.normal(size=N)}
    return pandas.DataFrame(made | {name: make(rng) for name, make in columns.items()})


@pytest.fixture
def notes(tmp_path):
    """What is said of a table beside the number of its rows."""

    def read(whole):
        path = tmp_path / "table.csv"
        whole.to_csv(path, index=False)
        return read_table_data(TableOptions(path, "y", 4000), tests=True).notes[1:]

    return read


def test_nothing_is_said_of_ordinary_values(notes):
    assert notes(noise()) == ()
    heavy = noise(y=lambda rng: rng.standard_t(4, N), c=lambda rng: rng.integers(0, 9, N))
    assert notes(heavy) == ()
    assert notes(noise().sort_values("y")) == ()
    assert notes(noise(w=lambda rng: rng.choice(["left", "right"], N))) == ()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"a": lambda rng: np.where(rng.random(N) < 0.1, -999.0, rng.uniform(0, 40, N))},
         r"Column 'a': \d+ values are -999, taken for missing; all others lie from "),
        ({"a": lambda rng: np.where(np.arange(N) == 9, 1e6, rng.uniform(0, 40, N))},
         r"Column 'a': 1 value is moved to the nearest of the others, 1e\+06 the farthest"),
        ({"c": lambda rng: 7.0}, r"Columns left out: 'c' \(the same value in all rows\)"),
        ({"y": lambda rng: rng.integers(0, 2, N)},
         r"'y' has 2 classes, so .* '0' .*, '1' .*--task regression"),
        ({"y": lambda rng: rng.normal(size=N) + 500.0 * (np.arange(N) == 9)},
         r"1 of 160 targets are far .*more than 10 robust .* farthest is 5\d\d"),
    ],
)  # fmt: skip
def test_each_check(notes, columns, said):
    *filled, note = notes(noise(**columns))
    assert re.search(said, note)
    assert [note[:25] for note in filled] == ["Missing values are filled"] * ("-999" in said)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_pictures")
def test_copies_of_rows_are_left_out_and_said(gpclml, tmp_path):
    whole = noise(name=lambda rng: [f"person {i}" for i in range(N)])
    copied = pandas.concat([whole] * 3).sample(frac=1, random_state=0)
    records = []
    for name, rows in ("once", whole.loc[copied.index.drop_duplicates()]), ("often", copied):
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
        result = gpclml(
            "compare", tmp_path / f"{name}.csv", "--target", "y", "--models", "linear",
            "--out", tmp_path / name,
        )  # fmt: skip
        records.append(json.loads((tmp_path / name / "report.json").read_text()))
    assert f"often.csv has {N * 3} rows." in result.stderr
    assert f"Left out: {N * 2} rows that repeat another in all inputs" in result.stderr
    assert records[0]["models"] == records[1]["models"]
    assert records[0]["others"] == records[1]["others"]


def table_of(n=40, **columns):
    rng = np.random.default_rng(0)
    return pandas.DataFrame({"y": rng.standard_normal(n), "x": rng.standard_normal(n), **columns})


def without(values, rows):
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
        town=without(["a", "b", "c", "d"] * (n // 4), [7]),
        gaps=without(np.arange(n) ** 0.5, range(0, n, 5)),
        few=without(np.arange(n) ** 1.5, [3]),
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
        nearly=without(["a"] * n, [4]),
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
    # Missing values make numbers decimal, and categories are whole all the same.
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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    x = rng.random((40, 2))
    price = 3 + np.sin(5 * x[:, 0]) + 0.1 * rng.standard_normal(40)
    return pandas.DataFrame({"size": x[:, 0], "age": x[:, 1], "price": price})


@pytest.mark.slow
def test_predictions_scale_with_target_and_columns(table, gpclml, tmp_path):
    def predictions(power):
        data, new, out = (tmp_path / f"{name}.csv" for name in ("train", "new", "out"))
        scaled = table * 10.0 ** np.array([-power, -power, power])
        scaled.head(30).to_csv(data, index=False)
        scaled.tail(10).to_csv(new, index=False)
        model = tmp_path / f"model {power}"
        result = gpclml("fit", data, "--target", "price", "--model", "rbf", "--out", model)
        assert result.exit_code == 0, result.output
        assert gpclml("predict", model, new, "--out", out, "--quiet").exit_code == 0
        return pandas.read_csv(out) / 10.0**power

    expected = predictions(0)
    for power in (-12, -6, 12):
        np.testing.assert_allclose(predictions(power), expected, rtol=1e-6)
