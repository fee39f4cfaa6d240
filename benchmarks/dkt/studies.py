"""The studies: where their tasks come from, and the network that makes features of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from gpclml import datasets
from gpclml.errors import UnknownNameError
from gpclml.meta import Conv4, ImageTasks, PeriodicTasks, RotationTasks, Tasks
from gpclml.networks import MLP

__all__ = ["STUDIES", "Sources", "Study", "study_named"]

_QUERIES = 15  # of the 20 drawings of a character, which leaves five shots
_VALIDATION, _TEST = ("Latin",), ("Sanskrit", "Tagalog")  # alphabets of the part of Omniglot


@dataclass(frozen=True)
class Sources:
    """Tasks to learn from, to choose the best look by, and to test on.

    Attributes:
        train: Tasks of the training.
        validation: Those that decide which look is kept; None keeps the end.
        test: Tasks of classes or functions that training has not seen.
    """

    train: Tasks
    validation: Tasks | None
    test: Tasks


@dataclass(frozen=True)
class Study:
    """One row of results: what is trained on what.

    Attributes:
        about: What the data are, honestly.
        sources: Makes the tasks from the number of shots and a seed.
        network: Makes the backbone from a generator.
        num_features: Number of its features.
        shots: Numbers of shots, or of support points, by default.
        classes: Whether it is classification.
    """

    about: str
    sources: Callable[[int, int], Sources]
    network: Callable[[torch.Generator], torch.nn.Module]
    num_features: int
    shots: tuple[int, ...]
    classes: bool


def study_named(name: str) -> Study:
    """The study of that name.

    Raises:
        UnknownNameError: There is none.
    """
    if name not in STUDIES:
        raise UnknownNameError("study", name, STUDIES)
    return STUDIES[name]


def _omniglot(groups: tuple[str, ...] | None = None) -> datasets.LabelledImages:
    data = datasets.load_images("omniglot-small", progress=False)
    return data if groups is None else data.of_groups(groups)


def _training_alphabets() -> tuple[str, ...]:
    return tuple(one for one in _omniglot().groups if one not in (*_VALIDATION, *_TEST))


def _tasks(
    data: datasets.LabelledImages, shots: int, seed: int, *, ways: int = 5, rotations: bool = False
) -> ImageTasks:
    return ImageTasks(
        data.images, data.labels, ways=ways, shots=shots, queries=_QUERIES, rotations=rotations,
        seed=seed,
    )  # fmt: skip


def _characters(test: Callable[[], datasets.LabelledImages]) -> Callable[[int, int], Sources]:
    def sources(shots: int, seed: int) -> Sources:
        return Sources(
            train=_tasks(_omniglot(_training_alphabets()), shots, 3 * seed, rotations=True),
            validation=_tasks(_omniglot(_VALIDATION), shots, 3 * seed + 1),
            test=_tasks(test(), shots, 3 * seed + 2),
        )

    return sources


def _rotation(shots: int, seed: int) -> Sources:
    def tasks(groups: tuple[str, ...], place: int) -> RotationTasks:
        return RotationTasks(_omniglot(groups).images, shots, seed=3 * seed + place)

    return Sources(tasks(_training_alphabets(), 0), tasks(_VALIDATION, 1), tasks(_TEST, 2))


def _periodic(out_of_range: bool) -> Callable[[int, int], Sources]:
    def sources(shots: int, seed: int) -> Sources:
        def tasks(place: int, beyond: bool) -> PeriodicTasks:
            return PeriodicTasks(shots, 50, out_of_range=beyond, seed=3 * seed + place)

        return Sources(tasks(0, False), tasks(1, False), tasks(2, out_of_range))

    return sources


def _digits(shots: int, seed: int) -> Sources:
    data = datasets.load_images("digits")

    def tasks(low: int, high: int, place: int) -> ImageTasks:
        rows = (data.labels >= low) & (data.labels < high)
        return ImageTasks(
            data.images[rows], data.labels[rows], ways=3, shots=shots, queries=_QUERIES,
            seed=3 * seed + place,
        )  # fmt: skip

    return Sources(tasks(0, 6, 0), None, tasks(6, 10, 2))


def _conv4(generator: torch.Generator) -> torch.nn.Module:
    return Conv4(generator=generator)


def _digit_network(generator: torch.Generator) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), MLP([64, 64, 64], generator=generator))


def _function_network(generator: torch.Generator) -> torch.nn.Module:
    return MLP([1, 40, 40, 40], generator=generator)


STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        "digits": Study(
            "scikit-learn's 8 x 8 digits: 0 to 5 to learn from, 3-way tasks of 6 to 9 to test on",
            _digits, _digit_network, 64, (1, 5), True,
        ),
        "omniglot": Study(
            "part of Omniglot (8 alphabets): 5 to learn from, Latin to choose by, Sanskrit and "
            "Tagalog to test on, 5-way",
            _characters(lambda: _omniglot(_TEST)), _conv4, 64, (1, 5), True,
        ),
        "omniglot-to-mnist": Study(
            "5 alphabets of Omniglot to learn from, MNIST's test digits to test on, 5-way",
            _characters(lambda: datasets.load_images("mnist-test", progress=False)), _conv4, 64,
            (1, 5), True,
        ),
        "periodic": Study(
            "sine waves on [-5, 5], support points in the first numbers of shots",
            _periodic(False), _function_network, 40, (5, 10), False,
        ),
        "periodic-out-of-range": Study(
            "the same, tested on [-5, 10]", _periodic(True), _function_network, 40, (5, 10), False,
        ),
        "rotation": Study(
            "the angle of a turned character, alphabets as in omniglot, in units of 90 degrees",
            _rotation, _conv4, 64, (5, 10), False,
        ),
    }
)  # fmt: skip
"""The studies by name."""
