"""The cells of a sweep, checked before any of them is computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._commands import check_device
from benchmarks.bo.problems import FUNCTIONS
from benchmarks.bo.surrogates import SURROGATES, has_network
from gpclml.errors import ArgumentError, UnknownNameError

__all__ = ["Settings", "make_grid"]

_OBJECTIVES = ("clml", "lml", "loo")  # of benchmarks.uci.objectives


@dataclass(frozen=True)
class Settings:
    """What a sweep is run with: every combination of these.

    Attributes:
        functions: Names of test functions.
        surrogates: Names of surrogates.
        objectives: Objectives that they are fitted under.
        seeds: Number of seeds, 0, 1, ....
        iterations: Evaluations after the initial ones.
        steps: Adam steps at each fit, of a surrogate with a network.
        device: Where models are fitted.
    """

    functions: tuple[str, ...] = tuple(FUNCTIONS)
    surrogates: tuple[str, ...] = ("single-task", "deep")
    objectives: tuple[str, ...] = ("lml", "clml", "loo")
    seeds: int = 20
    iterations: int = 20
    steps: int = 15
    device: str = "cpu"


def make_grid(**given: Any) -> list[dict[str, Any]]:
    """The cells of a sweep; ``steps`` is None in those without a network.

    Args:
        **given: Settings that replace the usual ones; None leaves them.

    Raises:
        UnknownNameError: No such function, surrogate or objective.
        ArgumentError: A number is below 1, or the device is not at hand.
    """
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    _check_names("functions", settings.functions, FUNCTIONS)
    _check_names("surrogates", settings.surrogates, SURROGATES)
    _check_names("objectives", settings.objectives, _OBJECTIVES)
    for name in ("seeds", "iterations", "steps"):
        if getattr(settings, name) < 1:
            raise ArgumentError(name, getattr(settings, name), "at least 1")
    check_device(settings.device)
    return [
        {
            "function": function, "surrogate": surrogate, "objective": objective, "seed": seed,
            "iterations": settings.iterations,
            "steps": settings.steps if has_network(surrogate) else None,
            "device": settings.device,
        }
        for seed, function, surrogate, objective in itertools.product(
            range(settings.seeds), settings.functions, settings.surrogates, settings.objectives
        )
    ]  # fmt: skip


def _check_names(argument: str, names: Sequence[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise UnknownNameError(argument, name, known)
