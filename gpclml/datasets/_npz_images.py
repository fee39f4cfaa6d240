"""Images and labels in a file of numpy arrays."""

from __future__ import annotations

import os
import zipfile

import numpy
import torch
from torch import Tensor

from gpclml.datasets._idx import paired_images
from gpclml.errors import DataError

__all__ = ["read_npz_images"]


def read_npz_images(path: str | os.PathLike[str]) -> tuple[Tensor, Tensor]:
    """The arrays ``images`` and ``labels``; objects in the file are not unpickled.

    Args:
        path: The file.

    Returns:
        Images ``(N, channels, height, width)``, uint8, and labels ``(N,)``.

    Raises:
        DataError: The file is missing, damaged or lacks an array of that kind.
    """
    try:
        with open(path, "rb") as file, numpy.load(file, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path}: no file of the arrays images and labels ({error}). Put a whole copy there."
        ) from error
    if images.dtype != numpy.uint8 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: images of {images.dtype} and labels of {labels.dtype}, where uint8 and "
            "integers belong. Put the original file there."
        )
    return paired_images(torch.tensor(images), torch.tensor(labels.astype(numpy.int64)), str(path))
