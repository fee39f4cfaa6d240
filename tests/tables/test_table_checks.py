"""Sentences on values of a table that a user may want to look at."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy
import pandas
import pytest
import torch

from gpclml.tables.data import data_notes, repeated_rows
from gpclml.tables.encoding import fit_encoding

N = 200


def table(**columns):
    rng = numpy.random.default_rng(0)
    made = {"a": rng.normal(size=N), "b": rng.uniform(size=N), "y": rng.normal(size=N)}
    return pandas.DataFrame(made | {name: make(rng) for name, make in columns.items()})


def notes(whole, test=slice(160, None)):
    training, tested = whole.iloc[:160], whole.iloc[test]
    encoding = fit_encoding(training, "y")
    targets = torch.as_tensor(whole["y"].to_numpy(float, copy=True))
    train = encoding.tensors(training)
    return data_notes(encoding, train, repeated_rows(train, encoding.tensors(tested)), targets)


def test_nothing_is_said_of_ordinary_values():
    assert notes(table()) == []
    heavy = table(y=lambda rng: rng.standard_t(4, N), c=lambda rng: rng.integers(0, 9, N))
    assert notes(heavy) == []
    assert notes(table().sort_values("y")) == []
    assert notes(table(), test=slice(0, 0)) == []
    assert notes(table(w=lambda rng: rng.choice(["left", "right"], N))) == []


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
def test_each_check(columns, said):
    found = notes(table(**columns))
    assert len(found) == 1
    assert re.search(said, found[0])


def test_test_rows_that_repeat_training_rows():
    whole = table()
    whole.iloc[160:167] = whole.iloc[3:10].to_numpy()
    (said,) = notes(whole)
    assert said.startswith("7 of 40 test rows are equal to a training row")


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
    script = subprocess.run(
        [sys.executable, tmp_path / "often" / "model.py"], capture_output=True, text=True
    )
    assert f"test_rmse {records[1]['models']['linear']['test_rmse']:.6g}" in script.stdout
