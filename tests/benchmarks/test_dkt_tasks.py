"""Regression tasks of images: turned views, and heads along a path."""

import math

import pytest
import torch

from benchmarks.dkt.tasks import HeadPoseTasks, RotationTasks, conv3


def test_the_network_of_head_poses():
    assert conv3()(torch.rand(2, 3, 100, 100)).shape == (2, 2916)


def picture():
    image = torch.zeros(1, 1, 21, 21)
    image[..., 10, 14:] = 1.0  # a ray to the right
    return image


def test_views_are_turned_by_their_angle():
    batch = RotationTasks(picture(), support=3, queries=40, seed=1).draw([0])
    assert batch.query_x.shape == (1, 40, 1, 21, 21)
    assert float(batch.query_y.abs().max()) <= 1
    offsets = torch.arange(21.0) - 10
    for view, angle in zip(batch.query_x[0, :, 0], batch.query_y[0], strict=True):
        right = float((view.sum(0) * offsets).sum())
        up = -float((view.sum(1) * offsets).sum())
        assert math.atan2(up, right) == pytest.approx(float(angle) * math.pi / 2, abs=0.03)


def test_integer_images_and_repeated_draws():
    images = (255 * picture()).to(torch.uint8).repeat(4, 1, 1, 1)
    tasks = RotationTasks(images, seed=2)
    alone, again = tasks.draw([5]), tasks.draw([4, 5])
    assert torch.equal(alone.support_x, again.support_x[1:])
    assert 0.5 < float(alone.support_x.max()) <= 1


def heads():
    """The value of a pixel tells person, pitch and yaw."""
    person, pitch, yaw = torch.arange(2), torch.arange(7), torch.arange(19)
    values = 1000.0 * person[:, None, None] + 100.0 * pitch[:, None] + yaw
    return values[..., None, None, None].expand(2, 7, 19, 1, 2, 2)


def test_heads_follow_a_path():
    batch = HeadPoseTasks(heads(), support=5, seed=4).draw(range(40))
    assert batch.support_x.shape == (40, 5, 1, 2, 2)
    assert batch.query_x.shape == (40, 14, 1, 2, 2)
    x = torch.cat([batch.support_x, batch.query_x], dim=1)[..., 0, 0, 0]
    y = torch.cat([batch.support_y, batch.query_y], dim=1)
    assert torch.equal(x // 1000, (x // 1000)[:, :1].expand_as(x))  # one person a task
    assert torch.allclose((x % 1000) // 100 / 3 - 1, y)
    assert torch.equal((x % 100).sort(-1).values, torch.arange(19.0).expand_as(x))
    assert {0.0, 1.0} == set((x[:, 0] // 1000).tolist())
    amplitudes, phases = torch.linspace(-3, 3, 61), torch.linspace(-5, 5, 101)
    waves = amplitudes[:, None, None] * torch.sin(phases[:, None] + torch.arange(19.0))
    waves = waves.round() / 3
    for values, yaws in zip(y, x % 100, strict=True):
        path = values[yaws.argsort()]
        assert int((waves != path).sum(-1).min()) <= 4


def test_heads_out_of_range():
    train = HeadPoseTasks(heads(), yaws=10).draw([0])
    test = HeadPoseTasks(heads(), support_yaws=10).draw(range(20))
    assert train.query_x.shape[1] == 5
    assert float((train.query_x % 100).max()) < 10
    assert float((test.support_x % 100).max()) < 10
    assert float((test.query_x % 100).max()) == 18
