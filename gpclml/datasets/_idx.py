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

__all__ = ["paired_images", "parse_idx", "read_idx", "read_idx_images"]

_UNSIGNED_BYTES = 8


def read_idx(path: str | os.PathLike[str]) -> Tensor:
    """An array of unsigned bytes in a file, gzipped or not.

    Args:
        path: The file; see :func:`parse_idx`.

    Raises:
        DataError: The file is missing, cut short, too long, or of another format.
    """
    try:
        body = Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    return parse_idx(body, path)


def parse_idx(body: bytes, origin: object) -> Tensor:
    """An array of unsigned bytes, gzipped or not.

    Args:
        body: Two zero bytes, type, number of dimensions, sizes as big-endian 32-bit integers,
            then the numbers.
        origin: Where it comes from, for errors.

    Raises:
        DataError: It is cut short, too long, or of another format.
    """
    try:
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(origin, error) from error
    if len(body) < 4 or body[:2] != b"\0\0" or body[2] != _UNSIGNED_BYTES:
        raise DataError(
            f"{origin}: no idx file of unsigned bytes (it begins with {body[:4].hex()}). Put the "
            "original file there."
        )
    dimensions = body[3]
    start = 4 + 4 * dimensions
    if len(body) < start:
        raise DataError(f"{origin}: the header is cut short. Put a whole copy there.")
    shape = struct.unpack(f">{dimensions}I", body[4:start])
    expected = int(numpy.prod(shape, dtype=numpy.int64))
    if len(body) - start != expected:
        raise DataError(
            f"{origin}: {len(body) - start} numbers, where the header says {shape}, {expected} of "
            "them. Put a whole copy there."
        )
    return torch.tensor(numpy.frombuffer(body, numpy.uint8, offset=start).reshape(shape))


def read_idx_images(
    images: str | os.PathLike[str], labels: str | os.PathLike[str]
) -> tuple[Tensor, Tensor]:
    """Images and labels of MNIST.

    Args:
        images: File of three dimensions.
        labels: File of one dimension.

    Returns:
        Images ``(N, 1, height, width)``, uint8, and labels ``(N,)``, as they are numbered there.

    Raises:
        DataError: A file is no such file, or the two do not belong together.
    """
    return paired_images(read_idx(images), read_idx(labels), f"{images} and {labels}")


def paired_images(images: Tensor, labels: Tensor, origin: str) -> tuple[Tensor, Tensor]:
    """Images with a channel and labels as integers, of one length.

    Args:
        images: ``(N, height, width)``, or with channels last.
        labels: ``(N,)``.
        origin: Where they come from, for errors.

    Raises:
        DataError: The two do not belong together.
    """
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1]:
        raise DataError(
            f"{origin}: shapes {tuple(images.shape)} and {tuple(labels.shape)}, where "
            "(N, height, width), or with channels, and (N,) belong. Give the images and labels of "
            "one set."
        )
    channels_first = images.unsqueeze(1) if images.ndim == 3 else images.movedim(-1, 1)
    return channels_first.contiguous(), labels.long()


def _unreadable(origin: object, error: Exception) -> DataError:
    return DataError(f"{origin}: the file cannot be read ({error}). Put a whole copy there.")
