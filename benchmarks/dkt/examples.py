"""A picture of tasks: what a model learns from and what it is to predict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmarks._figures import new_figure, save_figure
from benchmarks.dkt.studies import study_named
from gpclml.errors import ArgumentError
from gpclml.meta import Episodes

__all__ = ["draw_examples"]

_COLUMNS = 15


def draw_examples(studies: Sequence[str], path: str | os.PathLike[str], seed: int = 0) -> None:
    """Draws the first test task of each study, support points above queries.

    Raises:
        UnknownNameError: No such study.
        ArgumentError: A study has no images.
        DataError: Data are missing, or the file cannot be written.
    """
    episodes = {}
    for name in studies:
        study = study_named(name)
        episodes[name] = study.sources(study.shots[-1], seed).test.draw([0])
        if episodes[name].support_x.ndim != 5:
            raise ArgumentError("study", name, "studies of images")
    figure = new_figure(0.62 * _COLUMNS, 0.4 + 1.9 * len(episodes), layout="constrained")
    parts: Any = figure.subfigures(len(episodes), 1, squeeze=False)
    for part, (name, task) in zip(parts.flat, episodes.items(), strict=True):
        part.suptitle(name, fontsize=9, x=0.01, ha="left")
        _draw_task(part, task)
    save_figure(figure, path)


def _draw_task(part: Any, task: Episodes) -> None:
    panels = part.subplots(2, _COLUMNS, squeeze=False)
    rows = [
        (task.support_x[0], task.support_y[0], "learn from"),
        (task.query_x[0], task.query_y[0], "predict"),
    ]
    for axes, (images, targets, title) in zip(panels, rows, strict=True):
        places = _spread(len(images), len(axes))
        for column, axis in enumerate(axes):
            axis.set_xticks([])
            axis.set_yticks([])
            if column >= len(places):
                axis.set_visible(False)
                continue
            place = places[column]
            _draw_image(axis, images[place])
            label = str(int(targets[place])) if task.ways else f"{float(targets[place]):+.2f}"
            axis.set_xlabel(label, fontsize=7, labelpad=1)
        axes[0].set_ylabel(title, fontsize=7)


def _spread(count: int, most: int) -> list[int]:
    """At most so many places, evenly over all of them."""
    return (
        [round(i * (count - 1) / (most - 1)) for i in range(most)]
        if count > most
        else [*range(count)]
    )


def _draw_image(axis: Any, image: Tensor) -> None:
    picture = image.permute(1, 2, 0).numpy()
    axis.imshow(picture[..., 0] if picture.shape[-1] == 1 else picture, cmap="gray_r", vmin=0)
