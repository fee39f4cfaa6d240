"""Tables: read from files, refused, split, what is said of them, and how columns become inputs."""

import gzip
import json
import re
import shlex
import sys
from dataclasses import asdict

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpclml import Regressor
from gpclml.errors import ArgumentError, DataError, UnknownNameError
from gpclml.tables.data import TableOptions, read_table, read_table_data, read_times, split_rows
from gpclml.tables.encoding import InputEncoding, fit_inputs, kind_of, numbers_of


@pytest.fixture
def write(tmp_path):
    def write_bytes(content, name="data.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_bytes


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_found_and_quotes_are_respected(write, separator):
    text = f'a{separator}"b,;|\tc"{separator}d\n1{separator}x{separator}2.5\n'
    table = read_table(write(text))
    assert list(table.columns) == ["a", "b,;|\tc", "d"]
    assert table.iloc[0, 2] == 2.5


def test_thousands_money_and_percent_are_numbers(write):
    text = 'a,b,c,d,e\n"1,250","$2,000.50",5%,"1,2",x1\n-12,€3,,"3,4",2\n,-$1,7.5%,"5,6",3\n'
    table = read_table(write(text))
    assert table["a"].tolist()[:2] == [1250.0, -12.0]
    assert np.isnan(table["a"][2])
    assert table["b"].tolist() == [2000.5, 3.0, -1.0]
    assert table["c"].tolist()[::2] == [5.0, 7.5]
    assert table["d"].tolist() == ["1,2", "3,4", "5,6"]  # no thousands
    assert table["e"].tolist() == ["x1", "2", "3"]
    assert table.attrs["amounts"] == ["a", "b", "c"]


EUROPEAN = {
    "money": (
        "a;b\n396.441,84 €;5,5 %\n396,84 €;6 %\n1.000 €;-7,25 %\n",
        {"a": [396441.84, 396.84, 1000.0], "b": [5.5, 6.0, -7.25]},
    ),
    "thousands by another column": ("a;b\n1.234;7,4\n5.678;2\n", {"a": [1234.0, 5678.0]}),
    "decimals by another column": ("a;b\n1.234;7.4\n5.678;2\n", {"a": [1.234, 5.678]}),
    "thousands by their form": ("a;b\n950;x\n1.234;y\n12.500;z\n", {"a": [950, 1234, 12500]}),
    "decimals by their form": ("a;b\n1950;x\n1.234;y\n12.500;z\n", {"a": [1950, 1.234, 12.5]}),
    "english thousands": ("a;b\n950;x\n1,234;y\n12,500;z\n", {"a": [950, 1234, 12500]}),
    "millions": ("a;b\n1.234.567;x\n2.000;y\n", {"a": [1234567.0, 2000.0]}),
    "in quotes": ('a,b\n"396.441,84 €",1.234\n"5,5 €",x\n', {"a": [396441.84, 5.5]}),
    "tabs": ("a\tb\n1.234\t7,5\n5.678\t2\n", {"a": [1234.0, 5678.0], "b": [7.5, 2.0]}),
    "spaces": ("a;b\n1 234,50 €;x\n-3,25 €;y\n€ 12'345,5;z\n", {"a": [1234.5, -3.25, 12345.5]}),
    "each its own": ("a;b\n396,84 €;52.520008\n5,5 €;52.1\n", {"b": [52.520008, 52.1]}),
    "exponents": ("a;b\n1,5e3;x\n2,25;y\n", {"a": [1500.0, 2.25]}),
    "points": ("a;b\n.56;1.234\n7.4;9.876\n", {"a": [0.56, 7.4], "b": [1.234, 9.876]}),
    "beside commas in texts": ('a,b\n1.5,"c,d"\n2.5,e\n', {"a": [1.5, 2.5]}),
    "whole": ("a;b\n5 €;1\n6 €;2\n", {"a": [5.0, 6.0], "b": [1, 2]}),
}


@pytest.mark.parametrize("name", EUROPEAN)
def test_numbers_as_they_are_written_elsewhere(write, name):
    text, columns = EUROPEAN[name]
    table = read_table(write(text))
    assert {name: table[name].tolist() for name in columns} == columns


@pytest.mark.parametrize(
    "cells", ["1.234;1\n5.678;2\n", "1,234;1\n5,678;2\n", "7.000;x\n8.000;y\n"]
)
def test_where_thousands_and_decimals_cannot_be_told_the_user_is_asked(write, cells):
    path = write(f"a;b\n{cells}")
    with pytest.raises(DataError, match=r"column 'a' has .*, which may be thousands .*--decimal"):
        read_table(path)
    first = re.split("[;\n]", cells)[0]
    whole, decimals = first[0], first[2:]
    for mark in ".,":
        value = f"{whole}.{decimals}" if mark == first[1] else f"{whole}{decimals}"
        assert read_table(path, decimal=mark)["a"][0] == float(value)
    assert read_table(write("a,b\n1.234,1\n5.678,2\n"))["a"][0] == 1.234  # nobody asks


def test_new_rows_are_read_as_the_training_rows_were(gpclml, tmp_path):
    draws = np.random.default_rng(0)
    prices = draws.integers(1000, 9000, 40)
    rows = [f"{n:,}".replace(",", ".") + f";{n / 7:.2f}".replace(".", ",") for n in prices]
    (tmp_path / "rows.csv").write_text("a;y\n" + "\n".join(rows))
    words = "--target", "y", "--model", "linear", "--out", tmp_path / "model"
    assert gpclml("fit", tmp_path / "rows.csv", *words).exit_code == 0
    (tmp_path / "new.csv").write_text("a;c\n7.000;1\n")
    out = tmp_path / "out.csv"
    assert gpclml("predict", tmp_path / "model", tmp_path / "new.csv", "--out", out).exit_code == 0
    assert pandas.read_csv(out)["mean"][0] == pytest.approx(1000, rel=0.01)
    (tmp_path / "asked.csv").write_text("a;y\n" + "\n".join(f"{n / 1000:.3f};{n}" for n in prices))
    asked = gpclml("fit", tmp_path / "asked.csv", *words[:4], "--out", tmp_path / "other")
    assert asked.exit_code == 2
    assert "--decimal" in asked.stderr
    said = gpclml("fit", tmp_path / "asked.csv", *words, "--decimal", ".")
    assert said.exit_code == 0
    assert gpclml("fit", tmp_path / "asked.csv", *words, "--decimal", "x").exit_code == 2


def test_dates_with_points_have_the_day_first(write):
    table = read_table(write("day;time\n11.12.2024;3.1.2024 10:30\n1.2.2025;4.1.2024 00:00:30\n"))
    assert kind_of(table["day"]) == kind_of(table["time"]) == "date"
    days = (pandas.to_datetime(["2024-12-11", "2025-02-01"]) - pandas.Timestamp(0)).days
    assert numbers_of(table["day"], "date").tolist() == days.tolist()
    assert numbers_of(table["time"], "date")[0] % 1 == pytest.approx(10.5 / 24)
    with pytest.raises(ArgumentError, match=r"dates such as 2024-05-31 or 31\.05\.2024"):
        numbers_of(pandas.Series(["31.02.2024"]), "date")


def test_marks_names_spaces_and_compression(write):
    text = "\ufeff a , b ,\n1, ?,x\n2,3,y\n"
    for path in (write(text), write(gzip.compress(text.encode()), "data.csv.gz")):
        table = read_table(path, missing=["?"])
        assert list(table.columns) == ["a", "b", "column 3"]
        assert np.isnan(table["b"][0])
        assert table["b"][1] == 3


def test_parquet_keeps_kinds_and_missing_values(tmp_path):
    days = pandas.date_range("2024-01-01", periods=3)
    table = pandas.DataFrame(
        {"yes": [True, False, None], "day": days, "town": ["a", None, "b"], "whole": [1, 2, 3]}
    )
    table.convert_dtypes().to_parquet(tmp_path / "data.pq")
    table.to_csv(tmp_path / "data.csv", index=False)
    frames = [read_table(tmp_path / name) for name in ("data.pq", "data.csv")]
    for name in table.columns:
        kinds = {kind_of(frame[name]) for frame in frames}
        assert len(kinds) == 1, name
        missing = [frame[name].isna().tolist() for frame in frames]
        assert missing[0] == missing[1] == table[name].isna().tolist()


def test_parquet_without_its_package(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"data\.parquet.*pip install 'gpclml\[parquet\]'"):
        read_table(write(b"PAR1", "data.parquet"))


FILES = {
    "empty": (b" \n", "is empty"),
    "no rows": (b"a,b\n", "has column names and no rows"),
    "binary": (b"PK\x03\x04\0\0\xff", "not a text file"),
    "utf-16": ("a,b\n1,2\n".encode("utf-16"), "not a text file. Save the table as CSV, in UTF-8"),
    "json": (b'[{"a": 1}]', "HTML or JSON"),
    "latin": ("preis,größe\n1,2\n".encode("latin-1"), "UTF-8"),
    "no names": (b"1.0,2.0\n3.0,4.0\n", "has numbers, not column names"),
    "twice": (b"a,b,a\n1,2,3\n", "'a' is there 2 times (columns 1 and 3)"),
    "long row": (b"a,b\n1,2\n1,2,3\n", "line 3"),
    "long rows": (b"a,b\n1,2,3\n1,2,3\n", "more cells than the 2 column names"),
    "open quote": (b'a,b\n"1,2\n3,4\n', "not a table"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_table(write, name):
    content, message = FILES[name]
    path = write(content)
    with pytest.raises(DataError, match=re.escape(message)) as error:
        read_table(path)
    assert str(path) in str(error.value)


def test_files_that_are_not_there(tmp_path, write):
    write("a\n1\n", "prices.csv")
    with pytest.raises(DataError, match=r"Did you mean .*prices\.csv"):
        read_table(tmp_path / "price.csv")
    with pytest.raises(DataError, match=r"There is no file .*houses\.csv\. Check its name"):
        read_table(tmp_path / "houses.csv")
    with pytest.raises(DataError, match="is a folder"):
        read_table(tmp_path)
    with pytest.raises(DataError, match=r"no folder .*absent"):
        read_table(tmp_path / "absent" / "a.csv")


def test_damaged_files(write):
    zipped = bytearray(gzip.compress(b"a,b\n1,2\n" * 100))
    zipped[12:20] = b"\xff" * 8
    for content in (b"no gzip", gzip.compress(b"a,b\n1,2\n")[:-9], bytes(zipped)):
        with pytest.raises(DataError, match=r"data\.csv\.gz cannot be read.*Save it again"):
            read_table(write(content, "data.csv.gz"))
    for content in (b"", b"no parquet"):
        with pytest.raises(DataError, match=r"data\.parquet.*as Parquet: .*[^.]\. Write it again"):
            read_table(write(content, "data.parquet"))


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
