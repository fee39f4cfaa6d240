"""The idx format of MNIST and EMNIST."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path

import numpy
import torch
from torch import Tensor

from gpclml.errors import DataError

__all__ = ["read_idx", "read_idx_images"]

_UNSIGNED_BYTES = 8


def read_idx(path: str | os.PathLike[str]) -> Tensor:
    """An array of unsigned bytes, gzipped or not.

    Args:
        path: The file: two zero bytes, type, number of dimensions, sizes as big-endian
            32-bit integers, then the numbers.

    Raises:
        DataError: The file is missing, cut short, too long, or of another format.
    """
    try:
        body = Path(path).read_bytes()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: the file cannot be read ({error}). Put a whole copy there."
        ) from error
    if len(body) < 4 or body[:2] != b"\0\0" or body[2] != _UNSIGNED_BYTES:
        raise DataError(
            f"{path}: no idx file of unsigned bytes (it begins with {body[:4].hex()}). Put the "
            "original file there."
        )
    dimensions = body[3]
    start = 4 + 4 * dimensions
    if len(body) < start:
        raise DataError(f"{path}: the header is cut short. Put a whole copy there.")
    shape = struct.unpack(f">{dimensions}I", body[4:start])
    expected = int(numpy.prod(shape, dtype=numpy.int64))
    if len(body) - start != expected:
        raise DataError(
            f"{path}: {len(body) - start} numbers, where the header says {shape}, {expected} of "
            "them. Put a whole copy there."
        )
    return torch.tensor(numpy.frombuffer(body, numpy.uint8, offset=start).reshape(shape))


def read_idx_images(
    images: str | os.PathLike[str], labels: str | os.PathLike[str], transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Images and labels of MNIST or EMNIST.

    Args:
        images: File of three dimensions.
        labels: File of one dimension.
        transposed: Whether images are stored column by column, as EMNIST's are.

    Returns:
        Images ``(N, 1, height, width)``, uint8, and labels ``(N,)``, as they are numbered there.

    Raises:
        DataError: A file is no such file, or the two do not belong together.
    """
    pictures, classes = read_idx(images), read_idx(labels)
    if pictures.ndim != 3 or classes.shape != pictures.shape[:1]:
        raise DataError(
            f"{images} and {labels}: shapes {tuple(pictures.shape)} and {tuple(classes.shape)}, "
            "where (N, height, width) and (N,) belong. Give the images and labels of one set."
        )
    pictures = pictures.mT if transposed else pictures
    return pictures.unsqueeze(1).contiguous(), classes.long()
