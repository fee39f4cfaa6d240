from __future__ import annotations

import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evidence.training_speed import SumOfTrainingLosses, training_speed
from gpclml.models import BayesianLinearModel

losses = st.floats(-1e3, 1e3)
epochs = st.lists(
    st.lists(st.tuples(losses, st.integers(1, 9)), min_size=1, max_size=5), min_size=1, max_size=4
)


def run(epochs, speed=None):
    speed = SumOfTrainingLosses() if speed is None else speed
    for batches in epochs:
        for loss, points in batches:
            speed.update(loss, points)
        speed.end_epoch()
    return speed


@given(epochs)
def test_sums_are_plain_sums(epochs):
    speed = run(epochs)
    batches = [batch for epoch in epochs for batch in epoch]
    assert speed.steps == len(batches)
    assert speed.epochs == len(epochs)
    close = {"rel": 1e-12, "abs": 1e-9}
    assert speed.sum() == pytest.approx(sum(loss for loss, _ in batches), **close)
    assert speed.total() == pytest.approx(sum(loss * b for loss, b in batches), **close)
    means = [sum(loss * b for loss, b in one) / sum(b for _, b in one) for one in epochs]
    assert speed.epoch_means() == pytest.approx(means, **close)


@given(epochs, st.integers(0, 20))
def test_a_resumed_run_is_the_uninterrupted_one(epochs, stop):
    whole = run(epochs)
    speed = SumOfTrainingLosses()
    step = 0
    for batches in epochs:
        for loss, points in batches:
            if step == stop:
                file = io.BytesIO()
                torch.save(speed.state_dict(), file)
                file.seek(0)
                speed = SumOfTrainingLosses()
                speed.load_state_dict(torch.load(file, weights_only=True))
            speed.update(loss, points)
            step += 1
        speed.end_epoch()
    assert speed.state_dict() == whole.state_dict()
    assert speed.epoch_means() == whole.epoch_means()


def test_tensors_of_any_device_count_as_numbers(device):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, generator=generator)
    numbers = run([[(float(v), 3) for v in values[:4]], [(float(v), 2) for v in values[4:]]])
    weight = torch.ones((), device=device, requires_grad=True)
    speed = SumOfTrainingLosses()
    loss = torch.zeros((1,), device=device)  # written again at each step
    for i, value in enumerate(values):
        with torch.no_grad():
            loss.fill_(float(value))
        speed.update((loss * weight).reshape(()) if i % 2 else loss, 3 if i < 4 else 2)
        assert speed.steps == i + 1
        if i in (3, 5):
            speed.end_epoch()
    assert speed.state_dict() == numbers.state_dict()


def test_a_loss_that_is_not_finite_is_named_by_its_step(device):
    speed = SumOfTrainingLosses()
    speed.update(torch.tensor(1.0, device=device), 2)
    speed.end_epoch()
    speed.update(torch.tensor(2.0, device=device), 2)
    speed.update(torch.tensor(math.nan, device=device), 2)
    speed.update(torch.tensor(3.0, device=device), 2)
    questions = (speed.sum, speed.total, speed.end_epoch, speed.state_dict)
    for ask in questions:  # every one raises
        with pytest.raises(NonFiniteError, match=r"loss: got nan at step 3 \(epoch 2\)"):
            ask()
    with pytest.raises(NonFiniteError, match="loss: got inf at step 1"):
        SumOfTrainingLosses().update(math.inf, 1)


def test_bad_arguments_are_named():
    speed = SumOfTrainingLosses()
    with pytest.raises(ShapeError, match=r"loss: got \(3,\), expected one number.*loss.mean"):
        speed.update(torch.ones(3), 3)
    for points in (0, 2.5):
        with pytest.raises(ArgumentError, match=f"num_points: got {points}"):
            speed.update(1.0, points)
    with pytest.raises(ArgumentError, match="epoch: got no batches"):
        speed.end_epoch()
    with pytest.raises(ArgumentError, match=r"state: got \['steps'\], expected the entries"):
        speed.load_state_dict({"steps": 3})


def test_the_total_over_one_pass_is_the_bound_of_training_speed():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    y = x.sum(-1) + 0.3 * torch.randn(9, generator=generator, dtype=torch.float64)
    noise, prior = 0.2, 1.0
    speed = SumOfTrainingLosses()
    for i in range(9):
        precision = x[:i].mT @ x[:i] / noise + torch.eye(2, dtype=torch.float64) / prior
        mean = torch.linalg.solve(precision, x[:i].mT @ y[:i] / noise)
        variance = x[i] @ torch.linalg.solve(precision, x[i])
        squared = (y[i] - mean @ x[i]) ** 2 + variance  # in expectation over draws
        speed.update(0.5 * (math.log(2 * math.pi * noise) + squared / noise), 1)
    model = BayesianLinearModel(x, y, prior_variance=prior, noise=noise)
    order = torch.arange(9).unsqueeze(0)
    exact = training_speed(model, 2, orderings=order, repeats=1).expected.value
    assert -speed.total() == pytest.approx(exact, rel=1e-10)
