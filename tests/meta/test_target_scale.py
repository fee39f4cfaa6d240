"""Regression tasks in other units and with another zero: training and predictions are the same."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gpclml.conditioning import LastPoints
from gpclml.errors import NonFiniteError
from gpclml.kernels.networks import MLP
from gpclml.meta import (
    DeepKernelTransfer,
    Episodes,
    PeriodicTasks,
    evaluate_tasks,
    load_model,
    train_on_tasks,
)
from gpclml.meta.deep_kernel_transfer import TargetScale
from gpclml.mlls import ConditionalMarginalLogLikelihood


class Converted:
    """Sine waves whose targets are in other units."""

    def __init__(self, offset=0.0, scale=1.0, seed=0, dtype=torch.float64):
        self.source, self.dtype = PeriodicTasks(6, 8, seed=seed), dtype
        self.offset, self.scale = offset, scale

    def draw(self, indices):
        drawn = self.source.draw(indices)
        ys = (
            (self.offset + self.scale * y.double()).to(self.dtype)
            for y in (drawn.support_y, drawn.query_y)
        )
        return Episodes(drawn.support_x, next(ys), drawn.query_x, next(ys))


def transfer(kernel="rbf", dtype=torch.float32, **options):
    network = MLP([1, 12, 8], torch.nn.Tanh, generator=torch.Generator().manual_seed(0))
    return DeepKernelTransfer(network, kernel, 8, **options).to(dtype)


def objective(model, m):
    return ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=m))


def trained(tasks, m=6, kernel="rbf", dtype=torch.float32, **options):
    model = transfer(kernel, dtype)
    result = train_on_tasks(
        model, objective(model, m), tasks, steps=30, tasks_per_step=2, lr=0.01, progress=False,
        look_every=10, validation=tasks, validation_tasks=5, **options,
    )  # fmt: skip
    return model, result


UNITS = [(1000.0, 1.0), (-1e6, 1e-3), (0.0, 1e5), (3e4, 1e4), (0.0, 1e-5)]


@pytest.mark.parametrize("m", [0, 6], ids=["lml", "clml"])
@pytest.mark.parametrize("kernel", ["rbf", "linear"])
@pytest.mark.parametrize(("offset", "scale"), UNITS)
def test_training_and_predictions_do_not_depend_on_units_and_zero(offset, scale, kernel, m):
    plain, first = trained(Converted(), m, kernel)
    model, result = trained(Converted(offset, scale), m, kernel)
    expected = torch.tensor(first.history) - math.log(scale)
    torch.testing.assert_close(torch.tensor(result.history), expected, rtol=2e-3, atol=2e-3)
    new, same = (Converted(*units, seed=1).draw(range(4)) for units in ((offset, scale), (0, 1)))
    predicted, before = model.predict(new), plain.predict(same)
    assert predicted.mean.dtype == torch.float64  # of the targets
    units = (predicted.mean - offset) / scale
    torch.testing.assert_close(units, before.mean, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(predicted.stddev / scale, before.stddev, rtol=1e-2, atol=1e-3)
    scores = evaluate_tasks(model, Converted(offset, scale, seed=1), 20)
    others = evaluate_tasks(plain, Converted(seed=1), 20)
    torch.testing.assert_close(scores.values / scale**2, others.values, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(scores.nll - math.log(scale), others.nll, rtol=3e-2, atol=3e-2)


def test_single_precision_targets_far_from_zero():
    plain, _ = trained(Converted(dtype=torch.float32))
    model, _ = trained(Converted(1000.0, 1.0, dtype=torch.float32))
    errors, others = (
        evaluate_tasks(one, Converted(offset, seed=1, dtype=torch.float32), 20).values.mean()
        for one, offset in ((model, 1000.0), (plain, 0.0))
    )
    assert float(errors) == pytest.approx(float(others), rel=0.05)


def test_a_loop_of_ones_own():
    models, means = [transfer(dtype=torch.float64) for _ in range(2)], []
    for model, offset in zip(models, (0.0, 1e4), strict=True):
        mll, tasks = objective(model, 6).train(), Converted(offset)
        optimizer = torch.optim.Adam(mll.parameters(), lr=0.01)
        for step in range(20):
            drawn = tasks.draw([step])
            data = Episodes(
                drawn.support_x.double(), drawn.support_y, drawn.query_x.double(), drawn.query_y
            )
            optimizer.zero_grad()
            (-model.objective(mll, data).mean()).backward()
            optimizer.step()
    for model, offset in zip(models, (0.0, 1e4), strict=True):
        drawn = Converted(offset, seed=1).draw([0])
        x = drawn.support_x.double(), drawn.query_x.double()
        means.append(model.eval().predict(Episodes(x[0], drawn.support_y, x[1])).mean - offset)
    torch.testing.assert_close(means[1], means[0], rtol=1e-5, atol=1e-5)


def test_files_and_interrupted_trainings_keep_the_scale(tmp_path):
    tasks = Converted(1000.0, 30.0)
    whole, expected = trained(tasks)
    path = tmp_path / "model.pt"

    class Ends(Converted):
        def draw(self, indices):
            if 35 in indices:
                raise KeyboardInterrupt
            return super().draw(indices)

    with pytest.raises(KeyboardInterrupt):
        trained(Ends(1000.0, 30.0), checkpoint=path)
    model, result = trained(tasks, checkpoint=path)
    assert result.history == expected.history
    read = load_model(transfer(), path)
    data = dataclasses.replace(tasks.draw(range(3)))
    for other in (model, read):
        assert torch.equal(other.predict(data).mean, whole.predict(data).mean)
    assert read.targets.mean == pytest.approx(1000, abs=30)


def test_the_first_hundred_tasks_count_in_any_portions():
    y = 7 + 3 * torch.randn(150, 5, generator=torch.Generator().manual_seed(0)).double()
    for size in (1, 7, 150):
        scale = TargetScale()
        for some in y.split(size):
            scale.count(some)
        assert scale.mean == pytest.approx(float(y[:100].mean()), rel=1e-12)
        assert scale.deviation == pytest.approx(float(y[:100].std(correction=0)), rel=1e-12)
        torch.testing.assert_close(scale.standardized(y) * scale.deviation + scale.mean, y)
    raw = TargetScale(0)
    raw.count(y)
    assert torch.equal(raw.standardized(y), y)


def test_constant_and_missing_targets():
    scale = TargetScale()
    scale.count(torch.full((2, 3), 1e6))
    assert (scale.mean, scale.deviation) == (1e6, 1.0)
    model = transfer()
    data = PeriodicTasks(6, 8).draw([0])
    data.query_y[0, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="target: got 1 non-finite"):
        model.objective(objective(model, 6).train(), data)
    assert math.isfinite(model.targets.mean)


def test_targets_as_they_are():
    model = transfer(standardize=False)
    data = PeriodicTasks(6, 8).draw([0, 1])
    mll = objective(model, 6).train()
    _, targets = model.prior(data)
    torch.testing.assert_close(targets[:, 0], data.points()[1])
    torch.testing.assert_close(model.objective(mll, data), mll(*model.prior(data)))


def test_evaluation_does_not_count():
    model, tasks = transfer(), PeriodicTasks(6, 8)
    evaluate_tasks(model, tasks, 5)
    model.predict(tasks.draw([0]))
    assert (model.targets.mean, model.targets.deviation) == (0.0, 1.0)
