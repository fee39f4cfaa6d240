"""The archive of EMNIST, read without being extracted."""

from __future__ import annotations

import os
import string

from torch import Tensor

from gpclml.datasets._archive import archive_entries
from gpclml.datasets._idx import paired_images, parse_idx
from gpclml.errors import DataError, UnknownNameError

__all__ = ["EMNIST_CLASSES", "read_emnist"]

_MERGED = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")
EMNIST_CLASSES = {
    "balanced": _MERGED,
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "bymerge": _MERGED,
    "digits": tuple(string.digits),
    "letters": tuple(string.ascii_uppercase),
    "mnist": tuple(string.digits),
}
"""Classes of each split of EMNIST (Cohen et al. 2017, Table II); small letters that look like
capitals share their class in the merged ones, all do in ``"letters"``."""


def read_emnist(
    archive: str | os.PathLike[str], split: str = "byclass", part: str = "test"
) -> tuple[Tensor, Tensor]:
    """Images and labels of one split.

    Args:
        archive: Path of the original ``gzip.zip``.
        split: One of ``EMNIST_CLASSES``.
        part: ``"train"`` or ``"test"``.

    Returns:
        Images ``(N, 1, 28, 28)``, uint8, upright, and labels from 0, ``(N,)``.

    Raises:
        UnknownNameError: No such split or part.
        DataError: The archive is missing or damaged, or holds no such files.
    """
    if split not in EMNIST_CLASSES:
        raise UnknownNameError("split", split, EMNIST_CLASSES)
    if part not in ("train", "test"):
        raise UnknownNameError("part", part, ("train", "test"))
    names = [f"emnist-{split}-{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    found = {
        name.rpartition("/")[2]: body
        for name, body in archive_entries(archive, lambda name: name.rpartition("/")[2] in names)
    }
    for name in names:
        if name not in found:
            raise DataError(f"{archive}: no file {name} in it. Put EMNIST's gzip.zip there.")
    images, labels = (parse_idx(found[name], f"{archive}: {name}") for name in names)
    upright = images.mT if images.ndim == 3 else images  # columns are stored one after another
    pictures, classes = paired_images(upright, labels, f"{archive}: {' and '.join(names)}")
    first = 1 if split == "letters" else 0
    return pictures, classes - first
