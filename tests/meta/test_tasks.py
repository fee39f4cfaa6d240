"""Few-shot tasks: classification from images, and regression."""

import math

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.meta import Episodes, ImageTasks, PeriodicTasks

CLASSES, EACH = 6, 5


def images(dtype=torch.uint8):
    """Image k of class c is constant 10 c + k, but for a mark that tells its orientation."""
    values = 10 * torch.arange(CLASSES).repeat_interleave(EACH) + torch.arange(EACH).repeat(CLASSES)
    pictures = values[:, None, None, None].expand(-1, 1, 4, 4).clone()
    pictures[:, :, 0, 1] = 255
    return pictures.to(dtype), torch.arange(CLASSES).repeat_interleave(EACH) + 100


def values_of(x):
    return (255 * x[..., 0, 2, 2]).round().long()


def test_a_task_has_its_ways_and_shots_of_distinct_images():
    tasks = ImageTasks(*images(), ways=3, shots=2, queries=3, seed=1)
    batch = tasks.draw(range(4))
    assert batch.support_x.shape == (4, 6, 1, 4, 4)
    assert batch.query_x.shape == (4, 9, 1, 4, 4)
    assert batch.support_y.tolist() == [[0, 0, 1, 1, 2, 2]] * 4
    assert batch.query_y.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 4
    assert (batch.num_tasks, batch.num_support, batch.ways) == (4, 6, 3)
    assert 0 <= float(batch.support_x.min()) <= float(batch.support_x.max()) == 1
    for support, query in zip(values_of(batch.support_x), values_of(batch.query_x), strict=True):
        assert len(set(support.tolist() + query.tolist())) == 15
        classes = (support // 10).reshape(3, 2)
        assert torch.equal(classes[:, 0], classes[:, 1])
        assert torch.equal((query // 10).reshape(3, 3), classes[:, :1].expand(3, 3))


def test_a_task_is_the_same_whoever_draws_it():
    options = {"ways": 3, "shots": 1, "queries": 2, "rotations": True}
    tasks = ImageTasks(*images(), seed=4, **options)
    together, alone = tasks.draw([0, 1, 2]), ImageTasks(*images(), seed=4, **options).draw([2])
    assert torch.equal(together.support_x[2:], alone.support_x)
    assert not torch.equal(together.support_x[0], together.support_x[1])
    other = ImageTasks(*images(), seed=5, **options).draw([2])
    assert not torch.equal(other.query_x, alone.query_x)
    state = torch.get_rng_state()
    tasks.draw([0])
    assert torch.equal(torch.get_rng_state(), state)


def test_tasks_do_not_depend_on_the_device(device):
    options = {"ways": 4, "shots": 2, "queries": 2, "rotations": True, "seed": 3}
    here, there = ImageTasks(*images(), **options), ImageTasks(*images(), **options).to(device)
    batch, moved = here.draw([0, 5]), there.draw([0, 5])
    for name in ("support_x", "support_y", "query_x", "query_y"):
        assert getattr(moved, name).device.type == device.type
        torch.testing.assert_close(getattr(moved, name).cpu(), getattr(batch, name))
    assert here.images.device.type == "cpu"


def test_turned_classes_are_classes_of_their_own():
    tasks = ImageTasks(*images(), ways=4 * CLASSES, shots=1, queries=1, rotations=True)
    assert tasks.num_classes == 4 * CLASSES
    batch = tasks.draw([0])
    marks = {(0, 1): 0, (2, 0): 1, (3, 2): 2, (1, 3): 3}  # where quarter turns bring it
    seen = set()
    for support, query in zip(batch.support_x[0, :, 0], batch.query_x[0, :, 0], strict=True):
        turns = [marks[tuple((image == 1).nonzero()[0].tolist())] for image in (support, query)]
        assert turns[0] == turns[1]
        seen.add((turns[0], int(255 * support.min() + 0.5) // 10))
    assert len(seen) == 4 * CLASSES


def test_classes_are_drawn_evenly():
    tasks = ImageTasks(*images(), ways=2, shots=1, queries=1)
    drawn = values_of(tasks.draw(range(600)).support_x).flatten() // 10
    counts = torch.bincount(drawn, minlength=CLASSES)
    assert counts.min() > 200 - 5 * 200**0.5 * (1 - 1 / CLASSES) ** 0.5


class Pairs(Dataset):
    """Images and their classes as torchvision's data sets give them."""

    def __len__(self):
        return CLASSES * EACH

    def __getitem__(self, index):
        x, y = images()
        return x[index], int(y[index])


@pytest.mark.parametrize("dataset", [TensorDataset(*images()), Pairs()], ids=["tensors", "pairs"])
def test_a_data_set_gives_the_tasks_of_its_tensors(dataset):
    expected = ImageTasks(*images(), ways=3, shots=2, queries=3, seed=1).draw([0, 4])
    tasks = ImageTasks(dataset, ways=3, shots=2, queries=3, seed=1).draw([0, 4])
    assert torch.equal(tasks.support_x, expected.support_x)
    assert torch.equal(tasks.query_x, expected.query_x)
    assert torch.equal(tasks.query_y, expected.query_y)


def test_types_of_inputs_and_of_targets():
    batch = ImageTasks(*images(torch.float64), ways=2, shots=1, queries=1).draw([0])
    assert batch.support_x.dtype == torch.float64
    single = batch.to(torch.float32)
    assert single.query_x.dtype == torch.float32
    assert single.query_y.dtype == torch.long
    x, y = torch.zeros(1, 1, 1), torch.tensor([[2e9 + 1]], dtype=torch.float64)
    assert Episodes(x, y, x).to(torch.float32).support_y.item() == 2e9 + 1


X, Y = images()
POINTS, CLASSES_OF_POINTS = torch.zeros(2, 3, 1), torch.tensor([[0, 1, 2], [2, 1, 0]])
BAD = [
    (lambda: ImageTasks(X, Y, ways=7, queries=1), ArgumentError, "ways: got 7, expected at most"),
    (lambda: ImageTasks(X, Y, shots=3, queries=3), ArgumentError, r"shots \+ queries: got 6"),
    (lambda: ImageTasks(X, Y, shots=0), ArgumentError, "shots: got 0"),
    (lambda: ImageTasks(X[:3], Y), ShapeError, "labels: got"),
    (lambda: ImageTasks(X[:, 0], Y), ShapeError, "images: got"),
    (lambda: ImageTasks(X[..., :2], Y, rotations=True), ShapeError, "square"),
    (lambda: ImageTasks(TensorDataset(X[:, 0], Y)), ShapeError, "images: got a data set of images"),
    (lambda: ImageTasks(X), ArgumentError, "labels: got None"),
    (lambda: ImageTasks(X.numpy(), Y), UnsupportedError, r"images: got ndarray.*torch\.as_tensor"),
    (lambda: PeriodicTasks(support=0), ArgumentError, "support: got 0"),
    *(
        (lambda indices=indices: PeriodicTasks(3, 4).draw(indices), ArgumentError, "indices")
        for indices in ([], [-1], [0.5], ["0"])
    ),
    (lambda: episodes_of(CLASSES_OF_POINTS + 1), ArgumentError, "support_y: got classes from 1 to"),
    (lambda: episodes_of(query_y=CLASSES_OF_POINTS - 1), ArgumentError, "query_y: got classes"),
    (lambda: episodes_of(query_y=POINTS[..., 0]), ArgumentError, r"query_y: got torch\.float32"),
    (lambda: episodes_of(ways=-1), ArgumentError, "ways: got -1"),
    (lambda: episodes_of(query_y=CLASSES_OF_POINTS[:, :2]), ShapeError, "query_y: got shape"),
    (lambda: episodes_of(query_y=CLASSES_OF_POINTS[:1]), ShapeError, "query_y: got shape"),
    (lambda: episodes_of(CLASSES_OF_POINTS[0]), ShapeError, "support_y: got shape"),
    (lambda: Episodes.stack([]), ShapeError, "batches: got 0 kinds"),
    (
        lambda: Episodes.stack([PeriodicTasks(3, 4).draw([0]), PeriodicTasks(4, 4).draw([0])]),
        ShapeError,
        "batches: got 2 kinds",
    ),
]


def episodes_of(support_y=CLASSES_OF_POINTS, query_y=CLASSES_OF_POINTS, ways=3):
    return Episodes(POINTS, support_y, POINTS, query_y, ways=ways)


@pytest.mark.parametrize(("make", "error", "match"), BAD)
def test_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_periodic_tasks_are_sines_with_noise():
    tasks = PeriodicTasks(support=40, queries=200, seed=3)
    batch = tasks.draw(range(30))
    assert batch.support_x.shape == (30, 40, 1)
    assert batch.query_y.shape == (30, 200)
    assert batch.ways == 0
    amplitudes = []
    for x, y in zip(batch.query_x[..., 0].double(), batch.query_y.double(), strict=True):
        basis = torch.stack([x.sin(), x.cos()], dim=-1)
        weights = torch.linalg.lstsq(basis, y.unsqueeze(-1)).solution.flatten()
        residual = y - basis @ weights
        assert 0.08 < float(residual.std()) < 0.12
        amplitudes.append(float(weights.norm()))
        phase = math.atan2(float(weights[1]), float(weights[0]))
        assert -0.3 < phase < math.pi + 0.3 or amplitudes[-1] < 0.3
    assert 0.0 < min(amplitudes) < 1.5
    assert 3.5 < max(amplitudes) < 5.1


def test_the_range_of_queries():
    inside, beyond = PeriodicTasks().draw([0]), PeriodicTasks(out_of_range=True).draw([0])
    assert (float(inside.query_x.min()), float(inside.query_x.max())) == (-5, 5)
    assert (float(beyond.query_x.min()), float(beyond.query_x.max())) == (-5, 10)
    assert torch.equal(inside.support_x, beyond.support_x)
    assert float(beyond.support_x.abs().max()) <= 5
