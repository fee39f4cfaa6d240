"""Tasks of different sizes in one batch: objectives and predictions are those of each alone."""

import math

import gpytorch
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from gpclml.conditioning import LastPoints, RandomHoldout
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.kernels.networks import MLP
from gpclml.meta import (
    KERNELS,
    DatasetTasks,
    DeepKernelTransfer,
    Episodes,
    PeriodicTasks,
    evaluate_tasks,
    fit_task_temperature,
    train_on_tasks,
)
from gpclml.mlls import ConditionalMarginalLogLikelihood

SIZES = [(5, 4), (3, 6), (2, 1), (5, 2)]
WAYS = 3


def task(support, queries, ways=0, seed=0, known=True):
    generator = torch.Generator().manual_seed(100 * seed + support)
    n = support + queries
    x = torch.randn(1, n, 4, generator=generator, dtype=torch.float64)
    y = 5 + x[..., 0].sin()
    if ways:
        y = torch.arange(n).remainder(ways).unsqueeze(0)
        x[..., 1] += y
    query_y = y[:, support:] if known else None
    return Episodes(x[:, :support], y[:, :support], x[:, support:], query_y, ways)


def ragged(ways=0, **options):
    return [task(*sizes, ways, seed, **options) for seed, sizes in enumerate(SIZES)]


def transfer(kernel="rbf", standardize=False, norm=False):
    generator = torch.Generator().manual_seed(2)
    network = MLP([4, 8, 6], torch.nn.Tanh, generator=generator)
    layers = [network, torch.nn.BatchNorm1d(6)] if norm else [network]
    backbone = torch.nn.Sequential(*layers)
    return DeepKernelTransfer(backbone, kernel, 6, standardize=standardize).double()


def objective(model, m=0):
    return ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=m))


def given_support(model, episodes):
    """The objective of a task alone given its own support."""
    return model.objective(objective(model, episodes.num_support), episodes)


def gradients(model, value):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(value.sum(), parameters, allow_unused=True)


def close(value, expected):
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


SETTINGS = [(0, False, False), (WAYS, True, False), (0, True, "task"), (WAYS, False, "task")]
CASES = [  # each kernel with two of four settings, in which each pair of choices meets
    (kernel, *settings)
    for i, kernel in enumerate(sorted(set(KERNELS) - {"batch_norm_cosine"}))
    for settings in SETTINGS[i % 2 :: 2]
]


@pytest.mark.parametrize(("kernel", "ways", "given", "standardize"), CASES)
def test_objectives_and_gradients_are_those_of_single_tasks(kernel, given, ways, standardize):
    model, tasks = transfer(kernel, standardize), ragged(ways)
    model.objective(objective(model), Episodes.pad(tasks))
    model.targets._most = 0  # the scale of these tasks for what follows
    together = Episodes.pad(tasks)
    value = model.objective(objective(model, together.num_support if given else 0), together)
    single = [
        given_support(model, each) if given else model.objective(objective(model), each)
        for each in tasks
    ]
    close(value, torch.cat(single))
    for ours, theirs in zip(
        gradients(model, value), gradients(model, torch.cat(single)), strict=True
    ):
        if theirs is not None:
            close(ours, theirs)


@pytest.mark.parametrize("ways", [0, WAYS])
@pytest.mark.parametrize("kernel", ["rbf", "linear", "batch_norm_cosine"])
@pytest.mark.parametrize("standardize", [True, "task"])
def test_predictions_are_those_of_single_tasks(kernel, ways, standardize):
    model, tasks = transfer(kernel, standardize), ragged(ways)
    model.objective(objective(model), Episodes.pad(tasks))  # the scale, and running statistics
    for known in (True, False):
        together = Episodes.pad(ragged(ways, known=known), support=7)
        predictive = model.predict(together)
        for i, each in enumerate(tasks):
            alone = model.predict(each)
            close(predictive.mean[i : i + 1, :, : together.query_sizes[i]], alone.mean)
            close(predictive.stddev[i : i + 1, :, : together.query_sizes[i]], alone.stddev)


@pytest.mark.parametrize("ways", [0, WAYS])
def test_support_beyond_every_task_of_a_batch_counts_among_the_first(ways):
    model, tasks = transfer(), ragged(ways)
    value = model.objective(objective(model, 9), Episodes.pad(tasks, support=9))
    close(value, torch.cat([given_support(model, each) for each in tasks]))
    alone = Episodes.pad(tasks[2:3], support=9)
    close(model.objective(objective(model, 9), alone), given_support(model, tasks[2]))
    assert objective(model, 9).conditioning.m == 9


@pytest.mark.parametrize("kernel", ["batch_norm_cosine", "rbf"])
@pytest.mark.parametrize("junk", [0.0, torch.nan, torch.inf])
def test_padding_reaches_neither_batch_statistics_nor_the_scale_of_targets(kernel, junk):
    """Whatever a caller's own padding holds."""
    tasks = ragged()
    filled = Episodes.pad(tasks)
    padded = Episodes(
        **{
            name: value.clone() if torch.is_tensor(value) else value
            for name, value in vars(filled).items()
        }
    )
    for i, (support, queries) in enumerate(SIZES):
        for values in (padded.support_x, padded.support_y):
            values[i, support:] = junk
        for values in (padded.query_x, padded.query_y):
            values[i, queries:] = junk
    model = transfer(kernel, standardize=True, norm=True)
    value = model.objective(objective(model), padded)
    points = torch.cat([each.inputs()[0] for each in tasks])
    targets = torch.cat([each.points()[1][0] for each in tasks])
    before = model.backbone[0](points)
    norm = model.backbone[1]
    torch.testing.assert_close(norm.running_mean, norm.momentum * before.mean(0))
    assert model.targets.mean == pytest.approx(float(targets.mean()), rel=1e-12)
    assert model.targets.deviation == pytest.approx(float(targets.std(correction=0)), rel=1e-12)
    assert all(bool(g.isfinite().all()) for g in gradients(model, value) if g is not None)
    assert bool(model.predict(padded).mean.isfinite().all())


def test_tasks_of_one_size_are_joined_as_they_are():
    tasks = [task(3, 2, seed=seed) for seed in range(3)]
    padded, stacked = Episodes.pad(tasks), Episodes.stack(tasks)
    assert padded.mask() is None
    model = transfer()
    values = [model.objective(objective(model, 3), each) for each in (padded, stacked)]
    assert torch.equal(*values)


def test_padding_of_types_and_batches():
    whole = Episodes.pad([Episodes.pad(ragged()[:2]), *ragged()[2:]])
    assert (whole.support_sizes, whole.query_sizes) == tuple(zip(*SIZES, strict=True))
    assert whole.support_y[2].isnan().tolist() == [False, False, True, True, True]
    assert bool((whole.query_x[2, 1:] == 0).all())
    expected = [[True] * 2 + [False] * 3 + [True] + [False] * 5]
    assert whole.mask()[2:3].tolist() == expected
    moved = whole.to(torch.float32)
    assert (moved.support_sizes, moved.query_sizes) == (whole.support_sizes, whole.query_sizes)
    again = Episodes.stack([whole, moved.to(torch.float64)])
    assert again.query_sizes == 2 * whole.query_sizes
    classes = Episodes.pad(ragged(WAYS))
    assert classes.support_y[2].tolist() == [0, 1, -100, -100, -100]


def test_missing_targets_of_points_are_named_as_without_padding():
    tasks = ragged()
    tasks[1].query_y[0, 2] = torch.nan
    model, padded = transfer(), Episodes.pad(tasks)
    with pytest.raises(NonFiniteError, match="target: got 1 non-finite"):
        model.objective(objective(model), padded)
    with gpytorch.settings.observation_nan_policy("mask"):
        value = model.objective(objective(model), padded)
        close(value[1:2], model.objective(objective(model), tasks[1]))


# --- scores


class Sizes:
    """Tasks of different sizes, padded in each draw to the largest of that draw."""

    def __init__(self, ways, first=0):
        self.ways, self.first = ways, first

    def draw(self, indices):
        numbers = [self.first + index for index in indices]
        return Episodes.pad([task(*SIZES[i % 4], self.ways, i) for i in numbers])


@pytest.mark.parametrize("ways", [0, WAYS])
def test_scores_are_the_means_over_the_query_points_of_each_task(ways, monkeypatch):
    model, source = transfer(standardize=True), Sizes(ways)
    scores = evaluate_tasks(model, source, 7)
    alone = [evaluate_tasks(model, Sizes(ways, first), 1) for first in range(7)]
    for name in ("values", "nll"):
        expected = torch.cat([getattr(each, name) for each in alone])
        torch.testing.assert_close(getattr(scores, name), expected)
    monkeypatch.setattr("gpclml.meta.evaluation._TASKS_AT_ONCE", 1)
    other = evaluate_tasks(model, source, 7)  # batches with other numbers of query points
    torch.testing.assert_close(other.values, scores.values)
    torch.testing.assert_close(other.nll, scores.nll)
    if ways:
        assert other.calibration_error == pytest.approx(scores.calibration_error)
        weights = torch.tensor([float(SIZES[i % 4][1]) for i in range(7)])
        assert 0 < fit_task_temperature(model, source, 7) < math.inf
        right = float((scores.values * weights).sum())
        assert right == pytest.approx(round(right), abs=1e-4)


def test_tasks_without_query_targets_are_only_predicted():
    model, tasks = transfer(), ragged(known=False)
    padded, source = Episodes.pad(tasks), DatasetTasks(tasks)
    assert padded.query_y.shape == (4, 0)
    assert padded.to(torch.float32).query_sizes == padded.query_sizes
    assert model.predict(source.draw([0, 1])).mean.shape == (2, 1, 6)
    classes = DatasetTasks(ragged(WAYS, known=False))
    single = DatasetTasks([task(3, 1, known=False)])
    for call in (
        lambda: evaluate_tasks(model, source, 2),
        lambda: evaluate_tasks(model, single, 1),
        lambda: fit_task_temperature(model, classes, 2),
        lambda: train_on_tasks(model, objective(model), source, steps=1, progress=False),
        lambda: model.objective(objective(model), padded),
    ):
        with pytest.raises(ArgumentError, match="episodes: got tasks without targets"):
            call()
    with pytest.raises(ShapeError, match="batches: got 2 kinds"):
        Episodes.stack([task(3, 1), task(3, 1, known=False)])


# --- data sets of tasks


class Items(Dataset):
    """Tasks as tuples."""

    def __init__(self, items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def task_tensors(episodes):
    names = "support_x", "support_y", "query_x", "query_y"
    return tuple(getattr(episodes, name)[0] for name in names)


FORMS = {
    "tuples": lambda episodes: Items(map(task_tensors, episodes)),
    "lists": lambda episodes: Items(list(task_tensors(each)) for each in episodes),
    "arrays": lambda episodes: Items(
        tuple(values.numpy() for values in task_tensors(each)) for each in episodes
    ),
    "episodes": Items,
    "list": lambda episodes: [task_tensors(each) for each in episodes],
}


@pytest.mark.parametrize("ways", [0, WAYS])
@pytest.mark.parametrize("form", FORMS)
def test_data_sets_of_tasks(form, ways):
    episodes = ragged(ways)
    tasks = DatasetTasks(FORMS[form](episodes), ways)
    assert len(tasks) == 4
    batch, expected = tasks.draw([1, 6, 3]), Episodes.pad([episodes[i] for i in (1, 2, 3)])
    assert batch.ways == ways
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(batch, name), value, rtol=0, atol=0, equal_nan=True)


def test_data_sets_of_tasks_on_a_device(device):
    here = DatasetTasks(ragged())
    there = here.to(device)
    for name in ("support_x", "support_y", "query_x", "query_y"):
        ours, expected = (getattr(tasks.draw([1, 2]), name) for tasks in (there, here))
        assert ours.device.type == device.type
        torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    value, expected = (
        model.objective(objective(model, 5), tasks.draw(range(4)))
        for model, tasks in ((transfer().to(device), there), (transfer(), here))
    )
    torch.testing.assert_close(value.cpu(), expected)


def test_a_data_set_of_tensors_without_query_targets():
    stacked = Episodes.stack([task(3, 2, seed=seed) for seed in range(3)])
    tasks = DatasetTasks(TensorDataset(stacked.support_x, stacked.support_y, stacked.query_x))
    assert tasks.draw([2]).query_y.shape == (1, 0)
    assert tasks.draw([2]).mask() is None


@pytest.mark.slow
def test_training_and_scores_on_a_data_set_of_tasks():
    model = transfer(standardize=True)
    episodes = [task(2 + seed % 4, 6, seed=seed) for seed in range(20)]
    tasks = DatasetTasks(episodes[:12])
    unseen = DatasetTasks(episodes[12:])
    before = evaluate_tasks(model, unseen, 100)
    assert before.values.shape == (8,)  # each of them once
    result = train_on_tasks(
        model, objective(model, tasks.tasks.num_support), tasks, steps=60, tasks_per_step=3,
        lr=0.01, progress=False, validation=unseen, look_every=20,
    )  # fmt: skip
    after = evaluate_tasks(model, unseen, 100)
    assert before.metric == after.metric == "mse"
    assert after.values.mean() < before.values.mean()
    assert torch.equal(after.gain, -after.values)
    assert len(result.history) == 60


def test_any_conditioning_takes_padded_tasks():
    model, padded = transfer(), Episodes.pad(ragged())
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, RandomHoldout(0.5))
    assert bool(model.objective(mll, padded).isfinite().all())


def test_objectives_of_gpytorch_take_tasks_of_one_size_alone():
    model = transfer()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    together = Episodes.stack([task(3, 2, seed=seed) for seed in range(3)])
    close(model.objective(mll, together), model.objective(objective(model), together))
    with pytest.raises(UnsupportedError, match="mll: got ExactMarginalLogLikelihood"):
        model.objective(mll, Episodes.pad(ragged()))


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


X, Y = torch.zeros(3, 2), torch.zeros(3)
OTHER = Episodes(torch.zeros(1, 3, 7), torch.zeros(1, 3), torch.zeros(1, 3, 7), torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: DatasetTasks([]), ArgumentError, "dataset: got no item"),
        (lambda: DatasetTasks(Endless()), UnsupportedError, "dataset: got Endless"),
        (lambda: DatasetTasks(iter([(X, Y, X, Y)])), UnsupportedError, "dataset: got list_iter"),
        (lambda: DatasetTasks([(X, Y, X, Y), 3]), ShapeError, "dataset: got item 1: int"),
        (lambda: DatasetTasks([(X, Y)]), ShapeError, "dataset: got item 0: tuple of 2"),
        (lambda: DatasetTasks([(X, Y[:2], X, Y)]), ShapeError, "dataset: got item 0: support_y"),
        (lambda: DatasetTasks([(X, Y, X, "abc")]), ShapeError, "dataset: got item 0"),
        (lambda: DatasetTasks([(X, Y, X, Y)], 2), ShapeError, "item 0: .* classes as integers"),
        (lambda: DatasetTasks([(X, Y, X, Y)], -1), ArgumentError, "ways: got -1"),
        (lambda: DatasetTasks([Episodes.pad(ragged())]), ShapeError, "item 0: 4 tasks"),
        (lambda: DatasetTasks([*ragged(), OTHER]), ShapeError, "dataset: got items that differ"),
        (lambda: DatasetTasks([*ragged(), task(2, 2, 2)]), ShapeError, "items that differ"),
        (
            lambda: DatasetTasks([*ragged(), task(2, 2, known=False)]),
            ShapeError,
            "items that differ",
        ),
        (lambda: Episodes.pad([*ragged(), OTHER]), ShapeError, "batches: got 2 kinds"),
        (lambda: Episodes.pad([*ragged(), *ragged(3)]), ShapeError, "batches: got 2 kinds"),
        (lambda: Episodes.pad([]), ShapeError, "batches: got 0 kinds"),
        (lambda: Episodes.pad(each for each in ragged()), UnsupportedError, "batches: got gener"),
        (lambda: Episodes.stack(each for each in ragged()), UnsupportedError, "batches: got gener"),
        (lambda: Episodes.stack(ragged()), ShapeError, r"batches: got 4 kinds.*Episodes\.pad"),
        (lambda: Episodes.pad(ragged(), support=4), ArgumentError, "support: got 4.*at least 5"),
        (lambda: sized(support_sizes=[3, 1]), ArgumentError, "support_sizes: got .*1 integers"),
        (lambda: sized(query_sizes=[4]), ArgumentError, r"query_sizes: got \[4\].*from 0 to 3"),
        (lambda: sized(query_sizes=[0.5]), ArgumentError, "query_sizes"),
        (lambda: sized(support_sizes=[-1]), ArgumentError, "support_sizes"),
        (lambda: PeriodicTasks(3, 4).draw(iter([0])), UnsupportedError, "indices: got list_iter"),
    ],
)  # fmt: skip
def test_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


def sized(**sizes):
    return Episodes(X[None], Y[None], X[None], Y[None], **sizes)
