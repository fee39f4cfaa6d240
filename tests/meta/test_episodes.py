from __future__ import annotations

import pytest
import torch

from gpclml.errors import ArgumentError, ShapeError
from gpclml.meta import ImageTasks

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
    one = ImageTasks(*images(), seed=4, **options)
    together, alone = one.draw([0, 1, 2]), ImageTasks(*images(), seed=4, **options).draw([2])
    assert torch.equal(together.support_x[2:], alone.support_x)
    assert not torch.equal(together.support_x[0], together.support_x[1])
    other = ImageTasks(*images(), seed=5, **options).draw([2])
    assert not torch.equal(other.query_x, alone.query_x)
    state = torch.get_rng_state()
    one.draw([0])
    assert torch.equal(torch.get_rng_state(), state)


def test_turned_classes_are_classes_of_their_own():
    tasks = ImageTasks(*images(), ways=4 * CLASSES, shots=1, queries=1, rotations=True)
    assert tasks.num_classes == 4 * CLASSES
    batch = tasks.draw([0])
    marks = {(0, 1): 0, (2, 0): 1, (3, 2): 2, (1, 3): 3}  # where quarter turns bring it
    seen = set()
    for support, query in zip(batch.support_x[0, :, 0], batch.query_x[0, :, 0], strict=True):
        turns = [marks[tuple((one == 1).nonzero()[0].tolist())] for one in (support, query)]
        assert turns[0] == turns[1]
        seen.add((turns[0], int(255 * support.min() + 0.5) // 10))
    assert len(seen) == 4 * CLASSES


def test_classes_are_drawn_evenly():
    tasks = ImageTasks(*images(), ways=2, shots=1, queries=1)
    drawn = values_of(tasks.draw(range(600)).support_x).flatten() // 10
    counts = torch.bincount(drawn, minlength=CLASSES)
    assert counts.min() > 200 - 5 * 200**0.5 * (1 - 1 / CLASSES) ** 0.5


def test_types_of_inputs_and_of_classes():
    tasks = ImageTasks(*images(torch.float64), ways=2, shots=1, queries=1)
    batch = tasks.draw([0])
    assert batch.support_x.dtype == torch.float64
    single = batch.to(torch.float32)
    assert single.query_x.dtype == torch.float32
    assert single.query_y.dtype == torch.long


def test_bad_arguments():
    x, y = images()
    with pytest.raises(ArgumentError, match="ways: got 7, expected at most the 6 classes"):
        ImageTasks(x, y, ways=7, queries=1)
    with pytest.raises(ArgumentError, match=r"shots \+ queries: got 6, expected at most the 5"):
        ImageTasks(x, y, shots=3, queries=3)
    with pytest.raises(ArgumentError, match="shots: got 0"):
        ImageTasks(x, y, shots=0)
    with pytest.raises(ShapeError, match="labels: got"):
        ImageTasks(x[:3], y)
    with pytest.raises(ShapeError, match="images: got"):
        ImageTasks(x[:, 0], y)
    with pytest.raises(ShapeError, match="square"):
        ImageTasks(x[..., :2], y, rotations=True)
