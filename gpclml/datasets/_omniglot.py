"""The archives of Omniglot, read without being extracted."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy
import torch
from torch import Tensor

from gpclml.datasets._archive import archive_entries
from gpclml.errors import ArgumentError, DataError

__all__ = ["read_omniglot"]

_ENTRY = re.compile(r"(?P<alphabet>[^/]+)/(?P<character>character\d+)/(?P<drawing>\d+_\d+)\.png")
_MOST_PIXELS = 1024 * 1024  # of an image: an archive may claim anything


def read_omniglot(
    archives: Sequence[str | os.PathLike[str]], size: int = 28
) -> tuple[Tensor, Tensor, tuple[str, ...], tuple[str, ...]]:
    """All characters of archives such as ``images_background.zip``.

    Entries are read in memory, in the order of their names. Drawings are black on white at 105
    x 105; they become bright on 0, scaled by a Lanczos filter.

    Args:
        archives: Paths.
        size: Pixels a side.

    Returns:
        Images ``(N, 1, size, size)``, uint8; classes ``(N,)``, one a character in the order of
        alphabets and characters; names of classes, ``alphabet/character``; their alphabets.

    Raises:
        ArgumentError: ``size`` is below 1.
        DataError: An archive is missing, damaged or holds no characters, an entry leads
            out of it or is no image, or images have different sizes.
    """
    if size < 1:
        raise ArgumentError("size", size, "at least 1")
    pictures: dict[tuple[str, str], dict[str, numpy.ndarray]] = {}
    shapes: set[tuple[int, int]] = set()
    for archive in archives:
        for name, body in archive_entries(archive):
            match = _ENTRY.fullmatch("/".join(PurePosixPath(name).parts[-3:]))
            if match is None:
                raise DataError(
                    f"{archive}: the entry {name} is no <alphabet>/characterNN/<id>_<drawer>.png. "
                    "Give an original archive of Omniglot."
                )
            picture, shape = _picture(archive, name, body, size)
            shapes.add(shape)
            of_class = pictures.setdefault((match["alphabet"], match["character"]), {})
            of_class[match["drawing"]] = picture  # the small archives share some
    if len(shapes) != 1:
        got = f"images of sizes {sorted(shapes)}" if shapes else "no images"
        listed = ", ".join(map(str, archives))
        raise DataError(f"{listed}: {got}, expected one size. Give original archives of Omniglot.")
    classes = sorted(pictures)
    images = numpy.stack([picture for one in classes for picture in pictures[one].values()])
    labels = [place for place, one in enumerate(classes) for _ in pictures[one]]
    names = tuple("/".join(one) for one in classes)
    alphabets = tuple(alphabet for alphabet, _ in classes)
    return torch.from_numpy(images).unsqueeze(1), torch.tensor(labels), names, alphabets


def _picture(
    archive: str | os.PathLike[str], name: str, body: bytes, size: int
) -> tuple[numpy.ndarray, tuple[int, int]]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(body), formats=["PNG"]) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels")
            shape = image.size
            small = image.convert("L").resize((size, size), Image.Resampling.LANCZOS)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(
            f"{archive}: the entry {name} is no image that can be read ({error}). Put a whole "
            "copy of the archive there."
        ) from error
    return 255 - numpy.asarray(small, dtype=numpy.uint8), shape
