"""Labelled images by name, and pictures of heads at known angles."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
from torch import Tensor

from gpclml._utils.arguments import check_classes, check_counts, checked
from gpclml.datasets._image_formats import (
    EMNIST_CLASSES,
    Read,
    opened_image,
    read_cub,
    read_emnist,
    read_idx_images,
    read_mini_imagenet,
    read_omniglot,
)
from gpclml.datasets.sources import VARIABLE, data_folder, fetch_file, image_files
from gpclml.errors import DataError, ShapeError, UnknownNameError

__all__ = [
    "PITCHES",
    "YAWS",
    "HeadPoses",
    "LabelledImages",
    "image_names",
    "load_cub",
    "load_emnist",
    "load_head_poses",
    "load_images",
    "load_mini_imagenet",
    "load_omniglot",
]

_DIGITS = tuple(str(digit) for digit in range(10))

PITCHES = tuple(range(60, 121, 10))
"""Angles up and down, degrees; 90 is level."""

YAWS = tuple(range(0, 181, 10))
"""Angles left and right, degrees; 90 is frontal."""

_SUFFIX = "Grey"
_SIDE = 84  # of photographs


@checked
@dataclass(frozen=True)
class LabelledImages:
    """Labelled images, whose classes may be in groups, such as the characters of alphabets.

    Attributes:
        name: Name of the data set.
        images: Images, ``(N, channels, height, width)``, uint8; ink or object is bright on 0.
        labels: Class of each image, from 0, ``(N,)``.
        class_names: Name of each class.
        class_groups: Group of each class; empty if classes have no groups.
        source: Origin of the images.
        licence: Licence that the source states.

    Raises:
        ShapeError: If the shapes do not fit each other.
        ArgumentError: If a label is no integer from 0 to the number of class names less 1.
    """

    name: str
    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...] = ()
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            got = f"shape {tuple(self.images.shape)} of {self.images.dtype}"
            raise ShapeError("images", got, "(N, channels, height, width) of torch.uint8")
        if self.labels.shape != self.images.shape[:1]:
            raise ShapeError("labels", tuple(self.labels.shape), f"({len(self.images)},)")
        check_classes("labels", self.labels, len(self.class_names))
        if self.class_groups and len(self.class_groups) != len(self.class_names):
            got = f"{len(self.class_groups)} for {len(self.class_names)} classes"
            raise ShapeError("class_groups", got, "one for each class, or none at all")

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of classes, sorted."""
        return tuple(sorted(set(self.class_groups)))

    def of_groups(self, groups: Sequence[str]) -> LabelledImages:
        """The images of some groups, whose classes keep their numbers and names.

        Args:
            groups: Names of :attr:`groups`.

        Raises:
            UnknownNameError: A group is not known.
        """
        for group in groups:
            if group not in self.groups:
                raise UnknownNameError("groups", group, self.groups)
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
    return tuple(sorted({*image_files(), "digits", *_ARCHIVES}))


def load_images(
    name: str, *, folder: str | os.PathLike[str] | None = None, progress: bool | None = None
) -> LabelledImages:
    """Loads labelled images by name from the data folder; missing files are downloaded.

    - ``"cub"`` and ``"mini-imagenet"``: :func:`load_cub` of ``cub/CUB_200_2011.tgz`` and
      :func:`load_mini_imagenet` of ``mini-imagenet/mini-imagenet.tar`` in the data folder, which
      are not downloaded;
    - ``"digits"``: 1797 digits of 8 x 8 pixels, which ship with scikit-learn;
    - ``"emnist"``: test images of EMNIST's 62 digits and letters, 28 x 28; other splits by
      :func:`load_emnist`;
    - ``"mnist"`` and ``"mnist-test"``: the 60,000 training and 10,000 test digits, 28 x 28;
    - ``"omniglot"``: 1623 characters of 50 alphabets, 20 drawings each, scaled to 28 x 28; and
      ``"omniglot-background"``, ``"omniglot-evaluation"``, its 30 and 20 alphabets;
    - ``"omniglot-small"``: 242 characters of 8 of its alphabets: the two small background sets,
      without duplicates.

    Args:
        name: One of ``image_names()``.
        folder: The data folder. None: ``$GPCLML_DATA``, else the user's cache.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Raises:
        UnknownNameError: The name is not known; the message lists the nearest names.
        DataError: A file is corrupt or cannot be downloaded.
    """
    if name == "digits":
        return _digits()
    if name in _ARCHIVES:
        file, load = _ARCHIVES[name]
        return load(data_folder(name, folder) / file)
    if name not in image_files():
        raise UnknownNameError("name", name, image_names())
    files = image_files()[name]
    paths = [fetch_file(one, data_folder(one.folder, folder), progress) for one in files]
    source, licence = files[0].source, files[0].licence
    if name.startswith("omniglot"):
        return load_omniglot(paths, name, source, licence)
    if name == "emnist":
        return load_emnist(paths[0], name=name, source=source, licence=licence)
    images, labels = read_idx_images(*paths)
    classes = tuple(str(label) for label in labels.unique().tolist())
    return LabelledImages(name, images, labels, classes, (), source, licence)


def load_omniglot(
    archives: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    name: str = "omniglot",
    source: str = "",
    licence: str = "",
) -> LabelledImages:
    """Loads the characters of original Omniglot archives, grouped by alphabet, 28 x 28.

    Args:
        archives: One path or several, e.g. of ``images_background.zip`` and
            ``images_evaluation.zip``.
        name: Name of the data set.
        source: Origin of the archives.
        licence: Licence that the source states.

    Raises:
        DataError: An archive is missing, damaged or not of Omniglot.
    """
    paths = [archives] if isinstance(archives, str | os.PathLike) else archives
    images, labels, names, alphabets = read_omniglot([Path(path) for path in paths])
    return LabelledImages(name, images, labels, names, alphabets, source, licence)


def load_emnist(
    archive: str | os.PathLike[str],
    split: str = "byclass",
    part: str = "test",
    name: str = "emnist",
    source: str = "",
    licence: str = "",
) -> LabelledImages:
    """Loads a split of the original EMNIST archive, 28 x 28, upright.

    Args:
        archive: Path of the original ``gzip.zip``.
        split: ``"balanced"``, ``"byclass"``, ``"bymerge"``, ``"digits"``, ``"letters"`` or
            ``"mnist"``.
        part: ``"train"`` or ``"test"``.
        name: Name of the data set.
        source: Origin of the archive.
        licence: Licence that the source states.

    Raises:
        UnknownNameError: Split or part is not known.
        DataError: The archive is missing, damaged or not of EMNIST.
    """
    images, labels = read_emnist(archive, split, part)
    return LabelledImages(name, images, labels, EMNIST_CLASSES[split], (), source, licence)


def load_cub(archive: str | os.PathLike[str], size: int = _SIDE) -> LabelledImages:
    """Loads the birds of Caltech-UCSD (Wah et al. 2011), 200 species, in colour.

    Photographs are scaled to squares of 1.15 times the size, the middle of which is taken (Chen
    et al. 2019). Groups are ``"train"``, ``"validation"`` and ``"test"``, of 100, 50 and 50
    species.

    Args:
        archive: Path of the original ``CUB_200_2011.tgz``, which is not extracted.
        size: Pixels a side.

    Raises:
        DataError: The archive is missing, damaged or of another layout.
    """
    return _photographs("cub", read_cub, archive, size)


def load_mini_imagenet(archive: str | os.PathLike[str], size: int = _SIDE) -> LabelledImages:
    """Loads miniImageNet (Vinyals et al. 2016): 100 classes of 600 photographs, in colour.

    Scaled and cut as those of :func:`load_cub`. Groups are ``"train"``, ``"validation"`` and
    ``"test"``, of 64, 16 and 20 classes (Ravi and Larochelle 2017). With 84 pixels a side they take
    1.3 GB, twice that while they are loaded.

    Args:
        archive: Path of a zip or tar archive of ``train.csv``, ``val.csv`` and ``test.csv``, lists
            with columns ``filename`` and ``label``, and of ``images/<filename>``; not extracted.
        size: Pixels a side.

    Raises:
        DataError: The archive is missing, damaged or of another layout.
    """
    return _photographs("mini-imagenet", read_mini_imagenet, archive, size)


def _photographs(
    name: str,
    read: Callable[[str | os.PathLike[str], int], Read],
    archive: str | os.PathLike[str],
    size: int,
) -> LabelledImages:
    check_counts(size=size)
    images, labels, names, groups = read(archive, size)
    return LabelledImages(name, images, labels, names, groups, str(archive))


_ARCHIVES: dict[str, tuple[str, Callable[[Path], LabelledImages]]] = {
    "cub": ("CUB_200_2011.tgz", load_cub),
    "mini-imagenet": ("mini-imagenet.tar", load_mini_imagenet),
}  # files in folders of these names, which are not downloaded


def load_head_poses(
    people: str | Sequence[str] | None = None, *, folder: str | os.PathLike[str] | None = None
) -> HeadPoses:
    """Loads the QMUL head-pose pictures (Gong et al. 1996) of some people.

    They have no public address. They are expected in the data folder as
    ``qmul/images/<person>Grey/<person>_<pitch>_<yaw>.jpg``, with angles of three digits.

    Args:
        people: Name of one person, or of several, those of their folders without ``Grey``; all if
            None.
        folder: The data folder. None: ``$GPCLML_DATA``, else the user's cache.

    Returns:
        The pictures, of one size.

    Raises:
        DataError: The folder, a person or a picture is missing or damaged, or pictures have
            different sizes.
    """
    root = data_folder("qmul", folder) / "images"
    found = sorted(path.name.removesuffix(_SUFFIX) for path in root.glob(f"*{_SUFFIX}"))
    people = [people] if isinstance(people, str) else people
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


def _picture(path: Path) -> numpy.ndarray:
    with opened_image(path, "JPEG", str(path)) as image:
        return numpy.asarray(image.convert("RGB"))
