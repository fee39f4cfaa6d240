"""Sentences on values of a table that a user may want to look at."""

from __future__ import annotations

import json
import re

import numpy
import pandas
import pytest

from gpclml.tables.data import read_table_data
from gpclml.tables.recipes import TableOptions

N = 200


def table(**columns):
    rng = numpy.random.default_rng(0)
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
    assert notes(table()) == ()
    heavy = table(y=lambda rng: rng.standard_t(4, N), c=lambda rng: rng.integers(0, 9, N))
    assert notes(heavy) == ()
    assert notes(table().sort_values("y")) == ()
    assert notes(table(w=lambda rng: rng.choice(["left", "right"], N))) == ()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"a": lambda rng: numpy.where(rng.random(N) < 0.1, -999.0, rng.uniform(0, 40, N))},
         r"Column 'a': \d+ values are -999, taken for missing; all others lie from "),
        ({"a": lambda rng: numpy.where(numpy.arange(N) == 9, 1e6, rng.uniform(0, 40, N))},
         r"Column 'a': 1 value is moved to the nearest of the others, 1e\+06 the farthest"),
        ({"c": lambda rng: 32 + 1.8 * table()["a"]}, r"Columns 'a' and 'c' carry the same.*'c'"),
        ({"c": lambda rng: 7.0}, r"Columns left out: 'c' \(the same value in all rows\)"),
        ({"y": lambda rng: rng.integers(0, 2, N)}, r"two values only, 0 and 1.*classifier"),
        ({"y": lambda rng: rng.poisson(3, N)},
         r"whole numbers only, \d+ different.*near zero, below it"),
        ({"y": lambda rng: rng.integers(-4, 4, N)}, r"whole numbers only.*end between them\."),
        ({"y": lambda rng: rng.normal(size=N).clip(-9, 1.2)}, r"bounded: .* 1\.2 \(\d+ rows\)"),
        ({"y": lambda rng: rng.normal(size=N) + 500.0 * (numpy.arange(N) == 9)},
         r"1 of 160 targets are far .*more than 10 robust .* farthest is 5\d\d"),
        ({"y": lambda rng: rng.normal(size=N).cumsum()}, r"Neighbouring rows .*\(correlation 0\.9"),
    ],
)  # fmt: skip
def test_each_check(notes, columns, said):
    *filled, found = notes(table(**columns))
    assert re.search(said, found)
    assert [note[:25] for note in filled] == ["Missing values are filled"] * ("-999" in said)


def test_a_comparison_gives_the_scores_of_new_rows_too(gpclml, tmp_path):
    kinds = {name: lambda rng: rng.integers(0, 6, N) for name in "ab"}
    whole = table(y=lambda rng: rng.poisson(3, N), **kinds)  # equal by chance
    whole.to_csv(tmp_path / "twice.csv", index=False)
    result = gpclml(
        "compare", tmp_path / "twice.csv", "--target", "y", "--models", "rbf",
        "--out", tmp_path / "out", "--steps", "3",
    )  # fmt: skip
    assert "test rows are equal to a training row" in result.stderr
    record = json.loads((tmp_path / "out" / "report.json").read_text())
    (said,) = [note for note in record["notes"] if "repeat no training row" in note]
    assert said in result.stderr
    new = float(re.search(r"is: rbf ([\d.]+)", said)[1])
    assert new != pytest.approx(record["models"]["rbf"]["test_rmse"], rel=1e-3)


@pytest.mark.parametrize("times", [2, 5])
def test_copies_of_rows_are_left_out_and_said(gpclml, tmp_path, times):
    whole = table(name=lambda rng: [f"person {i}" for i in range(N)])
    copied = pandas.concat([whole] * times).sample(frac=1, random_state=0)
    records = []
    for name, rows in ("once", whole.loc[copied.index.drop_duplicates()]), ("often", copied):
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
        result = gpclml(
            "compare", tmp_path / f"{name}.csv", "--target", "y", "--models", "linear",
            "--out", tmp_path / name,
        )  # fmt: skip
        records.append(json.loads((tmp_path / name / "report.json").read_text()))
    assert f"often.csv has {N * times} rows." in result.stderr
    assert f"Left out: {N * (times - 1)} rows that repeat another in all inputs" in result.stderr
    assert records[0]["models"] == records[1]["models"]
    assert records[0]["others"] == records[1]["others"]
