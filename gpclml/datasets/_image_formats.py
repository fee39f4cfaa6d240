"""Readers of image files: idx, and archives of EMNIST, Omniglot, CUB-200-2011 and miniImageNet."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import os
import re
import string
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, cast

import numpy
import torch
from torch import Tensor

from gpclml.errors import DataError, UnknownNameError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "EMNIST_CLASSES",
    "PARTS",
    "Read",
    "archive_entries",
    "opened_image",
    "parse_idx",
    "read_cub",
    "read_emnist",
    "read_idx",
    "read_idx_images",
    "read_mini_imagenet",
    "read_omniglot",
]

_UNSIGNED_BYTES = 8
_MERGED = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")

EMNIST_CLASSES = {
    "balanced": _MERGED,
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "bymerge": _MERGED,
    "digits": tuple(string.digits),
    "letters": tuple(string.ascii_uppercase),
    "mnist": tuple(string.digits),
}
"""Classes of each split of EMNIST (Cohen et al. 2017, Table II). In the merged splits small letters
that look like capitals share their class, in ``"letters"`` all do."""

_ENTRY = re.compile(r"(?P<alphabet>[^/]+)/(?P<character>character\d+)/(?P<drawing>\d+_\d+)\.png")
_SIZE = 28  # pixels a side of a character
_MOST_PIXELS = 2**26  # of an image: an archive may claim anything


def read_idx_images(
    images: str | os.PathLike[str], labels: str | os.PathLike[str]
) -> tuple[Tensor, Tensor]:
    """Images ``(N, 1, height, width)``, uint8, and labels ``(N,)`` from the files of MNIST."""
    return _paired_images(read_idx(images), read_idx(labels), f"{images} and {labels}")


def read_emnist(
    archive: str | os.PathLike[str], split: str = "byclass", part: str = "test"
) -> tuple[Tensor, Tensor]:
    """Upright images ``(N, 1, 28, 28)``, uint8, and labels from 0; the archive is not extracted."""
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
    pictures, classes = _paired_images(upright, labels, f"{archive}: {' and '.join(names)}")
    classes -= 1 if split == "letters" else 0
    last = len(EMNIST_CLASSES[split]) - 1
    if classes.min() < 0 or classes.max() > last:
        raise DataError(
            f"{archive}: classes from {classes.min()} to {classes.max()} in {split}, where 0 to "
            f"{last} belong. Put EMNIST's gzip.zip there."
        )
    return pictures, classes


def read_omniglot(
    archives: Sequence[str | os.PathLike[str]],
) -> tuple[Tensor, Tensor, tuple[str, ...], tuple[str, ...]]:
    """Reads all characters of Omniglot's archives, such as ``images_background.zip``.

    Entries are read in memory, in the order of their names. Drawings, black on white at 105 x 105,
    are inverted and scaled to 28 x 28 by a Lanczos filter.

    Returns:
        Images ``(N, 1, 28, 28)``, uint8; classes ``(N,)``, one a character in the order of
        alphabets and characters; names of classes, ``alphabet/character``; their alphabets.
    """
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
            picture, shape = _picture(f"{archive}: the entry {name}", body)
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


def read_idx(path: str | os.PathLike[str]) -> Tensor:
    """An array of unsigned bytes from an idx file, see :func:`parse_idx`."""
    try:
        body = Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    return parse_idx(body, path)


def parse_idx(body: bytes, origin: object) -> Tensor:
    """An array of unsigned bytes in the idx format, gzipped or not; errors name its origin.

    Two zero bytes, type, number of dimensions, sizes as big-endian 32-bit integers, the numbers.
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


def _paired_images(images: Tensor, labels: Tensor, origin: str) -> tuple[Tensor, Tensor]:
    """Images ``(N, 1, height, width)`` and their labels, whose numbers are checked."""
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{origin}: shapes {tuple(images.shape)} and {tuple(labels.shape)}, where "
            "(N, height, width) and (N,) belong. Give the images and labels of one set."
        )
    return images.unsqueeze(1).contiguous(), labels.long()


def archive_entries(
    archive: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a zip or tar archive; nothing is extracted.

    Those of a zip archive are sorted by name, those of a tar archive come as they lie in it.
    """
    try:
        is_zip = zipfile.is_zipfile(archive)
        yield from (_zip_entries if is_zip else _tar_entries)(archive, wanted)
    except (
        OSError, zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError,
        RuntimeError,
    ) as error:  # fmt: skip
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{archive}: missing, cut short or not a zip or tar archive ({error}). Put a whole "
            "copy there."
        ) from error


def _zip_entries(
    archive: str | os.PathLike[str], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as file:
        for info in sorted(file.infolist(), key=lambda info: info.filename):
            _check_inside(archive, info.filename)
            if not info.is_dir() and wanted(info.filename):
                yield info.filename, file.read(info)


def _tar_entries(
    archive: str | os.PathLike[str], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as file:
        for info in file:
            _check_inside(archive, info.name)
            if not (info.isfile() or info.isdir()):
                raise DataError(
                    f"{archive}: the entry {info.name!r} is a link or a device, so it is not an "
                    "original one. Nothing was extracted; get it again from its source."
                )
            if info.isfile() and wanted(info.name):
                yield info.name, cast(IO[bytes], file.extractfile(info)).read()


def _unreadable(origin: object, error: Exception) -> DataError:
    return DataError(f"{origin}: the file cannot be read ({error}). Put a whole copy there.")


def _check_inside(archive: str | os.PathLike[str], name: str) -> None:
    if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name) or ":" in name:
        raise DataError(
            f"{archive}: the entry {name!r} leads out of the archive, so it is not an original "
            "one. Nothing was extracted; get it again from its source."
        )


@contextmanager
def opened_image(file: Path | IO[bytes], kind: str, origin: str) -> Iterator[Image]:
    """An image of a kind such as ``"PNG"``; what cannot be read within the block is a DataError."""
    from PIL import Image

    try:
        with Image.open(file, formats=[kind]) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels")
            yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{origin} is not an image that can be read ({error}). Put a whole copy there."
        ) from error


def _picture(origin: str, body: bytes) -> tuple[numpy.ndarray, tuple[int, int]]:
    from PIL.Image import Resampling

    with opened_image(io.BytesIO(body), "PNG", origin) as image:
        small = image.convert("L").resize((_SIZE, _SIZE), Resampling.LANCZOS)
        return 255 - numpy.asarray(small, dtype=numpy.uint8), image.size


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
        found.setdefault(species, []).append(
            _photograph(f"{archive}: the entry {name}", body, size)
        )
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
        found[labels[file]].append(_photograph(f"{archive}: the entry {name}", body, size))
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


def _photograph(origin: str, body: bytes, size: int) -> numpy.ndarray:
    """The middle of a photograph that is scaled to a square a little larger."""
    from PIL.Image import Resampling

    side = int(_OVERSIZE * size)
    start = (side - size) // 2
    with opened_image(io.BytesIO(body), "JPEG", origin) as image:
        scaled = image.convert("RGB").resize((side, side), Resampling.BILINEAR)
        return numpy.asarray(scaled.crop((start, start, start + size, start + size)))
