"""Augmented tasks: seen on pictures whose pixels tell where they come from."""

from __future__ import annotations

import math

import pytest
import torch

from gpclml.errors import ArgumentError, ShapeError
from gpclml.meta import AugmentedTasks, Episodes, ImageTasks, PeriodicTasks

SIDE = 16


def tasks(picture, **options):
    """Every image is the picture, but for the mark of its class in the last channel."""
    classes = torch.arange(6.0)[:, None, None, None].expand(-1, 1, *picture.shape[-2:])
    images = torch.cat([picture.expand(6, -1, -1, -1), classes], dim=1)
    labels = torch.arange(6).repeat_interleave(4)
    sizes = {"ways": 3, "shots": 1, "queries": 2}
    return ImageTasks(images.repeat_interleave(4, 0), labels, **(sizes | options))


def ramps(height=SIDE, width=SIDE):
    """Two channels, which tell the coordinates of each pixel from -1 to 1, across and down."""
    across = (2 * torch.arange(width) + 1) / width - 1
    down = (2 * torch.arange(height) + 1) / height - 1
    return torch.stack(torch.broadcast_tensors(across, down.unsqueeze(-1)))


def coordinates(batch):
    """Where the pixels of all images come from, ``(n, 2, height, width)``, if from inside."""
    return torch.cat([batch.support_x, batch.query_x], 1).flatten(0, 1)[:, :2]


def test_no_change():
    plain = tasks(ramps())
    same, batch = AugmentedTasks(plain).draw([3, 5]), plain.draw([3, 5])
    torch.testing.assert_close(same.support_x, batch.support_x)
    torch.testing.assert_close(same.query_x, batch.query_x)
    assert torch.equal(same.query_y, batch.query_y)
    assert same.ways == 3


def test_crops_lie_within_the_image():
    batch = AugmentedTasks(tasks(ramps()), crop=0.5).draw(range(20))
    found = coordinates(batch)[..., 2:-2, 2:-2]  # away from where the border is interpolated
    slopes = found.diff(dim=-1)[:, 0] * SIDE / 2
    size = slopes.mean((-2, -1))
    torch.testing.assert_close(slopes, size[:, None, None].expand_as(slopes), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.diff(dim=-2)[:, 1].mean((-2, -1)) * SIDE / 2, size)
    assert 0.49 < float(size.min()) < 0.55
    assert 0.95 < float(size.max()) < 1.01
    centres = found.mean((-2, -1))
    assert bool((centres.abs() <= 1 - size[:, None] + 1e-3).all())
    assert float(centres.abs().max()) > 0.3
    assert bool((coordinates(batch).abs() <= 1).all())


@pytest.mark.parametrize("width", [SIDE, 2 * SIDE])
def test_turns_keep_shapes(width):
    batch = AugmentedTasks(tasks(ramps(SIDE, width)), degrees=30).draw(range(20))
    inner = coordinates(batch)[..., 6:10, width // 2 - 2 : width // 2 + 2]
    # In pixels: the derivative of where a pixel comes from is a rotation.
    scale = torch.tensor([width / 2, SIDE / 2])
    right = inner.diff(dim=-1).mean((-2, -1)) * scale
    below = inner.diff(dim=-2).mean((-2, -1)) * scale
    angles = torch.atan2(right[:, 1], right[:, 0])
    torch.testing.assert_close(right.norm(dim=-1), torch.ones(len(right)), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(below[:, 1], right[:, 0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(below[:, 0], -right[:, 1], rtol=1e-3, atol=1e-3)
    assert math.radians(25) < float(angles.abs().max()) <= math.radians(30.1)
    assert float(angles.min()) < 0 < float(angles.max())


def test_half_of_the_images_are_mirrored():
    found = coordinates(AugmentedTasks(tasks(ramps()), mirrored=True).draw(range(40)))
    plain, mirror = ramps(), ramps().flip(-1)
    is_plain = torch.isclose(found, plain, atol=1e-5).all(-1).all(-1).all(-1)
    is_mirror = torch.isclose(found, mirror, atol=1e-5).all(-1).all(-1).all(-1)
    assert bool((is_plain ^ is_mirror).all())
    assert 0.4 < float(is_mirror.float().mean()) < 0.6


def test_changes_depend_on_the_number_alone(device):
    options = {"degrees": 20, "crop": 0.7, "mirrored": True}
    source = AugmentedTasks(tasks(ramps()), seed=3, **options)
    together, alone = source.draw([0, 4]), source.draw([4])
    torch.testing.assert_close(together.query_x[1:], alone.query_x)
    first, second = coordinates(source.draw([0])), coordinates(source.draw([1]))
    assert not torch.allclose(first, second)
    assert not torch.allclose(first[0], first[1])
    other = AugmentedTasks(tasks(ramps()), seed=4, **options).draw([4])
    assert not torch.allclose(other.query_x, alone.query_x)
    moved = source.to(device).draw([4])
    assert moved.query_x.device.type == device.type
    torch.testing.assert_close(moved.query_x.cpu(), alone.query_x, rtol=1e-4, atol=1e-4)


class Unnumbered:
    def draw(self, indices):
        return Episodes(*PeriodicTasks().draw(indices).__dict__.values())


def test_bad_arguments():
    plain = tasks(ramps())
    for name, value in (("degrees", -1), ("degrees", 181), ("crop", 0), ("crop", 1.1)):
        with pytest.raises(ArgumentError, match=name):
            AugmentedTasks(plain, **{name: value})
    with pytest.raises(ShapeError, match=r"tasks: got points of shape \(1,\), expected images"):
        AugmentedTasks(PeriodicTasks()).draw([0])
    with pytest.raises(ArgumentError, match="tasks: got Unnumbered, expected numbered tasks"):
        AugmentedTasks(Unnumbered()).to("cpu")
