"""Images with a class each, and what the classes belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError, UnknownNameError

__all__ = ["LabelledImages"]


@checked
@dataclass(frozen=True)
class LabelledImages:
    """Images of classes that may come in groups, such as the characters of alphabets.

    Attributes:
        name: Name of the data set.
        images: Ink or object bright on 0, ``(N, channels, height, width)``, uint8.
        labels: Class of each image, from 0, ``(N,)``.
        class_names: A name a class.
        class_groups: Group of each class; none where classes have no groups.
        source: Where the images come from.
        licence: What the source states.

    Raises:
        ShapeError: If the parts do not fit.
    """

    name: str
    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...] = ()
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            got = f"shape {tuple(self.images.shape)} of {self.images.dtype}"
            raise ShapeError("images", got, "(N, channels, height, width) of torch.uint8")
        if self.labels.shape != self.images.shape[:1]:
            raise ShapeError("labels", tuple(self.labels.shape), f"({len(self.images)},)")
        if self.class_groups and len(self.class_groups) != len(self.class_names):
            got = f"{len(self.class_groups)} for {len(self.class_names)} classes"
            raise ShapeError("class_groups", got, "one a class, or none")

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of classes, sorted."""
        return tuple(sorted(set(self.class_groups)))

    def of_groups(self, groups: Sequence[str]) -> LabelledImages:
        """The images of some groups; classes keep their numbers and names.

        Args:
            groups: Names of :attr:`groups`.

        Raises:
            UnknownNameError: No such group.
        """
        for group in groups:
            if group not in self.groups:
                raise UnknownNameError("groups", group, self.groups)
        inside = torch.tensor([group in groups for group in self.class_groups])
        rows = inside[self.labels]
        return replace(self, images=self.images[rows], labels=self.labels[rows])
