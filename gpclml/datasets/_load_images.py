"""Any data set of labelled images by its name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from gpclml.datasets._emnist import EMNIST_CLASSES, read_emnist
from gpclml.datasets._fetch import fetch_file
from gpclml.datasets._folder import data_folder
from gpclml.datasets._idx import read_idx_images
from gpclml.datasets._npz_images import read_npz_images
from gpclml.datasets._omniglot import read_omniglot
from gpclml.datasets.image_sources import image_files
from gpclml.datasets.labelled_images import LabelledImages
from gpclml.errors import UnknownNameError

__all__ = ["image_names", "load_emnist", "load_images", "load_omniglot"]

_DIGITS = tuple(str(digit) for digit in range(10))


def image_names() -> tuple[str, ...]:
    """Names that ``load_images`` knows, sorted."""
    return tuple(sorted({*image_files(), "digits"}))


def load_images(
    name: str, *, folder: str | os.PathLike[str] | None = None, progress: bool = True
) -> LabelledImages:
    """Labelled images by name: read from the data folder, fetched first where missing.

    - ``"cifar10-part"`` and ``"cifar10-part-test"``: 8000 training and 2000 test images of
      CIFAR-10, 32 x 32 in colour, decoded from JPEG; the files have no public address and must
      be there;
    - ``"cyrillic"``: 42 handwritten Cyrillic letters, 100 images each, 28 x 28; the file has
      no public address and must be there;
    - ``"digits"``: 1797 digits of 8 x 8 pixels, which ship with scikit-learn;
    - ``"emnist"``: test images of EMNIST's 62 digits and letters, 28 x 28; other splits by
      :func:`emnist`;
    - ``"mnist"`` and ``"mnist-test"``: the 60,000 training and 10,000 test digits, 28 x 28;
    - ``"omniglot"``: 1623 characters of 50 alphabets, 20 drawings each, scaled to 28 x 28; and
      ``"omniglot-background"``, ``"omniglot-evaluation"``, its 30 and 20 alphabets;
    - ``"omniglot-small"``: 242 characters of 8 alphabets of it: the two small background sets,
      without what they share.

    Args:
        name: One of ``image_names()``.
        folder: The data folder. None: ``$GPCLML_DATA``, else the user's cache.
        progress: Whether a download shows a progress bar on standard error.

    Raises:
        UnknownNameError: No such data set; the message lists the nearest names.
        DataError: A file is corrupt or cannot be fetched.
    """
    if name == "digits":
        return _digits()
    if name not in image_files():
        raise UnknownNameError("name", name, image_names())
    files = image_files()[name]
    paths = [fetch_file(one, data_folder(one.folder, folder), progress) for one in files]
    source, licence = files[0].source, files[0].licence
    if name.startswith("omniglot"):
        return load_omniglot(paths, name, source, licence)
    if name == "emnist":
        return load_emnist(paths[0], name=name, source=source, licence=licence)
    read = read_npz_images if files[0].file.endswith(".npz") else read_idx_images
    images, labels = read(*paths)
    classes = tuple(str(label) for label in labels.unique().tolist())
    return LabelledImages(name, images, labels, classes, (), source, licence)


def load_omniglot(
    archives: Sequence[str | os.PathLike[str]],
    name: str = "omniglot",
    source: str = "",
    licence: str = "",
) -> LabelledImages:
    """The characters of original Omniglot archives, grouped by alphabet, 28 x 28.

    Args:
        archives: Paths, e.g. of ``images_background.zip`` and ``images_evaluation.zip``.
        name: What to call the data set.
        source: Where the archives come from.
        licence: What the source states.

    Raises:
        DataError: An archive is missing, damaged or no archive of Omniglot.
    """
    images, labels, names, alphabets = read_omniglot([Path(path) for path in archives])
    return LabelledImages(name, images, labels, names, alphabets, source, licence)


def load_emnist(
    archive: str | os.PathLike[str],
    split: str = "byclass",
    part: str = "test",
    name: str = "emnist",
    source: str = "",
    licence: str = "",
) -> LabelledImages:
    """A split of the original EMNIST archive, 28 x 28, upright.

    Args:
        archive: Path of the original ``gzip.zip``.
        split: ``"balanced"``, ``"byclass"``, ``"bymerge"``, ``"digits"``, ``"letters"`` or
            ``"mnist"``.
        part: ``"train"`` or ``"test"``.
        name: What to call the data set.
        source: Where the archive comes from.
        licence: What the source states.

    Raises:
        UnknownNameError: No such split or part.
        DataError: The archive is missing, damaged or not EMNIST's.
    """
    images, labels = read_emnist(archive, split, part)
    return LabelledImages(name, images, labels, EMNIST_CLASSES[split], (), source, licence)


def _digits() -> LabelledImages:
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    pictures = torch.as_tensor(images).reshape(-1, 1, 8, 8) * (255 / 16)
    return LabelledImages(
        name="digits",
        images=pictures.round().to(torch.uint8),
        labels=torch.as_tensor(labels).long(),
        class_names=_DIGITS,
        source="scikit-learn: sklearn.datasets.load_digits()",
        licence="BSD-3-Clause (scikit-learn)",
    )
