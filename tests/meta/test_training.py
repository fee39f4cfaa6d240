"""Training on tasks: it learns, resumes, keeps its best look, and refuses other checkpoints."""

from __future__ import annotations

import pytest
import torch

from gpclml.conditioning import LastPoints, RandomHoldout
from gpclml.errors import ArgumentError, DataError, NonFiniteError
from gpclml.kernels.networks import MLP
from gpclml.meta import (
    KERNELS,
    DeepKernelTransfer,
    ImageTasks,
    PeriodicTasks,
    evaluate_tasks,
    load_model,
    train_on_tasks,
)  # fmt: skip
from gpclml.mlls import ConditionalMarginalLogLikelihood


def characters(seed, classes=30, each=12):
    """Images of a class are one random picture and noise, in ten of twenty-five pixels."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(classes, 1, 1, 5, 5, generator=generator)
    noise = torch.rand(classes, each, 1, 5, 5, generator=generator)
    mask = torch.zeros(5, 5)
    mask[:2] = 1.0
    images = mask * pictures + (1 - mask) * noise
    return images.flatten(0, 1), torch.arange(classes).repeat_interleave(each)


def tasks(seed=0, **options):
    return ImageTasks(*characters(seed), **({"ways": 4, "shots": 1, "queries": 4} | options))


def transfer(width=10, kernel="rbf", seed=0):
    generator = torch.Generator().manual_seed(seed)
    network = MLP([25, 30, width], generator=generator)
    return DeepKernelTransfer(torch.nn.Sequential(torch.nn.Flatten(), network), kernel, width)


def objective(model, m=4):
    return ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=m))


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_layer_that_makes_features_trains_at_the_full_rate(kernel):
    """The first step of Adam moves a parameter by its learning rate, as far as rounding allows."""
    model = transfer(kernel=kernel)
    mll = objective(model)
    before = {name: value.detach().clone() for name, value in mll.named_parameters()}
    train_on_tasks(model, mll, tasks(), steps=1, lr=1e-3, progress=False)
    for name, value in mll.named_parameters():
        moved = float((value.detach() - before[name]).abs().max())
        if name.startswith(("model.backbone.", "model.normalization.")):
            assert moved > 5e-4, name
        else:
            assert moved < 1.1e-4, name


@pytest.mark.parametrize("m", [0, 4], ids=["lml", "clml"])
def test_it_learns_what_tasks_have_in_common(m):
    model, unseen = transfer(), tasks(seed=1)
    before = evaluate_tasks(model, unseen, 100)
    training = train_on_tasks(
        model, objective(model, m), tasks(), steps=150, tasks_per_step=4, lr=0.01, progress=False
    )
    after = evaluate_tasks(model, unseen, 100)
    assert before.metric == after.metric == "accuracy"
    margin = 3 * (before.values.var() / 100 + after.values.var() / 100).sqrt()
    assert after.values.mean() > before.values.mean() + margin
    assert after.nll.mean() < before.nll.mean()
    assert 0 <= after.calibration_error < 1
    assert len(training.history) == training.best == 150
    assert not model.training


def test_regression_tasks():
    network = MLP([1, 20, 20, 8], torch.nn.Tanh)
    model = DeepKernelTransfer(network, "rbf", 8)
    source, unseen = PeriodicTasks(10, 20, seed=0), PeriodicTasks(10, 20, seed=1)
    before = evaluate_tasks(model, unseen, 60)
    train_on_tasks(
        model, objective(model, 0), source, steps=150, tasks_per_step=4, lr=0.01, progress=False
    )
    after = evaluate_tasks(model, unseen, 60)
    assert before.metric == after.metric == "mse"
    assert after.values.mean() < 0.7 * before.values.mean()
    assert torch.equal(after.gain, -after.values)


def test_a_training_without_progress_ends_early_and_can_go_on(tmp_path):
    options = {"steps": 39, "look_every": 2, "validation": tasks(seed=1), "validation_tasks": 5}
    options |= {"lr": 0.3, "progress": False}
    whole, first, again = transfer(), transfer(), transfer()
    expected = train_on_tasks(whole, objective(whole), tasks(), **options)
    scores = expected.scores
    assert expected.validated == [*range(2, 40, 2), 39]
    waited = [look - scores.index(max(scores[: look + 1])) for look in range(len(scores))]
    ends = waited.index(3) + 1
    assert ends < len(scores)
    path = tmp_path / "model.pt"
    ended = train_on_tasks(first, objective(first), tasks(), patience=3, checkpoint=path, **options)
    assert ended.scores == scores[:ends]
    assert ended.history == expected.history[: 2 * ends]
    assert ended.best == ended.validated[ended.scores.index(max(ended.scores))]
    best = float(evaluate_tasks(first, tasks(seed=1), 5).gain.mean())
    assert best == pytest.approx(max(ended.scores))
    resumed = train_on_tasks(again, objective(again), tasks(), checkpoint=path, **options)
    assert resumed.history == expected.history
    assert resumed.scores == scores


class Interrupted:
    """Tasks during which the user gives up, when one is asked for so many times."""

    def __init__(self, source, index, times=1):
        self.source, self.index, self.left = source, index, times

    def draw(self, indices):
        if self.index in indices:
            self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.source.draw(indices)


def interrupt_adam(monkeypatch):
    step, calls = torch.optim.Adam.step, []

    def interrupted_once(self, *args, **kwargs):
        step(self, *args, **kwargs)
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.Adam, "step", interrupted_once)


@pytest.mark.parametrize(
    ("where", "kernel", "conditioning"),
    [
        ("tasks", "rbf", RandomHoldout(0.3)),  # other points at each step
        ("optimizer", "batch_norm_cosine", LastPoints(m=4)),
        ("validation", "batch_norm_cosine", RandomHoldout(0.3)),
    ],
    ids=["tasks", "optimizer", "validation"],
)
def test_an_interrupted_training_ends_as_a_whole_one(
    tmp_path, monkeypatch, kernel, conditioning, where
):
    options = {"steps": 8, "tasks_per_step": 2, "look_every": 3, "progress": False}
    options |= {"validation": tasks(seed=1), "validation_tasks": 5}

    def objective(model):
        return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)

    whole, first, again = (transfer(kernel=kernel, seed=seed) for seed in (0, 0, 5))
    expected = train_on_tasks(whole, objective(whole), tasks(), **options)
    path, source, broken = tmp_path / "model.pt", tasks(), dict(options)
    if where == "tasks":
        source = Interrupted(tasks(), 10)
    if where == "validation":
        broken["validation"] = Interrupted(tasks(seed=1), 0, times=6)  # in the second look
    with monkeypatch.context() as patch:
        if where == "optimizer":
            interrupt_adam(patch)
        with pytest.raises(KeyboardInterrupt):
            train_on_tasks(first, objective(first), source, checkpoint=path, **broken)
    resumed = train_on_tasks(again, objective(again), tasks(), checkpoint=path, **options)
    assert resumed.history == expected.history
    assert (resumed.validated, resumed.scores) == (expected.validated, expected.scores)
    for name, stored in whole.state_dict().items():
        assert torch.equal(stored, again.state_dict()[name]), name
    loaded = load_model(transfer(kernel=kernel, seed=7), path)
    episodes = tasks(seed=2).draw([0])
    assert torch.equal(loaded.predict(episodes).mean, whole.predict(episodes).mean)


def test_a_training_with_other_groups_of_learning_rates_does_not_go_on(tmp_path):
    path, model = tmp_path / "model.pt", transfer()
    options = {"progress": False, "checkpoint": path}
    train_on_tasks(model, objective(model), tasks(), steps=2, **options)
    content = torch.load(path, weights_only=True)
    groups = content["optimizers"][0]["param_groups"]
    groups[1]["params"].append(groups[0]["params"].pop())
    torch.save(content, path)
    with pytest.raises(DataError, match="parameter group"):
        train_on_tasks(model, objective(model), tasks(), steps=5, **options)


def test_checkpoints_of_another_architecture(tmp_path):
    path = tmp_path / "model.pt"
    model = transfer()
    train_on_tasks(model, objective(model), tasks(), steps=1, checkpoint=path, progress=False)
    for other in (transfer(width=9), transfer(kernel="spectral_mixture")):
        with pytest.raises(DataError, match="another architecture"):
            load_model(other, path)


def test_bad_arguments():
    model = transfer()
    with pytest.raises(NonFiniteError):
        train_on_tasks(model, objective(model), tasks(), steps=50, lr=1e30, progress=False)
    model = transfer()
    for name in ("steps", "tasks_per_step", "look_every", "validation_tasks", "patience"):
        with pytest.raises(ArgumentError, match=name):
            train_on_tasks(model, objective(model), tasks(), **({"steps": 1} | {name: 0}))
    with pytest.raises(ArgumentError, match="patience: got 2, expected None without validation"):
        train_on_tasks(model, objective(model), tasks(), steps=1, patience=2)
    for lr in (0.0, 1e300):
        with pytest.raises(ArgumentError, match=r"lr: got .* that torch.float32 can hold"):
            train_on_tasks(model, objective(model), tasks(), steps=1, lr=lr)
    with pytest.raises(ArgumentError, match="of another model"):
        train_on_tasks(model, objective(transfer()), tasks(), steps=1)
    with pytest.raises(ArgumentError, match="count"):
        evaluate_tasks(model, tasks(), 0)
