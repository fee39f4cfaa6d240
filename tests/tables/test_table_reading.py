"""Tables are read from files; files that hold no table are refused with a message."""

import gzip
import re
import sys

import numpy as np
import pandas
import pytest

from gpclml.errors import ArgumentError, DataError
from gpclml.tables.encoding import kind_of, numbers_of
from gpclml.tables.reading import read_table


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


def test_rows_keep_all_digits_of_their_numbers(write):
    numbers = np.random.default_rng(0).standard_normal(50)
    path = write(pandas.DataFrame({"a": numbers}).to_csv(index=False))
    np.testing.assert_array_equal(read_table(path)["a"], numbers)


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


BAD = {
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


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_table(write, name):
    content, message = BAD[name]
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
