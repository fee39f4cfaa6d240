"""Training on tasks: it learns, resumes, keeps its best look, and refuses other checkpoints."""

import pytest
import torch

from gpclml.conditioning import LastPoints, RandomHoldout
from gpclml.errors import ArgumentError, DataError, NonFiniteError
from gpclml.kernels.networks import MLP
from gpclml.meta import (
    KERNELS,
    DeepKernelTransfer,
    ImageTasks,
    evaluate_tasks,
    train_on_tasks,
)
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


def train(model, conditioning=None, source=None, *, steps=8, **options):
    conditioning = LastPoints(m=4) if conditioning is None else conditioning
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
    source = tasks() if source is None else source
    return train_on_tasks(model, mll, source, steps=steps, progress=False, **options)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_layer_that_makes_features_trains_at_the_full_rate(kernel):
    """The first step of Adam moves a parameter by its learning rate, as far as rounding allows."""
    model = transfer(kernel=kernel)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    train(model, steps=1, lr=1e-3)
    for name, value in model.named_parameters():
        moved = float((value.detach() - before[name]).abs().max())
        if name.startswith(("backbone.", "normalization.")):
            assert moved > 5e-4, name
        else:
            assert moved < 1.1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("m", [0, 4], ids=["lml", "clml"])
def test_it_learns_what_tasks_have_in_common(m):
    model, unseen = transfer(), tasks(seed=1)
    before = evaluate_tasks(model, unseen, 100)
    training = train(model, LastPoints(m=m), steps=150, tasks_per_step=4, lr=0.01)
    after = evaluate_tasks(model, unseen, 100)
    assert before.metric == after.metric == "accuracy"
    margin = 3 * (before.values.var() / 100 + after.values.var() / 100).sqrt()
    assert after.values.mean() > before.values.mean() + margin
    assert after.nll.mean() < before.nll.mean()
    assert 0 <= after.calibration_error < 1
    assert len(training.history) == training.best == 150
    assert not model.training


@pytest.mark.slow
def test_a_training_without_progress_ends_early_and_can_go_on(tmp_path):
    options = {"steps": 39, "look_every": 2, "validation": tasks(seed=1), "validation_tasks": 5}
    options["lr"], first = 0.3, transfer()
    expected = train(transfer(), **options)
    scores = expected.scores
    assert expected.validated == [*range(2, 40, 2), 39]
    waited = [look - scores.index(max(scores[: look + 1])) for look in range(len(scores))]
    ends = waited.index(3) + 1
    assert ends < len(scores)
    path = tmp_path / "model.pt"
    ended = train(first, patience=3, checkpoint=path, **options)
    assert ended.scores == scores[:ends]
    assert ended.history == expected.history[: 2 * ends]
    assert ended.best == ended.validated[ended.scores.index(max(ended.scores))]
    best = float(evaluate_tasks(first, tasks(seed=1), 5).gain.mean())
    assert best == pytest.approx(max(ended.scores))
    resumed = train(transfer(), checkpoint=path, **options)
    assert (resumed.history, resumed.scores) == (expected.history, scores)


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


@pytest.mark.slow
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
    options = {"tasks_per_step": 2, "look_every": 3, "validation_tasks": 5}
    validation, path = tasks(seed=1), tmp_path / "model.pt"
    whole, first, again = (transfer(kernel=kernel, seed=seed) for seed in (0, 0, 5))
    expected = train(whole, conditioning, validation=validation, **options)
    source = Interrupted(tasks(), 10) if where == "tasks" else tasks()
    # In the second look.
    looks = Interrupted(validation, 0, times=6) if where == "validation" else validation
    with monkeypatch.context() as patch:
        if where == "optimizer":
            interrupt_adam(patch)
        with pytest.raises(KeyboardInterrupt):
            train(first, conditioning, source, checkpoint=path, validation=looks, **options)
    resumed = train(again, conditioning, checkpoint=path, validation=validation, **options)
    assert resumed.history == expected.history
    assert (resumed.validated, resumed.scores) == (expected.validated, expected.scores)
    assert_same_state(whole, again)


def assert_same_state(model, other):
    for name, stored in model.state_dict().items():
        assert torch.equal(stored, other.state_dict()[name]), name


SCHEDULERS = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [0.02, 0.01], total_steps=9
    ),
    "function": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.9**k),
    "in turn": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        milestones=[4],
    ),
}


def nesterov(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of PyTorch's SequentialLR
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_schedule_goes_on_bit_for_bit(tmp_path, name):
    optimizer = nesterov if name in ("cosine", "function") else torch.optim.AdamW
    options = {"tasks_per_step": 2, "look_every": 3, "lr": 0.01, "optimizer": optimizer}
    schedule, path = {"scheduler": SCHEDULERS[name]}, tmp_path / "model.pt"
    whole, first, again = (transfer(seed=seed) for seed in (0, 0, 5))
    expected = train(whole, **options, **schedule)
    with pytest.raises(KeyboardInterrupt):
        train(first, source=Interrupted(tasks(), 10), checkpoint=path, **options, **schedule)
    resumed = train(again, checkpoint=path, **options, **schedule)
    assert resumed.history == expected.history
    assert_same_state(whole, again)
    assert train(transfer(), **options).history != expected.history


def test_another_optimizer_or_scheduler_does_not_go_on(tmp_path):
    options = {"steps": 2, "checkpoint": tmp_path / "model.pt"}
    train(transfer(), scheduler=SCHEDULERS["steps"], **options)
    for scheduler in (None, SCHEDULERS["cosine"]):
        with pytest.raises(DataError, match="differs in scheduler"):
            train(transfer(), scheduler=scheduler, **options)
    with pytest.raises(DataError, match="differs in optimizer"):
        train(transfer(), scheduler=SCHEDULERS["steps"], optimizer=torch.optim.SGD, **options)


def test_the_default_is_adam_and_rates_are_those_of_the_schedule():
    halve = {"scheduler": lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5)}
    default, adam, halved, half = (
        train(transfer(), steps=5, **options).history
        for options in ({}, {"optimizer": torch.optim.Adam}, halve, {"lr": 5e-4})
    )
    assert default == adam != halved == half


def test_a_callback_is_called_after_each_step():
    model, seen = transfer(), []

    def note(number):
        seen.append((number, model.likelihood.noise.item()))
        if number == 4:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        train(model, callback=note, look_every=2)
    assert [number for number, _ in seen] == [1, 2, 3, 4]
    assert len({noise for _, noise in seen}) == 4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": "lbfgs"}, "optimizer: got L-BFGS"),
        ({"optimizer": torch.optim.LBFGS}, "optimizer: got L-BFGS"),
        ({"optimizer": "adamm"}, "optimizer: got 'adamm'"),
        ({"optimizer": torch.nn.Linear}, "optimizer: got Linear"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "optimizer: got SGD"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "scheduler: got one of Reduce"),
        ({"scheduler": lambda optimizer: optimizer}, "scheduler: got one of Adam"),
        ({"scheduler": lambda optimizer: None}, "scheduler: got one of NoneType"),
        ({"scheduler": 0.5}, "scheduler: got 0.5"),
        ({"callback": 3}, "callback: got 3"),
    ],
)
def test_bad_optimizers_schedulers_and_callbacks(options, match):
    with pytest.raises(ArgumentError, match=match):
        train(transfer(), steps=1, **options)


def test_a_training_with_other_groups_of_learning_rates_does_not_go_on(tmp_path):
    path, model = tmp_path / "model.pt", transfer()
    train(model, steps=2, checkpoint=path)
    content = torch.load(path, weights_only=True)
    groups = content["optimizers"][0]["param_groups"]
    groups[1]["params"].append(groups[0]["params"].pop())
    torch.save(content, path)
    with pytest.raises(DataError, match="parameter group"):
        train(model, steps=5, checkpoint=path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(
            ({name: 0}, name)
            for name in ("steps", "tasks_per_step", "look_every", "validation_tasks", "patience")
        ),
        ({"patience": 2}, "patience: got 2, expected None without validation"),
        ({"lr": 0.0}, r"lr: got .* that torch.float32 can hold"),
        ({"lr": 1e300}, r"lr: got .* that torch.float32 can hold"),
    ],
)
def test_bad_arguments(options, match):
    with pytest.raises(ArgumentError, match=match):
        train(transfer(), **options)


def test_what_does_not_fit_the_model():
    model, other = transfer(), transfer()
    with pytest.raises(NonFiniteError):
        train(model, steps=50, lr=1e30)
    mll = ConditionalMarginalLogLikelihood(other.likelihood, other, LastPoints(m=4))
    with pytest.raises(ArgumentError, match="of another model"):
        train_on_tasks(model, mll, tasks(), steps=1)
    with pytest.raises(ArgumentError, match="count"):
        evaluate_tasks(model, tasks(), 0)
