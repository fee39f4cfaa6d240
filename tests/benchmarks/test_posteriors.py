"""The comparison of Laplace posteriors on digits, one small network."""

from __future__ import annotations

from benchmarks.evidence.posteriors import compare_posteriors


def test_predictions_by_validation_are_those_of_the_network_or_better():
    found = dict(compare_posteriors(width=4, images=300, epochs=12, seed=0))
    alone = found["the network alone"]
    assert alone["accuracy"] > 0.85
    for weights in ("last", "all"):
        calibrated, raw = (
            found[f"{weights} weights, by {by}"] for by in ("validation", "evidence")
        )
        assert calibrated["log loss"] < alone["log loss"] + 0.01 < raw["log loss"]
        assert calibrated["accuracy"] > alone["accuracy"] - 0.005
        assert calibrated["calibration error"] < alone["calibration error"] + 0.01
        assert calibrated["AUROC of classes 8, 9"] > 0.7
