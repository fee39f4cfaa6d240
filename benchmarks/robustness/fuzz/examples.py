"""Valid arguments of every public callable, from which a fuzz makes wrong ones."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import gpclml

__all__ = ["EXAMPLES", "Example", "example", "public_callables", "same_for", "without_example"]

_NO_ROOMS = {"cli"}  # the command has tests of its own
_MODULES = (
    "gpclml.inference.held_out_densities", "gpclml.inference.observations",
    "gpclml.inference.observed_covariance", "gpclml.inference.solvers", "gpclml.inference.units",
    "gpclml.inference.missing", "gpclml.conditioning.orderings",
    "gpclml.curvature.output_likelihoods", "gpclml.kernels.networks", "gpclml.models.botorch",
)  # fmt: skip
"""Public beside what their rooms export."""


@dataclass(frozen=True)
class Example:
    """A callable and what it takes.

    Attributes:
        name: Of the callable, with its module and class.
        call: The callable itself; a method takes its object as ``self``.
        make: Makes valid arguments by name, new ones each time.
        sizes: Arguments that say how much work is done: a huge one is no wrong one.
    """

    name: str
    call: Callable
    make: Callable[[], dict[str, Any]]
    sizes: frozenset[str]

    def arguments(self) -> dict[str, Any]:
        """Valid arguments, with the defaults of those that were left out."""
        given = self.make()
        try:
            parameters = inspect.signature(self.call).parameters
        except ValueError:
            return given
        simple = int, float, str, bool, tuple
        for name, parameter in parameters.items():
            if name not in given and isinstance(parameter.default, simple):
                given[name] = parameter.default
        if "progress" in given:
            given["progress"] = False
        return given


EXAMPLES: dict[str, Example] = {}
"""All examples by name."""


def example(
    name: str, sizes: Iterable[str] = (), call: Callable | None = None
) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    """Registers what makes the arguments of a public callable.

    Args:
        name: ``module.name`` or ``module.Class.method`` below ``gpclml``.
        sizes: See :class:`Example`.
        call: What is called, if not the object of that name.
    """

    def register(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        EXAMPLES[name] = Example(name, call or _named(name), make, frozenset(sizes))
        return make

    return register


@functools.cache
def _public_modules() -> list[str]:
    modules = pkgutil.walk_packages(gpclml.__path__, "gpclml.")
    return sorted([*(info.name for info in modules if info.ispkg), *_MODULES])


def _named(name: str) -> Callable:
    module = max((m for m in _public_modules() if f"gpclml.{name}".startswith(f"{m}.")), key=len)
    path = f"gpclml.{name}".removeprefix(f"{module}.")
    return operator.attrgetter(path)(importlib.import_module(module))


def same_for(*names: str, **options: Any):
    """Registers one maker of arguments for several callables.

    Args:
        *names: As for :func:`example`.
        **options: The same.
    """

    def register(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        for name in names:
            example(name, **options)(make)
        return make

    return register


def public_callables() -> Mapping[str, Callable]:
    """All that the package's modules export and that can be called, by ``module.name``.

    Errors, warnings, records without a check of their own (dataclasses that take what they are
    given), abstract classes and names of types are left out.
    """
    found: dict[str, Callable] = {}
    packages = [
        info.name for info in pkgutil.walk_packages(gpclml.__path__, "gpclml.") if info.ispkg
    ]
    for package in sorted([*packages, *_MODULES]):
        room = package.removeprefix("gpclml.")
        if room.startswith("_") or room in _NO_ROOMS:
            continue
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if _is_fuzzed(value) and all(value is not other for other in found.values()):
                found[f"{room}.{name}"] = value
    return found


def _is_fuzzed(value: object) -> bool:
    if inspect.isclass(value):
        record = is_dataclass(value) and not hasattr(value, "__post_init__")
        left_out = issubclass(value, BaseException) or inspect.isabstract(value)
        return not (left_out or record or getattr(value, "_is_protocol", False))
    return inspect.isroutine(value) or hasattr(value, "__wrapped__")


def without_example() -> list[str]:
    """Public callables that have neither an example nor a reason to have none."""
    from benchmarks.robustness.fuzz.left_out import LEFT_OUT

    known = [example.call for example in EXAMPLES.values()]
    known += [_named(name) for name in LEFT_OUT]
    return sorted(
        name
        for name, value in public_callables().items()
        if name not in EXAMPLES and all(value is not other for other in known)
    )
