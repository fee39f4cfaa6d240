"""The comparison of Laplace posteriors on digits, one small network."""

from __future__ import annotations

from benchmarks.evidence.posteriors import compare_posteriors


def test_predictions_by_validation_are_those_of_the_network_or_better():
    scores = dict(compare_posteriors("digits", 4, 0.375, epochs=12, seed=0, members=2))
    assert scores["ensemble of 2"]["accuracy"] > 0.7
    alone = scores["the network alone"]
    assert alone["accuracy"] > 0.85
    assert 0 < scores["last weights, by validation"]["expected error"] < 0.1
    for weights in ("last", "all"):
        calibrated, without = (
            scores[f"{weights} weights, by {by}"] for by in ("validation", "evidence")
        )
        assert calibrated["log loss"] < alone["log loss"] + 0.01
        assert without["log loss"] < alone["log loss"] + 0.02
        assert calibrated["accuracy"] > alone["accuracy"] - 0.005
        assert calibrated["calibration error"] < alone["calibration error"] + 0.01
        assert calibrated["AUROC, classes 8, 9"] > 0.7
