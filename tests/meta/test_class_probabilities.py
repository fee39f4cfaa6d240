from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal

from gpclml.errors import ArgumentError
from gpclml.evaluation import fit_temperature
from gpclml.kernels.networks import MLP
from gpclml.meta import (
    DeepKernelTransfer,
    ImageTasks,
    PeriodicTasks,
    class_probabilities,
    evaluate_tasks,
    fit_task_temperature,
)


def test_two_classes_are_the_probit_of_the_difference():
    mean = torch.tensor([[0.3, -2.0], [-0.4, 1.0]], dtype=torch.float64)  # (ways, q)
    scale = torch.tensor([[0.5, 1.0], [0.8, 0.2]], dtype=torch.float64)
    p = class_probabilities(Normal(mean, scale))
    difference = (mean[0] - mean[1]) / scale.square().sum(0).sqrt()
    expected = Normal(0.0, 1.0).cdf(difference)
    torch.testing.assert_close(p, torch.stack([expected, 1 - expected], -1), rtol=1e-4, atol=1e-4)


def test_many_classes_are_as_by_sampling():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    scale = 0.3 + torch.rand(2, 5, 3, generator=generator, dtype=torch.float64)
    p = class_probabilities(Normal(mean, scale))
    assert p.shape == (2, 3, 5)
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    draws = 40_000
    noise = torch.randn(draws, 2, 5, 3, generator=generator, dtype=torch.float64)
    winners = (mean + scale * noise).argmax(-2)
    shares = torch.nn.functional.one_hot(winners, 5).double().mean(0)
    assert float((p - shares).abs().max()) < 5 * 0.5 / draws**0.5


def test_many_tasks_are_computed_part_by_part(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64)
    predictive = Normal(mean, 0.3 + torch.rand(5, 3, 4, generator=generator, dtype=torch.float64))
    expected = class_probabilities(predictive)
    monkeypatch.setattr("gpclml.meta.evaluation._MOST_AT_ONCE", 4 * 3**2 * 48 * 2)
    torch.testing.assert_close(class_probabilities(predictive), expected)
    one = Normal(predictive.mean[0], predictive.stddev[0])
    torch.testing.assert_close(class_probabilities(one), expected[0])


def test_sure_classes_and_equal_ones():
    mean = torch.tensor([30.0, -30.0, -30.0]).unsqueeze(-1)
    p = class_probabilities(Normal(mean, torch.ones(3, 1)))
    torch.testing.assert_close(p, torch.tensor([[1.0, 0.0, 0.0]]))
    equal = class_probabilities(Normal(torch.zeros(4, 1), torch.ones(4, 1)))
    torch.testing.assert_close(equal, torch.full((1, 4), 0.25))


def untrained():
    """A model that is too sure or not sure enough, and tasks of two pictures and noise."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand(8, 1, 1, 2, 2, generator=generator)
    images = pictures + 0.3 * torch.rand(8, 12, 1, 2, 2, generator=generator)
    labels = torch.arange(8).repeat_interleave(12)
    network = torch.nn.Sequential(torch.nn.Flatten(), MLP([4, 8, 6], generator=generator))
    tasks = ImageTasks(images.flatten(0, 1), labels, ways=4, shots=1, queries=5)
    return DeepKernelTransfer(network, "rbf", 6), tasks


def test_the_temperature_of_tasks_makes_their_classes_most_probable():
    model, tasks = untrained()
    temperature = fit_task_temperature(model, tasks, 30)
    log_p = class_probabilities(model.predict(tasks.draw(range(30)))).log()
    labels = tasks.draw(range(30)).query_y
    assert temperature == pytest.approx(
        fit_temperature(log_p.flatten(0, 1), labels.flatten()), rel=1e-3
    )
    plain, tempered = (
        evaluate_tasks(model, tasks, 30, temperature=one) for one in (1.0, temperature)
    )
    assert tempered.nll.mean() < plain.nll.mean()
    assert torch.equal(tempered.values, plain.values)
    by_hand = torch.log_softmax(log_p / temperature, -1)
    expected = -by_hand.gather(-1, labels.unsqueeze(-1)).mean((-2, -1))
    torch.testing.assert_close(tempered.nll, expected, rtol=1e-3, atol=1e-4)


def test_bad_temperatures():
    model, tasks = untrained()
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match="temperature"):
            evaluate_tasks(model, tasks, 2, temperature=bad)
    functions = DeepKernelTransfer(MLP([1, 2]), "rbf", 2)
    with pytest.raises(ArgumentError, match=r"temperature: got 2\.0, expected 1 for regression"):
        evaluate_tasks(functions, PeriodicTasks(3, 4), 2, temperature=2.0)
    with pytest.raises(ArgumentError, match="tasks: got regression tasks"):
        fit_task_temperature(functions, PeriodicTasks(3, 4), 2)
    with pytest.raises(ArgumentError, match="count"):
        fit_task_temperature(model, tasks, 0)
