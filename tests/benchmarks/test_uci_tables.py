"""Sign tests, counts of wins and the further tables, on differences with known values."""

import pandas
import pytest

from benchmarks._tables import table
from benchmarks.uci.tables import (
    difference_table,
    less_lml,
    mean_table,
    published_table,
    seconds_table,
    sign_test,
    turning_table,
    verdicts,
)


def cells(values, **more):
    """A cell for each (dataset, n, objective, list of RMSE by seed)."""
    rows = [
        {
            "dataset": name, "n": n, "seed": seed, "objective": objective,
            "kernel": "deep-bottleneck", "mean": "constant", "steps": 300, "rmse": value,
            "held_out": None if objective == "lml" else 0.1, "objective_label": objective,
            "kernel_label": "deep-bottleneck", "train_seconds": 1.0 + seed, **more,
        }
        for name, n, objective, errors in values
        for seed, value in enumerate(errors)
    ]  # fmt: skip
    return pandas.DataFrame(rows)


def test_sign_test():
    assert sign_test([-1.0] * 6) == (6, 6, pytest.approx(2 / 64))
    assert sign_test([-1.0] * 5 + [2.0, 0.0]) == (5, 6, pytest.approx(2 * 7 / 64))
    assert sign_test([0.0]) == (0, 0, 1.0)


def test_verdicts_are_beyond_two_standard_errors():
    differences = pandas.DataFrame(
        {"mean": [-0.21, -0.19, 0.21, 0.0, -1.0], "se": [0.1, 0.1, 0.1, 0.0, float("nan")]}
    )
    assert verdicts(differences).tolist() == ["win", "tie", "loss", "tie", "tie"]


def test_what_differences_say_over_data_sets():
    done = cells(
        [
            ("boston", 100, "lml", [1.0, 1.0]), ("boston", 100, "clml", [0.8, 0.9]),
            ("energy", 100, "lml", [1.0, 1.0]), ("energy", 100, "clml", [1.2, 1.3]),
            ("yacht", 100, "lml", [1.0, 1.0]), ("yacht", 100, "clml", [0.5, 1.4]),
            ("yacht", 200, "lml", [1.0, 1.0]), ("yacht", 200, "clml", [0.5, 0.5]),
        ]
    )  # fmt: skip
    shown = difference_table(less_lml(done, "rmse"), "rmse")
    row = shown.loc[(100, "deep-bottleneck", "clml")]
    assert row["boston"] == "**-0.150 ± 0.050**"
    assert row["yacht"] == "-0.050 ± 0.450"
    assert row["below 0 (p)"] == "2 of 3 (1)"
    assert row["wins / losses / ties"] == "1 / 1 / 1"
    assert shown.loc[(200, "deep-bottleneck", "clml"), "boston"] == "-"
    assert list(difference_table(less_lml(done, "rmse"), "coverage_95")) == [
        "boston", "energy", "yacht",
    ]  # fmt: skip


def test_differences_within_rounding_are_none():
    done = cells(
        [
            ("boston", 100, "lml", [1.0, 1.0]), ("boston", 100, "clml", [1 + 2e-7, 1 + 1e-7]),
            ("energy", 100, "lml", [1.0, 1.0]), ("energy", 100, "clml", [1 + 2e-7, 0.5]),
        ]
    )  # fmt: skip
    row = difference_table(less_lml(done, "rmse"), "rmse").loc[(100, "deep-bottleneck", "clml")]
    assert row["boston"] == "0.000 ± 0.000"
    assert row["energy"] == "-0.250 ± 0.250"
    assert row["below 0 (p)"] == "1 of 1 (1)"
    assert row["wins / losses / ties"] == "0 / 0 / 2"


def test_where_the_order_turns():
    done = cells(
        [
            (name, n, objective, [error])
            for name, errors in {"boston": (0.8, 0.9, 1.1), "energy": (0.8, 0.8, 0.9)}.items()
            for n, clml in zip((100, 200, 300), errors, strict=True)
            for objective, error in (("lml", 1.0), ("clml", clml))
        ]
    )
    row = turning_table(done).loc[("deep-bottleneck", "clml")]
    assert row.to_dict() == {"boston": "300", "energy": "> 300"}
    assert turning_table(done[done["n"] == 100]).empty
    assert set(seconds_table(done)["boston"]) == {"1.00"}


def test_medians_beside_the_published_ones():
    done = cells(
        [
            ("boston", 100, "lml", [0.1, 0.5, 0.6]), ("boston", 100, "clml", [0.2, 0.3, 0.9]),
            ("boston", 101, "lml", [0.1]), ("boston", 101, "clml", [0.2]),
            ("energy", 100, "lml", [0.1]),
            ("yacht", 100, "lml", [0.1]), ("yacht", 100, "clml", [0.1]),
        ]
    )  # fmt: skip
    shown = published_table(done)
    assert shown.index.tolist() == [("boston", 100, "deep-bottleneck")]
    assert shown.iloc[0].tolist() == ["0.411", "0.334", "0.500", "0.300"]
    assert published_table(done.assign(held_out=0.5)).empty


def test_markdown_of_a_table():
    shown = mean_table(cells([("boston", 100, "lml", [0.5])]), "rmse")
    assert table(shown).splitlines() == [
        "| n | kernel | objective | boston |",
        "| --- | --- | --- | ---: |",
        "| 100 | deep-bottleneck | lml | 0.500 |",
    ]
    assert "a\\|b" in table(shown.rename(columns={"boston": "a|b"}))
