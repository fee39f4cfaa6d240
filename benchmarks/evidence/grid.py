"""The cells of each study, checked before any of them is computed, and what computes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from benchmarks._options import check_device, check_known, check_positive
from benchmarks.data import load
from benchmarks.evidence.cells import (
    ESTIMATORS,
    SIX,
    run_architecture,
    run_estimator,
    run_invariance,
    run_regression,
    run_search,
    run_size,
)
from benchmarks.evidence.training import (
    ARCHITECTURES,
    CLASSES,
    DATA,
    images,
    learning_rate,
    network,
)

_UCI = ("boston", "concrete", "energy", "yacht")
_SIZES = (25, 50, 100, 200, 400, 800)
_PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class Settings:
    """What a study is run with; epochs are steps of at most 100 images in ``training-speed``.

    Only ``architectures`` has ensembles, of so many members, and takes another learning rate
    than that of the network's family.
    """

    data: str = "digits"
    architectures: tuple[str, ...] = ARCHITECTURES
    precisions: tuple[float, ...] = (1.0,)
    num_train: int = 1000
    epochs: int = 50
    seeds: int = 3
    members: int = 5
    lr: float | None = None
    device: str = "cpu"


STUDIES: Mapping[str, Settings] = MappingProxyType(
    {
        "architectures": Settings(precisions=(100.0, 0.1, 0.001), epochs=100),
        "bounds": Settings(architectures=("mlp-32x2", "cnn-8x2"), num_train=500, seeds=1),
        "invariance": Settings("mnist-test", ("cnn-8x2",), epochs=20),
        "online": Settings(architectures=("mlp-32x2", "cnn-8x2"), precisions=_PRECISIONS),
        "training-speed": Settings(
            architectures=SIX, precisions=(0.1,), num_train=max(_SIZES), epochs=500
        ),
    }
)
"""The studies with their usual settings, which end in under 30 minutes on two cores each."""


def make_grid(study: str, **given: Any) -> list[dict[str, Any]]:
    """The cells of a study.

    Args:
        study: One of :data:`STUDIES`.
        **given: Settings that replace the study's own; None leaves them.

    Raises:
        UnknownNameError: No such study or data.
        ArgumentError: A number is out of range, or a name is none of a network.
        DataError: A file is missing.
    """
    check_known("study", [study], STUDIES)
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = replace(STUDIES[study], **chosen)
    names = ("num_train", "epochs", "seeds", "members", *([] if settings.lr is None else ["lr"]))
    check_positive(**{name: getattr(settings, name) for name in names})
    for precision in settings.precisions:
        check_positive(precisions=precision)
    check_device(settings.device)
    # Errors of data and of names of networks come before any cell is computed.
    channels = images(settings.data, settings.num_train, 0).train_x.shape[1]
    for name in settings.architectures:
        network(name, channels, DATA[settings.data][2], CLASSES, 0)
    return list(_CELLS[study](settings))


def _common(settings: Settings, study: str, seed: int) -> dict[str, Any]:
    return {
        "study": study, "data": settings.data, "num_train": settings.num_train,
        "epochs": settings.epochs, "seed": seed, "device": settings.device,
    }  # fmt: skip


def _networks(settings: Settings, study: str, *others: Sequence[Any]):
    """A cell for each seed, precision and network, and every combination of other values."""
    for seed, precision, name, *values in itertools.product(
        range(settings.seeds), settings.precisions, settings.architectures, *others
    ):
        common = _common(settings, study, seed)
        yield common | {"architecture": name, "precision": precision}, *values


def _architectures(settings: Settings):
    for (cell,) in _networks(settings, "architectures"):
        lr = learning_rate(cell["architecture"]) if settings.lr is None else settings.lr
        yield cell | {"members": settings.members, "lr": lr}


def _bounds(settings: Settings):
    names = ("structure", "batch_size", "partition", "outputs", "hessian")
    exact_fisher = [(*estimator, "ggn") for estimator in ESTIMATORS]
    empirical = [
        (structure, size, *others, "ef")
        for structure, size, *others in ESTIMATORS
        if size is None and structure != "kronecker-reduce"
    ]
    for cell, estimator in _networks(settings, "bounds", exact_fisher + empirical):
        yield cell | dict(zip(names, estimator, strict=True))


def _invariance(settings: Settings):
    for cell, turned, invariance in _networks(settings, "invariance", (0, 90), ("learned", "none")):
        yield cell | {"turned": turned, "invariance": invariance}


def _online(settings: Settings):
    for data in _UCI:
        load(data)
    # UCI sets are small: an epoch is one step.
    regression = replace(settings, epochs=60 * settings.epochs)
    for data, seed, structure in itertools.product(_UCI, range(5), ("kronecker", "full")):
        yield _common(regression, "online-regression", seed) | {
            "data": data, "num_train": None, "structure": structure, "hessian": "ggn",
            "precision": 1.0,
        }  # fmt: skip
    # Precisions that are learned start from one.
    ways = [*(("grid", given) for given in settings.precisions), ("network", 1.0), ("layer", 1.0)]
    for seed, name, (by, precision) in itertools.product(
        range(settings.seeds), settings.architectures, ways
    ):
        common = _common(settings, "online-search", seed)
        yield common | {"architecture": name, "precision": precision, "by": by}


def _training_speed(settings: Settings):
    sizes: Sequence[int] = [n for n in _SIZES if n <= settings.num_train]
    for cell, n in _networks(settings, "training-speed", sizes):
        # Epochs are counted in steps here, so that few points train as long as many.
        steps = cell.pop("epochs")
        yield cell | {
            "num_train": n, "num_pool": settings.num_train, "steps": steps,
            "lr": learning_rate(cell["architecture"]),
        }  # fmt: skip


_CELLS = {
    "architectures": _architectures, "bounds": _bounds, "invariance": _invariance,
    "online": _online, "training-speed": _training_speed,
}  # fmt: skip

_FUNCTIONS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, float]]] = {
    "architectures": run_architecture,
    "bounds": run_estimator,
    "invariance": run_invariance,
    "online-regression": run_regression,
    "online-search": run_search,
    "training-speed": run_size,
}


def run_cell(cell: Mapping[str, Any]) -> dict[str, float]:
    """What a network reaches: scores by name; the cell has what its study's function asks for."""
    return _FUNCTIONS[cell["study"]](cell)
