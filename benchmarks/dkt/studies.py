"""The studies: where their tasks come from, and the network that makes features of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from benchmarks._options import check_known
from benchmarks.data import LabelledImages, data_folder, load_head_poses
from benchmarks.data import load_images as read_images
from benchmarks.dkt.tasks import HeadPoseTasks, RotationTasks, conv3
from gpclml.kernels.networks import MLP
from gpclml.meta import Conv4, ConvBlocks, ImageTasks, PeriodicTasks, Tasks


# Archives take seconds to read, and each cell asks for them again.
@functools.lru_cache(maxsize=8)
def _loaded(name: str, folder: str) -> LabelledImages:
    return read_images(name)


def load_images(name: str) -> LabelledImages:
    """Images by name, read once by each process and data folder."""
    return _loaded(name, str(data_folder()))


Load = Callable[[], LabelledImages]
Make = Callable[..., "Sources"]  # of shots and a seed; where there are classes, of ways too

_QUERIES = 15  # of the 20 drawings of a character, which leaves five shots
_VALIDATION, _TEST = ("Latin",), ("Sanskrit", "Tagalog")  # alphabets of the part of Omniglot
_TEST_PEOPLE = ("AndreeaV", "RichardB", "SarahL", "TasosH", "YogeshR")
_TRAIN_YAWS = 10  # of 19, where tests go out of range
_FUNCTION_NETWORK = partial(MLP, [1, 40, 40, 40])


@dataclass(frozen=True)
class Sources:
    """Tasks to learn from, to choose the best look by, and to test on.

    Attributes:
        train: Tasks of the training.
        validation: Those that decide which look is kept; None keeps the end.
        test: Tasks of classes, people or functions that training has not seen.
    """

    train: Tasks
    validation: Tasks | None
    test: Tasks


def part_of_omniglot(subset: str) -> Load:
    """Loads alphabets of the small Omniglot archives.

    Args:
        subset: ``"train"``, ``"validation"`` or ``"test"``: five, one and two alphabets.
    """

    def load() -> LabelledImages:
        data = load_images("omniglot-small")
        held_out = {"validation": _VALIDATION, "test": _TEST}
        others = [group for group in data.groups if group not in (*_VALIDATION, *_TEST)]
        return data.select_groups(held_out.get(subset, others))

    return load


def pictures(train: Load, validation: Load, test: Load, turned: bool = False) -> Make:
    """Tasks of images.

    Args:
        train: Loads what is learned from.
        validation: Loads what the best look is chosen by.
        test: Loads what is tested on.
        turned: Whether each quarter turn is a class of its own in training.
    """

    def make(shots: int, seed: int, ways: int = 5) -> Sources:
        sets = enumerate((train, validation, test))
        return Sources(*(
            _image_tasks(load(), shots, 3 * seed + index, ways, turned and index == 0)
            for index, load in sets
        ))  # fmt: skip

    return make


def rotation(shots: int, seed: int) -> Sources:
    """Angles of turned characters of the part of Omniglot."""
    train, validation, test = (
        RotationTasks(part_of_omniglot(subset)().images, shots, seed=3 * seed + index)
        for index, subset in enumerate(("train", "validation", "test"))
    )
    return Sources(train, validation, test)


def periodic(out_of_range: bool) -> Make:
    """Sine waves."""

    def make(shots: int, seed: int) -> Sources:
        train, validation, test = (
            PeriodicTasks(shots, 50, out_of_range=beyond, seed=3 * seed + index)
            for index, beyond in enumerate((False, False, out_of_range))
        )
        return Sources(train, validation, test)

    return make


def head_poses(out_of_range: bool) -> Make:
    """Pitches of the heads of people.

    Args:
        out_of_range: Whether training and the support points of tests are limited to the first
            ten of 19 yaws.
    """

    def make(shots: int, seed: int) -> Sources:
        # No person is in training and test.
        everyone = load_head_poses()
        rows = [index for index, group in enumerate(everyone.people) if group not in _TEST_PEOPLE]
        tested = [index for index, group in enumerate(everyone.people) if group in _TEST_PEOPLE]
        yaws = _TRAIN_YAWS if out_of_range else 19
        train, test = everyone.images[rows], everyone.images[tested]
        return Sources(
            train=HeadPoseTasks(train, shots, yaws=yaws, seed=3 * seed),
            validation=None,
            test=HeadPoseTasks(test, shots, support_yaws=yaws, seed=3 * seed + 2),
        )

    return make


def digits(shots: int, seed: int, ways: int = 3) -> Sources:
    """Tasks of scikit-learn's digits, with mirror images of digits of training for validation."""
    # Six digits to learn from are few; their turns make 24 classes.
    data = load_images("digits")

    def tasks(low: int, high: int, index: int, mirrored: bool = False) -> ImageTasks:
        rows = (data.labels >= low) & (data.labels < high)
        images = data.images[rows].flip(-1) if mirrored else data.images[rows]
        some = replace(data, images=images, labels=data.labels[rows])
        return _image_tasks(some, shots, 3 * seed + index, ways, index < 2)

    # Training turns its digits and does not mirror them, so mirror images are new to it.
    return Sources(tasks(0, 6, 0), tasks(2, 6, 1, mirrored=True), tasks(6, 10, 2))


def _image_tasks(
    data: LabelledImages, shots: int, seed: int, ways: int, rotations: bool
) -> ImageTasks:
    return ImageTasks(
        data.images, data.labels, ways=ways, shots=shots, queries=_QUERIES, rotations=rotations,
        seed=seed,
    )  # fmt: skip


_CHOSEN_BY = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")


@dataclass(frozen=True)
class FewShotStudy:
    """One row of results: what is trained on what.

    Attributes:
        about: What the data are, honestly.
        training: What the network is trained on; studies of one name share their trainings.
        sources: Makes the tasks from the number of shots and a seed, and of ways where it is not
            the study's.
        network: Makes the backbone from a ``generator``.
        num_features: Number of its features.
        shots: Numbers of shots, or of support points, by default.
        classes: Whether it is classification.
    """

    about: str
    training: str
    sources: Make
    network: Callable[..., torch.nn.Module]
    num_features: int
    shots: tuple[int, ...]
    classes: bool

    def sources_of(self, cell: Mapping[str, Any]) -> Sources:
        """The tasks of a cell."""
        ways = () if cell.get("ways") is None else (cell["ways"],)
        return self.sources(cell["shots"], cell["seed"], *ways)


def study_named(name: str) -> FewShotStudy:
    """The study of that name.

    Raises:
        UnknownNameError: There is none.
    """
    check_known("study", [name], STUDIES)
    return STUDIES[name]


def _background(to_choose_by: bool) -> LabelledImages:
    """The alphabets of Omniglot's background to choose by, or all others."""
    data = load_images("omniglot-background")
    groups = [group for group in data.groups if (group in _CHOSEN_BY) == to_choose_by]
    return data.select_groups(groups)


def _emnist(to_choose_by: bool) -> LabelledImages:
    data = load_images("emnist")
    # Every other class validates, as a source of its own would cost another data set.
    rows = (data.labels % 2 == 0) == to_choose_by
    return LabelledImages(data.images[rows], data.labels[rows])


def _photographs(train: str, test: str) -> FewShotStudy:
    """Photographs of 84 x 84 of one set to learn from, of another or the same to test on."""

    def subset(name: str, group: str) -> LabelledImages:
        return load_images(name).select_groups([group])

    names = {"cub": "CUB-200-2011, species of birds", "mini-imagenet": "miniImageNet"}
    # All of a set is learned from where another one is tested on.
    learn = partial(load_images, train) if train != test else partial(subset, train, "train")
    other = f"its classes of validation to choose by, its test classes to test on, of {names[test]}"
    return FewShotStudy(
        f"{names[train]}: all classes to learn from; {other}, 5-way by default" if train != test
        else f"{names[train]}: 64 or 100 classes to learn from, others to choose by and to test "
        "on, 5-way by default",
        f"{train}-all" if train != test else train,
        pictures(learn, partial(subset, test, "validation"), partial(subset, test, "test")),
        partial(Conv4, channels=3), 1600, (1, 5), True,
    )  # fmt: skip


def _omniglot_part(about: str, test: Callable[[], LabelledImages]) -> FewShotStudy:
    return FewShotStudy(
        f"part of Omniglot (8 alphabets): 5 to learn from, Latin to choose by, {about}, 5-way by "
        "default",
        "omniglot-part",
        pictures(part_of_omniglot("train"), part_of_omniglot("validation"), test, turned=True),
        Conv4, 64, (1, 5), True,
    )  # fmt: skip


STUDIES: Mapping[str, FewShotStudy] = MappingProxyType(
    {
        "cub": _photographs("cub", "cub"),
        "digits": FewShotStudy(
            "scikit-learn's 8 x 8 digits: quarter turns of 0 to 5 to learn from, those of mirrored "
            "2 to 5 to choose by, 6 to 9 to test on, 3-way by default",
            "digits", digits, partial(ConvBlocks, 2, width=32), 128,
            (1, 5), True,
        ),
        "mini-imagenet": _photographs("mini-imagenet", "mini-imagenet"),
        "mini-imagenet-to-cub": _photographs("mini-imagenet", "cub"),
        "omniglot": FewShotStudy(
            "Omniglot: 25 background alphabets to learn from, 5 to choose by, the 20 evaluation "
            "alphabets to test on, 5-way by default",
            "omniglot-background",
            pictures(
                partial(_background, False), partial(_background, True),
                partial(load_images, "omniglot-evaluation"), turned=True,
            ),
            Conv4, 64, (1, 5), True,
        ),
        "omniglot-part": _omniglot_part(
            "Sanskrit and Tagalog to test on", part_of_omniglot("test"),
        ),
        "omniglot-part-to-cyrillic": _omniglot_part(
            "42 handwritten Cyrillic letters of another data set to test on",
            partial(load_images, "cyrillic"),
        ),
        "omniglot-part-to-mnist": _omniglot_part(
            "MNIST's test digits to test on", partial(load_images, "mnist-test"),
        ),
        "omniglot-to-emnist": FewShotStudy(
            "all 50 alphabets of Omniglot to learn from, every other of EMNIST's 62 digits and "
            "letters to choose by, the others to test on, 5-way by default",
            "omniglot",
            pictures(
                partial(load_images, "omniglot"), partial(_emnist, True),
                partial(_emnist, False), turned=True,
            ),
            Conv4, 64, (1, 5), True,
        ),
        "periodic": FewShotStudy(
            "sine waves on [-5, 5]", "periodic", periodic(False), _FUNCTION_NETWORK, 40, (5, 10),
            False,
        ),
        "periodic-out-of-range": FewShotStudy(
            "sine waves learned on [-5, 5], tested on [-5, 10]", "periodic", periodic(True),
            _FUNCTION_NETWORK, 40, (5, 10), False,
        ),
        "qmul": FewShotStudy(
            "QMUL head poses: the pitch of 24 people's heads to learn from, of 5 others to test on",
            "qmul", head_poses(False), conv3, 2916, (5,), False,
        ),
        "qmul-out-of-range": FewShotStudy(
            "QMUL head poses of the first ten yaws to learn from, of all 19 to test on",
            "qmul-first-yaws", head_poses(True), conv3, 2916, (5,), False,
        ),
        "rotation": FewShotStudy(
            "the angle of a turned character in units of 90 degrees, alphabets as in omniglot-part",
            "rotation", rotation, Conv4, 64, (5, 10), False,
        ),
    }
)  # fmt: skip
"""The studies by name."""
