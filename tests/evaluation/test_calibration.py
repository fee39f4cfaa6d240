"""Calibration error and temperature."""

import math

import pytest
import torch

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evaluation import expected_calibration_error, fit_temperature


def logits_and_labels(temperature, count=20_000, classes=5):
    """Logits, and labels drawn with them divided by a temperature."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    probabilities = (logits / temperature).softmax(-1)
    return logits, torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_temperature_of_labels_that_were_drawn_with_it(temperature):
    """Many labels outweigh the prior."""
    logits, labels = logits_and_labels(temperature)
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
    noise = torch.randn(count, 10, generator=generator)
    logits = 6 * torch.nn.functional.one_hot(labels, 10) + noise
    assert (logits.argmax(-1) == labels).all()
    assert 0.3 < fit_temperature(logits, labels) < 1


def test_calibration_error():
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.35, 0.65], [0.35, 0.65]])
    labels = torch.tensor([0, 1, 1, 1])
    # Bin of .9: accuracy .5, gap .4; bin of .65: accuracy 1, gap .35; halves of the points.
    assert expected_calibration_error(p, labels) == pytest.approx(0.375, abs=1e-6)
    assert expected_calibration_error(torch.eye(3), torch.arange(3)) == 0
    logits, labels = logits_and_labels(1.0)
    assert expected_calibration_error(logits.softmax(-1), labels) < 0.015
    assert expected_calibration_error((3 * logits).softmax(-1), labels) > 0.1


PROBABILITIES = torch.tensor([[0.2, 0.3, 0.5]] * 6)
LABELS = torch.arange(6) % 3
BAD = PROBABILITIES.clone()
BAD[2, 1] = torch.nan


@pytest.mark.parametrize(
    ("outputs", "labels", "error", "match"),
    [
        (PROBABILITIES, LABELS[:5], ShapeError, "labels: got"),
        (PROBABILITIES[:0], LABELS[:0], ArgumentError, "size zero"),
        (BAD, LABELS, NonFiniteError, "(outputs|probabilities): got 1 of "),
        (PROBABILITIES, LABELS + 1, ArgumentError, r"labels: got classes from .* 0 to 2"),
        (PROBABILITIES, LABELS - 1, ArgumentError, "labels: got classes from"),
    ],
)
def test_bad_arguments(outputs, labels, error, match):
    for function in (expected_calibration_error, fit_temperature):
        with pytest.raises(error, match=match):
            function(outputs, labels)
    with pytest.raises(ArgumentError, match="bins"):
        expected_calibration_error(PROBABILITIES, LABELS, bins=0)
