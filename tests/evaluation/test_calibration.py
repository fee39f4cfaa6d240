"""Calibration error, temperature and the detection of foreign points."""

from __future__ import annotations

import math

import pytest
import torch

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evaluation.calibration import (
    expected_calibration_error,
    fit_temperature,
    out_of_distribution_auroc,
)


def drawn_labels(logits, generator):
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_temperature_of_labels_that_were_drawn_with_it(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20_000, 5, generator=generator, dtype=torch.float64)
    labels = drawn_labels(logits / temperature, generator)
    assert fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.05)


def test_the_temperature_of_an_average_is_the_most_probable():
    generator = torch.Generator().manual_seed(1)
    outputs = 2 * torch.randn(4, 300, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (300,), generator=generator)

    def log_joint(temperature):
        probabilities = (outputs / temperature).softmax(-1).mean(0)
        prior = -0.5 * (math.log(temperature) / 0.5) ** 2
        return float(probabilities[torch.arange(300), labels].log().sum()) + prior

    best = fit_temperature(outputs, labels)
    for other in (0.9 * best, 1.1 * best, 1.0):
        assert log_joint(best) > log_joint(other)


@pytest.mark.parametrize("count", [1, 150])
def test_the_temperature_of_points_that_are_all_right_stays_moderate(count):
    """The likelihood of such points alone grows without end as the temperature falls to zero."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(10, (count,), generator=generator)
    logits = 6 * torch.nn.functional.one_hot(labels, 10) + torch.randn(
        count, 10, generator=generator
    )
    assert (logits.argmax(-1) == labels).all()
    assert 0.3 < fit_temperature(logits, labels) < 1


def test_many_labels_outweigh_the_prior_of_the_temperature():
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(5_000, 4, generator=generator, dtype=torch.float64)
    labels = drawn_labels(logits / 8, generator)
    assert fit_temperature(logits, labels) == pytest.approx(8, rel=0.1)


def test_the_auroc_counts_pairs():
    inside = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    outside = torch.tensor([[0.5, 0.5], [0.35, 0.65]])
    # Confidences .9, .6, .7 against .5, .65: five of six pairs are in order.
    assert out_of_distribution_auroc(inside, outside) == pytest.approx(5 / 6)
    assert out_of_distribution_auroc(inside, inside) == pytest.approx(0.5)


def test_calibration_error():
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.35, 0.65], [0.35, 0.65]])
    labels = torch.tensor([0, 1, 1, 1])
    # Bin of .9: accuracy .5, gap .4; bin of .65: accuracy 1, gap .35; halves of the points.
    assert expected_calibration_error(p, labels) == pytest.approx(0.375, abs=1e-6)
    sure = torch.eye(3)
    assert expected_calibration_error(sure, torch.arange(3)) == 0


def test_calibrated_predictions_have_a_small_error():
    generator = torch.Generator().manual_seed(0)
    confidence = 0.5 + 0.5 * torch.rand(20_000, generator=generator)
    right = torch.rand(20_000, generator=generator) < confidence
    p = torch.stack([confidence, 1 - confidence], dim=-1)
    assert expected_calibration_error(p, (~right).long()) < 0.015
    assert expected_calibration_error(p, right.long()) > 0.4


def test_bad_arguments():
    with pytest.raises(ShapeError, match="labels"):
        expected_calibration_error(torch.ones(3, 2), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ArgumentError, match="bins"):
        expected_calibration_error(torch.ones(3, 2), torch.zeros(3, dtype=torch.long), bins=0)
    with pytest.raises(ArgumentError, match="size zero"):
        expected_calibration_error(torch.ones(0, 2), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ShapeError, match="labels: got"):
        fit_temperature(torch.zeros(3, 2), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ArgumentError, match="outputs: got"):
        fit_temperature(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ArgumentError, match="outside"):
        out_of_distribution_auroc(torch.ones(3, 2), torch.ones(0, 2))


def test_outputs_that_are_not_finite_and_labels_that_are_no_classes_are_refused():
    outputs, labels = torch.randn(6, 3), torch.arange(6) % 3
    for bad in (torch.nan, torch.inf):
        spoiled = outputs.clone()
        spoiled[2, 1] = bad
        with pytest.raises(NonFiniteError, match="outputs: got 1 of "):
            fit_temperature(spoiled, labels)
        with pytest.raises(NonFiniteError, match="probabilities: got 1"):
            expected_calibration_error(spoiled, labels)
        with pytest.raises(NonFiniteError, match="inside: got 1"):
            out_of_distribution_auroc(spoiled, outputs)
    for classes in (labels + 1, labels - 1):
        with pytest.raises(ArgumentError, match=r"labels: got classes from .* 0 to 2"):
            fit_temperature(outputs, classes)
        with pytest.raises(ArgumentError, match="labels: got classes from"):
            expected_calibration_error(outputs, classes)
