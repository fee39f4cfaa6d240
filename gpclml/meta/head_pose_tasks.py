"""Few-shot regression of a head's pitch from pictures of one person."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError
from gpclml.meta.episodes import (
    Episodes,
    NumberedTasks,
    check_counts,
    task_generator,
    unit_range,
)

__all__ = ["HeadPoseTasks"]

_PITCHES, _YAWS = 7, 19


class HeadPoseTasks(NumberedTasks):
    r"""The pitch of a head along a path of 19 pictures, from those of a few of them.

    A task is one person whose head turns from yaw 0 to 180 degrees in steps of ten while its
    pitch follows :math:`a \sin(\phi + i)`, :math:`a \sim U(-3, 3)`, :math:`\phi \sim U(-5, 5)`, in
    units of 10 degrees about level and rounded to them (Patacchiola et al. 2020, Section 5.1).
    Targets are pitches in units of 30 degrees, from -1 to 1. Support points are random ones of
    the path; all others are queries. Task ``i`` depends on ``seed`` and ``i`` alone. Inputs are
    ``(tasks, n, channels, height, width)``.

    Args:
        images: Pictures by person, pitch and yaw, ``(people, 7, 19, channels, height, width)``;
            integers count as 0 to 255 and become 0 to 1.
        support: Pictures to learn from.
        yaws: Number of the yaws, from 0 degrees on, that the path and its support points are
            limited to: 10 for training that is to be tested out of range.
        support_yaws: The same of support points alone; all of the path's if None.
        seed: Seed of all tasks.

    Raises:
        ShapeError: Images have another shape.
        ArgumentError: A number is out of range.
    """

    @checked(images="(people, 7, 19, channels, height, width)")
    def __init__(
        self,
        images: Tensor,
        support: int = 5,
        *,
        yaws: int = _YAWS,
        support_yaws: int | None = None,
        seed: int = 0,
    ) -> None:
        if images.ndim != 6 or images.shape[1:3] != (_PITCHES, _YAWS) or len(images) == 0:
            expected = f"(people, {_PITCHES}, {_YAWS}, channels, height, width)"
            raise ShapeError("images", tuple(images.shape), expected)
        support_yaws = yaws if support_yaws is None else support_yaws
        check_counts(support=support, yaws=yaws, support_yaws=support_yaws)
        if not support_yaws <= yaws <= _YAWS:
            got = f"{support_yaws} of {yaws}"
            raise ArgumentError("support_yaws", got, f"at most yaws, and those at most {_YAWS}")
        if support > support_yaws or support == yaws:
            expected = f"at most the {support_yaws} pictures to choose from, and fewer than {yaws}"
            raise ArgumentError("support", support, expected)
        self.images = images
        self.support, self.yaws, self.support_yaws = support, yaws, support_yaws
        self.seed = seed

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        person = int(torch.randint(len(self.images), (), generator=generator))
        amplitude, phase = (2 * torch.rand(2, generator=generator) - 1) * torch.tensor([3.0, 5.0])
        path = torch.arange(self.yaws)
        pitches = (amplitude * torch.sin(phase + path)).round().long()  # -3 .. 3
        chosen = torch.randperm(self.support_yaws, generator=generator)[: self.support]
        others = path[~torch.isin(path, chosen)]
        images = unit_range(self.images[person, pitches + _PITCHES // 2, path])
        targets = pitches / (_PITCHES // 2)
        x, y = images.unsqueeze(0), targets.unsqueeze(0)
        return Episodes(x[:, chosen], y[:, chosen], x[:, others], y[:, others])
