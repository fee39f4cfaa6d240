"""Faces of people turned by known angles, in the folder layout of the QMUL head-pose data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from gpclml.datasets._folder import VARIABLE, data_folder
from gpclml.errors import DataError

__all__ = ["PITCHES", "YAWS", "HeadPoses", "load_head_poses"]

PITCHES = tuple(range(60, 121, 10))
"""Angles up and down, degrees; 90 is level."""
YAWS = tuple(range(0, 181, 10))
"""Angles left and right, degrees; 90 is frontal."""

_SUFFIX = "Grey"


@dataclass(frozen=True)
class HeadPoses:
    """A picture of each person at each pitch and yaw.

    Attributes:
        images: ``(people, pitches, yaws, 3, height, width)``, uint8, 7 pitches and 19 yaws.
        people: A name a person, sorted.
    """

    images: Tensor
    people: tuple[str, ...]


def load_head_poses(
    people: Sequence[str] | None = None, *, folder: str | os.PathLike[str] | None = None
) -> HeadPoses:
    """The QMUL head-pose pictures (Gong et al. 1996) of some people.

    They have no public address; they are looked for as
    ``qmul/images/<person>Grey/<person>_<pitch>_<yaw>.jpg`` under the data folder, angles in three
    digits.

    Args:
        people: Names of people, as their folders without ``Grey``; all if None.
        folder: The data folder. None: ``$GPCLML_DATA``, else the user's cache.

    Returns:
        The pictures, of one size.

    Raises:
        DataError: The folder, a person or a picture is missing or damaged, or pictures have
            different sizes.
    """
    root = data_folder("qmul", folder) / "images"
    found = sorted(path.name.removesuffix(_SUFFIX) for path in root.glob(f"*{_SUFFIX}"))
    wanted = found if people is None else sorted(people)
    missing = sorted(set(wanted) - set(found))
    if missing or not wanted:
        what = f"no folders of {', '.join(missing)}" if missing else "no people"
        raise DataError(
            f"{root}: {what}. The QMUL head-pose pictures have no public address: put them there "
            f"as <person>{_SUFFIX}/<person>_<pitch>_<yaw>.jpg, or name their folder by {VARIABLE}."
        )
    images = [
        _picture(root / f"{person}{_SUFFIX}" / f"{person}_{pitch:03d}_{yaw:03d}.jpg")
        for person in wanted for pitch in PITCHES for yaw in YAWS
    ]  # fmt: skip
    sizes = sorted({image.shape for image in images})
    if len(sizes) > 1:
        raise DataError(
            f"{root}: pictures of sizes {sizes[0][:2]} and {sizes[1][:2]}, expected one size. Put "
            "the original pictures there."
        )
    stacked = torch.from_numpy(numpy.stack(images)).permute(0, 3, 1, 2)
    shape = (len(wanted), len(PITCHES), len(YAWS))
    return HeadPoses(stacked.unflatten(0, shape).contiguous(), tuple(wanted))


def _picture(path: Path) -> numpy.ndarray:
    from PIL import Image

    try:
        with Image.open(path, formats=["JPEG"]) as image:
            return numpy.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path}: no picture that can be read ({error}). Put a whole copy there."
        ) from error
