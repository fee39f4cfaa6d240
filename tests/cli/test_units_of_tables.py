"""What the commands predict does not depend on the units of target and columns."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pandas
import pytest

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
        coverage = re.search(r"(\d+)\W%\W+in the 90", result.stderr)
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
