"""Readers of archives of photographs: CUB-200-2011 and miniImageNet."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

import numpy
import torch
from torch import Tensor

from gpclml.datasets._image_formats import archive_entries, opened_image
from gpclml.errors import DataError

__all__ = ["PARTS", "Read", "read_cub", "read_mini_imagenet"]

PARTS = ("train", "validation", "test")
"""The groups of classes that few-shot papers learn from, choose by and test on."""

_OVERSIZE = 1.15  # the side that a photograph is scaled to, over the side that is cut from it
_LISTS = {"train.csv": "train", "val.csv": "validation", "test.csv": "test"}

Read = tuple[Tensor, Tensor, tuple[str, ...], tuple[str, ...]]


def read_cub(archive: str | os.PathLike[str], size: int) -> Read:
    """The birds of ``CUB_200_2011.tgz``, ``images/<number>.<species>/<file>.jpg`` in it.

    Of the species in the order of their numbers every second one is of the first part, the others
    are of the second and the third in turn (Chen et al. 2019).
    """
    found: dict[str, list[numpy.ndarray]] = {}
    for name, body in archive_entries(archive, _is_bird):
        species = PurePosixPath(name).parts[-2]
        found.setdefault(species, []).append(_picture(f"{archive}: the entry {name}", body, size))
    if not found:
        raise DataError(
            f"{archive}: no images/<number>.<species>/<file>.jpg in it. Put the original "
            "CUB_200_2011.tgz there."
        )
    parts = {species: PARTS[(0, 1, 0, 2)[place % 4]] for place, species in enumerate(sorted(found))}
    return _joined(found, parts)


def read_mini_imagenet(archive: str | os.PathLike[str], size: int) -> Read:
    """The photographs of miniImageNet by the lists of Ravi and Larochelle (2017).

    The archive has ``train.csv``, ``val.csv`` and ``test.csv`` of columns ``filename`` and
    ``label``, and ``images/<filename>``. Photographs that are in no list are passed over.
    """
    labels: dict[str, str] = {}
    parts: dict[str, str] = {}
    lists = {}
    for name, body in archive_entries(archive, lambda name: PurePosixPath(name).name in _LISTS):
        lists[PurePosixPath(name).name] = body
    for name, part in _LISTS.items():
        if name not in lists:
            raise DataError(
                f"{archive}: no {name} in it. Put an archive of miniImageNet there with train.csv, "
                "val.csv, test.csv and the folder images."
            )
        for row in _rows(archive, name, lists[name]):
            file, label = row["filename"], row["label"]
            if file in labels or parts.setdefault(label, part) != part:
                raise DataError(
                    f"{archive}: {name} lists {file} of {label}, and another row the same "
                    "photograph, or another list the same class. Put the lists of Ravi and "
                    "Larochelle (2017) into the archive."
                )
            labels[file] = label
    found: dict[str, list[numpy.ndarray]] = {label: [] for label in parts}
    read = set()
    for name, body in archive_entries(archive, lambda name: PurePosixPath(name).name in labels):
        file = PurePosixPath(name).name
        read.add(file)
        found[labels[file]].append(_picture(f"{archive}: the entry {name}", body, size))
    missing = sorted(labels.keys() - read)
    if missing:
        raise DataError(
            f"{archive}: {len(missing)} of {len(labels)} photographs that are listed are not in "
            f"it, {missing[0]} first. Put a whole copy there."
        )
    return _joined(found, parts)


def _is_bird(name: str) -> bool:
    parts = PurePosixPath(name).parts[-3:]
    return len(parts) == 3 and parts[0] == "images" and parts[2].endswith(".jpg") and (
        parts[1][:3].isdigit() and parts[1][3:4] == "."
    )  # fmt: skip


def _rows(archive: object, name: str, body: bytes) -> Iterable[dict[str, str]]:
    try:
        rows = list(csv.DictReader(body.decode("utf-8").splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{archive}: {name} cannot be read ({error}).") from error
    if not rows or not {"filename", "label"} <= rows[0].keys() or None in rows[0].values():
        raise DataError(
            f"{archive}: {name} has no rows of filename and label. Put the lists of Ravi and "
            "Larochelle (2017) into the archive."
        )
    return rows


def _joined(found: Mapping[str, list[numpy.ndarray]], parts: Mapping[str, str]) -> Read:
    names = tuple(sorted(found))
    images = torch.from_numpy(numpy.stack([one for name in names for one in found[name]]))
    counts = torch.tensor([len(found[name]) for name in names])
    labels = torch.arange(len(names)).repeat_interleave(counts)
    groups = tuple(parts[name] for name in names)
    return images.permute(0, 3, 1, 2).contiguous(), labels, names, groups


def _picture(origin: str, body: bytes, size: int) -> numpy.ndarray:
    """The middle of a photograph that is scaled to a square a little larger."""
    from PIL.Image import Resampling

    side = int(_OVERSIZE * size)
    start = (side - size) // 2
    with opened_image(io.BytesIO(body), "JPEG", origin) as image:
        scaled = image.convert("RGB").resize((side, side), Resampling.BILINEAR)
        return numpy.asarray(scaled.crop((start, start, start + size, start + size)))
