"""The comparison of Laplace posteriors on digits, one small network."""

import pandas
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.evidence.posteriors import compare_posteriors, main, summary


@pytest.mark.slow
def test_predictions_by_validation_are_those_of_the_network_or_better():
    scores = dict(compare_posteriors("digits", 4, 0.375, epochs=12, seed=0, members=2))
    assert scores["ensemble of 2"]["accuracy"] > 0.7
    alone = scores["the network alone"]
    assert alone["accuracy"] > 0.85
    assert 0 < scores["last weights, spread both"]["expected error"] < 0.1
    for weights in ("last", "all"):
        calibrated, without = (
            scores[f"{weights} weights, {how}"] for how in ("spread both", "without validation")
        )
        assert calibrated["log loss"] < alone["log loss"] + 0.01
        assert without["log loss"] < alone["log loss"] + 0.02
        assert calibrated["accuracy"] > alone["accuracy"] - 0.005
        assert calibrated["calibration error"] < alone["calibration error"] + 0.01
        assert calibrated["AUROC, classes 8, 9"] > 0.7


@pytest.mark.slow
def test_rows_of_tables_and_their_differences(tmp_path):
    csv = tmp_path / "rows.csv"
    app = typer.Typer()
    app.command()(main)
    line = ["--data", "wine", "--seeds", "2", "--epochs", "20", "--members", "2", "--csv", str(csv)]
    answer = CliRunner().invoke(app, line)
    assert answer.exit_code == 0, answer.output
    rows = pandas.read_csv(csv, comment="#")
    assert set(rows["seed"]) == {0, 1}
    told = summary(rows)["log loss"]["wine"]
    pairs = rows.pivot(index="seed", columns="predictions", values="log loss")
    differences = pairs["temperature"] - pairs["the network alone"]
    assert told["the network alone"].startswith(f"{pairs['the network alone'].mean():.3f} ±")
    assert told["temperature"] == f"{differences.mean():+.3f} ± {differences.sem():.3f}"
    assert float(told["last weights, spread both"].split()[0]) < 0.05
    again = CliRunner().invoke(app, ["--rows", str(csv)])
    assert again.output.startswith("# Laplace posteriors")
    assert (
        again.output[again.output.index("| data") :].strip()
        == answer.output[answer.output.index("| data") :].strip()
    )
