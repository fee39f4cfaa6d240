"""Where the tasks of the studies come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpclml import datasets
from gpclml.meta import HeadPoseTasks, ImageTasks, PeriodicTasks, RotationTasks, Tasks

__all__ = [
    "Sources", "characters", "digits", "head_poses", "part_of_omniglot", "periodic", "rotation",
]  # fmt: skip

Load = Callable[[], datasets.LabelledImages]
Make = Callable[[int, int], "Sources"]

_QUERIES = 15  # of the 20 drawings of a character, which leaves five shots
_VALIDATION, _TEST = ("Latin",), ("Sanskrit", "Tagalog")  # alphabets of the part of Omniglot
_TEST_PEOPLE = ("AndreeaV", "RichardB", "SarahL", "TasosH", "YogeshR")
_TRAIN_YAWS = 10  # of 19, where tests go out of range


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


def part_of_omniglot(part: str) -> Load:
    """Loads alphabets of the small Omniglot archives.

    Args:
        part: ``"train"``, ``"validation"`` or ``"test"``: five, one and two alphabets.
    """

    def load() -> datasets.LabelledImages:
        data = datasets.load_images("omniglot-small", progress=False)
        held_out = {"validation": _VALIDATION, "test": _TEST}
        rest = [one for one in data.groups if one not in (*_VALIDATION, *_TEST)]
        return data.of_groups(held_out.get(part, rest))

    return load


def characters(train: Load, validation: Load, test: Load) -> Make:
    """5-way tasks of characters; each quarter turn is a class of its own in training.

    Args:
        train: Loads the images to learn from.
        validation: Those to choose by.
        test: Those to test on.
    """

    def make(shots: int, seed: int) -> Sources:
        return Sources(
            train=_image_tasks(train(), shots, 3 * seed, rotations=True),
            validation=_image_tasks(validation(), shots, 3 * seed + 1),
            test=_image_tasks(test(), shots, 3 * seed + 2),
        )

    return make


def rotation(shots: int, seed: int) -> Sources:
    """Angles of turned characters of the part of Omniglot."""
    train, validation, test = (
        RotationTasks(part_of_omniglot(part)().images, shots, seed=3 * seed + place)
        for place, part in enumerate(("train", "validation", "test"))
    )
    return Sources(train, validation, test)


def periodic(out_of_range: bool) -> Make:
    """Sine waves.

    Args:
        out_of_range: Whether test points go beyond the range of support points.
    """

    def make(shots: int, seed: int) -> Sources:
        train, validation, test = (
            PeriodicTasks(shots, 50, out_of_range=beyond, seed=3 * seed + place)
            for place, beyond in enumerate((False, False, out_of_range))
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
        everyone = datasets.load_head_poses()
        rows = [place for place, one in enumerate(everyone.people) if one not in _TEST_PEOPLE]
        tested = [place for place, one in enumerate(everyone.people) if one in _TEST_PEOPLE]
        yaws = _TRAIN_YAWS if out_of_range else 19
        return Sources(
            train=HeadPoseTasks(everyone.images[rows], shots, yaws=yaws, seed=3 * seed),
            validation=None,
            test=HeadPoseTasks(
                everyone.images[tested], shots, support_yaws=yaws, seed=3 * seed + 2
            ),
        )

    return make


def digits(shots: int, seed: int) -> Sources:
    """3-way tasks of scikit-learn's digits."""
    data = datasets.load_images("digits")

    def tasks(low: int, high: int, place: int) -> ImageTasks:
        rows = (data.labels >= low) & (data.labels < high)
        some = replace(data, images=data.images[rows], labels=data.labels[rows])
        return _image_tasks(some, shots, 3 * seed + place, ways=3, rotations=place == 0)

    return Sources(tasks(0, 6, 0), None, tasks(6, 10, 2))


def _image_tasks(
    data: datasets.LabelledImages, shots: int, seed: int, *, ways: int = 5, rotations: bool = False
) -> ImageTasks:
    return ImageTasks(
        data.images, data.labels, ways=ways, shots=shots, queries=_QUERIES, rotations=rotations,
        seed=seed,
    )  # fmt: skip
