"""Images to classify, parted by a seed and standardized."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.datasets import load_images
from gpclml.errors import ArgumentError, UnknownNameError

__all__ = ["DATA", "Images", "images", "rotated"]

DATA = {
    "digits": ("digits", None, 8),
    "mnist-test": ("mnist-test", None, 28),
    "cifar10-part": ("cifar10-part", "cifar10-part-test", 32),
}
"""Name to the images to train on, those to test on where they are others, and their size."""

_MOST_TEST = 2000


@dataclass(frozen=True)
class Images:
    """Images of ten classes.

    Attributes:
        train_x: ``(N, channels, size, size)``, mean 0 and variance 1 over all pixels.
        train_y: Classes, ``(N,)``.
        test_x: Others, scaled alike.
        test_y: Their classes.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def images(name: str, num_train: int, seed: int, device: str = "cpu") -> Images:
    """Random images to train on and at most 2000 others to test on.

    Args:
        name: One of :data:`DATA`.
        num_train: Number of them to train on.
        seed: Seed of the choice.
        device: Where they are put.

    Raises:
        UnknownNameError: No such data.
        ArgumentError: There are not as many.
        DataError: A file is missing.
    """
    if name not in DATA:
        raise UnknownNameError("data", name, DATA)
    source, other, _ = DATA[name]
    train = load_images(source, progress=False)
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
    most = len(order) if other else len(order) - 1
    if not 1 <= num_train <= most:
        raise ArgumentError("num_train", num_train, f"1 to {most}, the images of {name}")
    rows, rest = order[:num_train], order[num_train : num_train + _MOST_TEST]
    test = load_images(other, progress=False) if other else train
    if other:
        rest = torch.arange(min(len(test.labels), _MOST_TEST))
    x = train.images[rows].to(torch.get_default_dtype()) / 255
    mean, scale = x.mean(), x.std()
    test_x = test.images[rest].to(x) / 255
    parts = ((x - mean) / scale, train.labels[rows], (test_x - mean) / scale, test.labels[rest])
    return Images(*(part.to(device) for part in parts))


def rotated(x: Tensor, largest: float, seed: int) -> Tensor:
    """Images turned by angles drawn from a range.

    Args:
        x: Images, ``(N, channels, size, size)``.
        largest: Half the range, in radians.
        seed: Seed of the angles.
    """
    generator = torch.Generator().manual_seed(seed)
    angle = largest * (2 * torch.rand(len(x), generator=generator) - 1).to(x)
    zero = torch.zeros_like(angle)
    rows = [
        torch.stack([angle.cos(), -angle.sin(), zero], -1),
        torch.stack([angle.sin(), angle.cos(), zero], -1),
    ]
    grid = torch.nn.functional.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    empty = x.min()  # what has no ink, where the corners come from outside
    return torch.nn.functional.grid_sample(x - empty, grid, align_corners=False) + empty
