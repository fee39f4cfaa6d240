"""Labelled images by name, and pictures of heads at known angles."""

from __future__ import annotations

import csv
import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from benchmarks.data.files import VARIABLE, DataFile, data_files, data_folder, fetch
from gpclml.errors import DataError, UnknownNameError

PITCHES = tuple(range(60, 121, 10))
"""Angles up and down, degrees; 90 is level."""

YAWS = tuple(range(0, 181, 10))
"""Angles left and right, degrees; 90 is frontal."""

_CHARACTER, _PHOTOGRAPH = 28, 84  # pixels a side
_OVERSIZE = 1.15  # the side that a photograph is scaled to, over the side that is cut from it
_LISTS = {"train.csv": "train", "val.csv": "validation", "test.csv": "test"}
_SUFFIX = "Grey"


@dataclass(frozen=True)
class LabelledImages:
    """Labelled images, whose classes may be in groups, such as the characters of alphabets.

    Attributes:
        images: Images, ``(N, channels, height, width)``, uint8; ink or object is bright on 0.
        labels: Class of each image, from 0, ``(N,)``.
        class_groups: Group of each class; empty if classes have no groups.
    """

    images: Tensor
    labels: Tensor
    class_groups: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of classes, sorted."""
        return tuple(sorted(set(self.class_groups)))

    def select_groups(self, groups: Sequence[str]) -> LabelledImages:
        """The images of some groups, whose classes keep their numbers."""
        inside = torch.tensor([group in groups for group in self.class_groups])
        rows = inside[self.labels]
        return replace(self, images=self.images[rows], labels=self.labels[rows])


@dataclass(frozen=True)
class HeadPoses:
    """Pictures of people's heads, one for each person, pitch and yaw.

    Attributes:
        images: Pictures, ``(people, 7, 19, 3, height, width)``, uint8, for 7 pitches and 19 yaws.
        people: Name of each person, sorted.
    """

    images: Tensor
    people: tuple[str, ...]


def image_names() -> tuple[str, ...]:
    """Names of the data sets that :func:`load_images` knows, sorted."""
    known = (name for name, [file, *_] in data_files().items() if _reader(file) is not None)
    return tuple(sorted({*known, "digits"}))


def load_images(name: str) -> LabelledImages:
    """Loads labelled images by name from the data folder; archives are not extracted.

    - ``"cifar10"``, ``"cifar10-test"``, ``"cifar100"``, ``"cifar100-test"``: 50,000 and 10,000
      images of 10 or 100 classes, 32 x 32, in colour;
    - ``"cifar10-part"``, ``"cifar10-part-test"``: 8000 and 2000 images of CIFAR-10;
    - ``"cub"``: birds of Caltech-UCSD, 84 x 84, in colour; groups ``"train"``, ``"validation"``,
      ``"test"`` of 100, 50 and 50 species (Chen et al. 2019);
    - ``"cyrillic"``: 42 handwritten letters, 100 images each, 28 x 28;
    - ``"digits"``: 1797 digits of 8 x 8 pixels, which come with scikit-learn;
    - ``"emnist"``: test images of EMNIST's 62 digits and letters, 28 x 28;
    - ``"fashion"``, ``"fashion-test"``: 60,000 and 10,000 images of Fashion-MNIST's ten kinds of
      clothes, 28 x 28; ``"fashion-part"``: 900 of them;
    - ``"mini-imagenet"``: 600 photographs each of 100 classes, 84 x 84, in colour; groups
      ``"train"``, ``"validation"``, ``"test"`` of 64, 16 and 20 classes; 1.3 GB, twice that
      while they are loaded;
    - ``"mnist"``, ``"mnist-test"``: 60,000 and 10,000 digits, 28 x 28;
    - ``"omniglot"``: 1623 characters of 50 alphabets, 20 drawings each, scaled to 28 x 28; groups
      are alphabets; ``"omniglot-background"`` and ``"omniglot-evaluation"`` are 30 and 20 of them,
      ``"omniglot-small"`` 8: the two small background sets, without duplicates.

    Raises:
        UnknownNameError: The name is not known; the message lists the nearest names.
        DataError: A file is missing and cannot be downloaded, or is another one.
    """
    if name == "digits":
        images, labels = load_digits(return_X_y=True)
        pictures = torch.as_tensor(images).reshape(-1, 1, 8, 8) * (255 / 16)
        return LabelledImages(pictures.round().to(torch.uint8), torch.as_tensor(labels).long())
    if name not in image_names():
        raise UnknownNameError("name", name, image_names())
    read = _reader(data_files()[name][0])
    assert read is not None  # of a name that is known
    return read(fetch(name))


def _read_arrays(paths: list[Path]) -> LabelledImages:
    """Images ``(N, height, width)`` or ``(N, height, width, 3)`` and labels in a numpy file."""
    with np.load(paths[0]) as arrays:
        images, labels = torch.tensor(arrays["images"]), torch.tensor(arrays["labels"]).long()
    images = images.unsqueeze(1) if images.ndim == 3 else images.movedim(-1, 1)
    return LabelledImages(images.contiguous(), labels)


def _read_mnist(paths: list[Path]) -> LabelledImages:
    images, labels = (_idx(path.read_bytes()) for path in paths)
    return LabelledImages(images.unsqueeze(1), labels.long())


def _read_cifar(paths: list[Path], ends: tuple[str, ...], label: int) -> LabelledImages:
    """Records of bytes: one or two labels, and the pixels of a red, a green and a blue image.

    Args:
        paths: The archive, whose files are read in the order of their names.
        ends: Ends of the names of its files.
        label: Index of the label among the bytes of a record, which is followed by the pixels.
    """
    body = b"".join(body for _, body in sorted(_archived(paths[0], *ends)))
    rows = torch.tensor(np.frombuffer(body, np.uint8)).reshape(-1, label + 1 + 3 * 32 * 32)
    images = rows[:, label + 1 :].reshape(-1, 3, 32, 32)
    return LabelledImages(images.contiguous(), rows[:, label].long())


def _read_emnist(paths: list[Path]) -> LabelledImages:
    """Its pixels are stored one column after another."""
    with zipfile.ZipFile(paths[0]) as archive:
        images, labels = (
            _idx(archive.read(f"gzip/emnist-byclass-test-{kind}-ubyte.gz"))
            for kind in ("images-idx3", "labels-idx1")
        )
    return LabelledImages(images.mT.unsqueeze(1).contiguous(), labels.long())


def _idx(body: bytes) -> Tensor:
    """An array of unsigned bytes in the idx format: its sizes are big-endian 32-bit integers."""
    body = gzip.decompress(body)
    # The fourth byte is the number of dimensions.
    start = 4 + 4 * body[3]
    shape = struct.unpack(f">{body[3]}I", body[4:start])
    return torch.tensor(np.frombuffer(body, np.uint8, offset=start).reshape(shape))


def _read_omniglot(paths: list[Path]) -> LabelledImages:
    """Drawings, black on white, are inverted and scaled; the small archives share some."""
    drawings: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(name for name in archive.namelist() if name.endswith(".png")):
                alphabet, character, drawing = PurePosixPath(name).parts[-3:]
                with Image.open(io.BytesIO(archive.read(name))) as image:
                    small = image.convert("L").resize(
                        (_CHARACTER, _CHARACTER), Image.Resampling.LANCZOS
                    )
                # The small archives share some drawings: a name is read once.
                drawn_before = drawings.setdefault((alphabet, character), {})
                drawn_before[drawing] = 255 - np.asarray(small)[..., None]
    return _joined({key: (key[0], list(drawn.values())) for key, drawn in drawings.items()})


def _read_cub(paths: list[Path]) -> LabelledImages:
    """Species in the order of their numbers are of the first group and of the others in turn."""
    birds: dict[str, list[np.ndarray]] = {}
    for name, body in _archived(paths[0], ".jpg"):
        birds.setdefault(PurePosixPath(name).parts[-2], []).append(_photograph(body))
    # As Chen et al. (2019): every second species trains, the others take turns.
    groups = cycle(("train", "validation", "train", "test"))
    return _joined({species: (next(groups), birds[species]) for species in sorted(birds)})


def _read_mini_imagenet(paths: list[Path]) -> LabelledImages:
    """The archive has ``images/<filename>``, and lists with columns ``filename`` and ``label``."""
    labels: dict[str, str] = {}
    classes: dict[str, tuple[str, list[np.ndarray]]] = {}
    for name, body in _archived(paths[0], *_LISTS):
        for row in csv.DictReader(body.decode().splitlines()):
            labels[row["filename"]] = row["label"]
            classes.setdefault(row["label"], (_LISTS[PurePosixPath(name).name], []))
    count = 0
    for name, body in _archived(paths[0], ".jpg"):
        label = labels.get(PurePosixPath(name).name)
        if label is not None:
            classes[label][1].append(_photograph(body))
            count += 1
    if count < len(labels):
        raise DataError(
            f"{paths[0]}: {len(labels) - count} of {len(labels)} photographs that are listed are "
            "not in it. Put a whole copy there."
        )
    return _joined(classes)


_READERS: Mapping[str, Callable[[list[Path]], LabelledImages]] = {
    "cifar10": partial(_read_cifar, ends=tuple(f"batch_{k}.bin" for k in range(1, 6)), label=0),
    "cifar10-test": partial(_read_cifar, ends=("test_batch.bin",), label=0),
    # The first label is that of one of twenty groups of classes.
    "cifar100": partial(_read_cifar, ends=("train.bin",), label=1),
    "cifar100-test": partial(_read_cifar, ends=("test.bin",), label=1),
    "cub": _read_cub, "emnist": _read_emnist, "fashion_mnist": _read_mnist,
    "mini-imagenet": _read_mini_imagenet, "mnist": _read_mnist, "omniglot": _read_omniglot,
}  # fmt: skip
"""What reads the files of a data set, or those in a folder of the data folder."""


def _reader(file: DataFile) -> Callable[[list[Path]], LabelledImages] | None:
    """What reads a data set that begins with this file; None where it has no images."""
    if file.path.suffix == ".npz":
        return _read_arrays
    return _READERS.get(file.name, _READERS.get(file.folder))


def _archived(archive: Path, *ends: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of files in a tar archive, as they lie in it."""
    with tarfile.open(archive) as file:
        for info in file:
            if info.isfile() and info.name.endswith(ends):
                yield info.name, cast(IO[bytes], file.extractfile(info)).read()


def _photograph(body: bytes) -> np.ndarray:
    """The middle of a photograph that is scaled to a square a little larger."""
    side = int(_OVERSIZE * _PHOTOGRAPH)
    start = (side - _PHOTOGRAPH) // 2
    with Image.open(io.BytesIO(body)) as image:
        scaled = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
        return np.asarray(scaled.crop((start, start, start + _PHOTOGRAPH, start + _PHOTOGRAPH)))


def _joined(classes: Mapping[Any, tuple[str, list[np.ndarray]]]) -> LabelledImages:
    """The group and the pictures ``(height, width, channels)`` of each class, classes sorted."""
    ordered = [classes[key] for key in sorted(classes)]
    images = np.stack([picture for _, pictures in ordered for picture in pictures])
    counts = torch.tensor([len(pictures) for _, pictures in ordered])
    labels = torch.arange(len(ordered)).repeat_interleave(counts)
    groups = tuple(group for group, _ in ordered)
    return LabelledImages(torch.from_numpy(images).movedim(-1, 1).contiguous(), labels, groups)


def load_head_poses() -> HeadPoses:
    """Loads the QMUL head-pose pictures (Gong et al. 1996) from ``qmul`` in the data folder.

    They have no public address. They are expected as
    ``images/<person>Grey/<person>_<pitch>_<yaw>.jpg``, with angles of three digits.

    Raises:
        DataError: There are none.
    """
    root = data_folder() / "qmul" / "images"
    people = sorted(path.name.removesuffix(_SUFFIX) for path in root.glob(f"*{_SUFFIX}"))
    if not people:
        raise DataError(
            f"{root}: no people. The QMUL head-pose pictures have no public address: put them "
            f"there as <person>{_SUFFIX}/<person>_<pitch>_<yaw>.jpg, or name their data folder by "
            f"{VARIABLE}."
        )
    images = []
    for person, pitch, yaw in product(people, PITCHES, YAWS):
        file = f"{person}{_SUFFIX}/{person}_{pitch:03d}_{yaw:03d}.jpg"
        with Image.open(root / file) as image:
            images.append(np.asarray(image.convert("RGB")))
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    shape = (len(people), len(PITCHES), len(YAWS))
    return HeadPoses(stacked.unflatten(0, shape).contiguous(), tuple(people))
