"""Every public callable with valid arguments, or with the reason why it has none."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import gpclml
from benchmarks.robustness.fuzz.arguments import ARGUMENTS, CALLS

_NO_ROOMS = {"curvature", "gram", "inference", "linalg"}  # trust their callers
_MODULES = (
    "gpclml.evidence.bounds", "gpclml.evidence.sampling", "gpclml.evidence.training_speed",
    "gpclml.kernels.networks", "gpclml.likelihoods", "gpclml.models.botorch",
)  # fmt: skip
"""Public beside what their rooms export."""

_SIZES = {
    "ard_num_dims", "blocks", "burn_in", "count", "degree", "epochs", "every", "hyper_steps", "k",
    "look_every", "n_splits", "num_data", "num_features", "num_frequencies", "num_inputs",
    "num_mixtures", "num_samples", "queries", "repeats", "restarts", "retries", "steps", "support",
    "tasks_per_step", "validation_tasks", "width",
}  # fmt: skip
_NO_SIZES = {  # where an argument of that name is something else, or is checked against others
    "blocks": ("conditioning",),
    "num_features": ("meta",),
    "num_data": ("evidence.bounds", "fit", "mlls"),
}


@dataclass(frozen=True)
class Example:
    """A callable and a function that makes valid arguments for it, new ones each time.

    A method takes its object as ``self``.
    """

    name: str
    call: Callable
    make: Callable[[], dict[str, Any]]

    def arguments(self) -> dict[str, Any]:
        """Valid arguments, with the defaults of those that were left out."""
        # New objects at each call: a call may change what it is given.
        given = self.make()
        # Defaults of these types are arguments that a fuzzer can make wrong.
        simple = int, float, str, bool, tuple
        for name, parameter in inspect.signature(self.call).parameters.items():
            if name not in given and isinstance(parameter.default, simple):
                given[name] = parameter.default
        if "progress" in given:
            given["progress"] = False
        return given

    def is_size(self, argument: str) -> bool:
        """Whether an argument says how much work is done: then a huge one is no wrong one."""
        return argument in _SIZES and not self.name.startswith(_NO_SIZES.get(argument, ("-",)))


@functools.cache
def _packages() -> list[str]:
    modules = pkgutil.walk_packages(gpclml.__path__, "gpclml.")
    return sorted(info.name for info in modules if info.ispkg)


def _named(name: str) -> Callable:
    # The longest module that the name begins with is its own.
    modules = [*_packages(), *_MODULES]
    module = max((m for m in modules if f"gpclml.{name}".startswith(f"{m}.")), key=len)
    path = f"gpclml.{name}".removeprefix(f"{module}.")
    return operator.attrgetter(path)(importlib.import_module(module))


EXAMPLES: Mapping[str, Example] = {
    name: Example(name, CALLS.get(name) or _named(name), make)
    for names, make in ARGUMENTS.items()
    for name in ((names,) if isinstance(names, str) else names)
}
"""All examples by name."""


def public_callables() -> Mapping[str, Callable]:
    """All that the package's modules export and that can be called, by ``module.name``.

    Errors, warnings, records without a check of their own (dataclasses that take what they are
    given), abstract classes and names of types are left out.
    """
    callables: dict[str, Callable] = {}
    for package in sorted([*_packages(), *_MODULES]):
        room = package.removeprefix("gpclml.")
        if room.startswith("_") or room in _NO_ROOMS:
            continue
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if _is_called(value) and all(value is not other for other in callables.values()):
                callables[f"{room}.{name}"] = value
    return callables


def _is_called(value: object) -> bool:
    if inspect.isclass(value):
        record = is_dataclass(value) and not hasattr(value, "__post_init__")
        left_out = issubclass(value, BaseException) or inspect.isabstract(value)
        return not (left_out or record or getattr(value, "_is_protocol", False))
    return inspect.isroutine(value) or hasattr(value, "__wrapped__")


def without_example() -> list[str]:
    """Public callables that have no example."""
    known = [example.call for example in EXAMPLES.values()]
    return sorted(
        name
        for name, value in public_callables().items()
        if name not in EXAMPLES and all(value is not other for other in known)
    )
