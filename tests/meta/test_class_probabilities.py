"""Probabilities of classes against their definition, and the temperature of tasks."""

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
from gpclml.meta.evaluation import class_log_probabilities


def test_two_classes_are_the_probit_of_the_difference():
    mean = torch.tensor([[0.3, -2.0], [-0.4, 1.0]], dtype=torch.float64)  # (ways, q)
    scale = torch.tensor([[0.5, 1.0], [0.8, 0.2]], dtype=torch.float64)
    p = class_probabilities(Normal(mean, scale))
    difference = (mean[0] - mean[1]) / scale.square().sum(0).sqrt()
    expected = Normal(0.0, 1.0).cdf(difference)
    torch.testing.assert_close(p, torch.stack([expected, 1 - expected], -1), rtol=1e-6, atol=1e-9)


def finely(mean, scale):
    """Log probabilities ``(ways, q)`` by a sum over 20,000 points, from ten deviations below."""
    low, high = (mean - 10 * scale).amin(-2), mean.amax(-2) + 10 * scale.amax(-2)
    t = low + (high - low) * torch.linspace(0, 1, 20_000, dtype=mean.dtype)[:, None, None]
    normal = Normal(mean, scale)
    below = torch.special.log_ndtr((t - mean) / scale)
    terms = below.sum(-2, keepdim=True) - below + normal.log_prob(t)
    return torch.log_softmax(terms.logsumexp(0), -2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "spread", "scales"),
    [
        (20, 0.3, (0.2, 0.4)), (5, 0.5, (0.03, 0.03)), (5, 1.0, (0.04, 1.0)),
        (20, 0.0, (1.0, 1.0)), (3, 5.0, (0.1, 0.2)),
    ],
)  # fmt: skip
def test_logarithms_are_exact_for_improbable_classes_too(ways, spread, scales):
    generator = torch.Generator().manual_seed(1)
    least, most = scales
    mean = spread * torch.randn(ways, 30, generator=generator, dtype=torch.float64)
    scale = torch.rand(ways, 30, generator=generator, dtype=torch.float64)
    scale = least * (most / least) ** scale
    mean[0, 0] = -4.0  # below all others
    expected = finely(mean.unsqueeze(0), scale.unsqueeze(0)).squeeze(0).mT
    log_p = class_log_probabilities(Normal(mean, scale))
    torch.testing.assert_close(log_p, expected, rtol=1e-7, atol=5e-6)
    log_p = class_log_probabilities(Normal(mean.float(), scale.float()))
    torch.testing.assert_close(log_p.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_batch_is_a_stack_of_singles(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64)
    scale = 0.1 + torch.rand(5, 3, 4, generator=generator, dtype=torch.float64)
    singles = torch.stack(
        [class_probabilities(Normal(*moments)) for moments in zip(mean, scale, strict=True)]
    )
    assert torch.equal(class_probabilities(Normal(mean, scale)), singles)
    monkeypatch.setattr("gpclml.meta.evaluation._SUM_AT_ONCE", 1_000)
    assert torch.equal(class_probabilities(Normal(mean, scale)), singles)


def test_deviations_far_below_the_range_are_raised():
    mean = torch.tensor([0.0, 1.0, 1.0]).unsqueeze(-1)
    p = class_probabilities(Normal(mean, torch.tensor([2.0, 1e-9, 1e-9]).unsqueeze(-1)))
    above = float(Normal(0.0, 2.0).cdf(torch.tensor(1.0)))
    expected = torch.tensor([[1 - above, above / 2, above / 2]])
    torch.testing.assert_close(p, expected, rtol=1e-2, atol=1e-2)


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
        evaluate_tasks(model, tasks, 30, temperature=divisor) for divisor in (1.0, temperature)
    )
    assert tempered.nll.mean() < plain.nll.mean()
    assert torch.equal(tempered.values, plain.values)
    divided = torch.log_softmax(log_p / temperature, -1)
    expected = -divided.gather(-1, labels.unsqueeze(-1)).mean((-2, -1))
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
