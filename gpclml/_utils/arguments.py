"""One check of the arguments of public functions: their Python types and the shapes of tensors.

Types are read from the annotations, shapes from what the decorator is given, in the notation of the
docstrings. Values (positive, between 0 and 1, finite) are a function's own business.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import operator
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpclml._utils.annotations import FEW, describe, is_integer, known_names, mismatch
from gpclml.errors import (
    ArgumentError,
    DataError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)

F = TypeVar("F", bound=Callable)

_Sizes = dict[str, tuple[Any, str]]  # by name, with the argument that has it

# Errors that say themselves what is wrong, and warnings that were made errors.
_NO_REASON = (ArgumentError, DataError, NanError, NotPSDError, Warning)

_KINDS = {
    "real": ("real numbers", lambda dtype: not dtype.is_complex),
    "float": ("float32 or float64", lambda dtype: dtype in (torch.float32, torch.float64)),
    "index": ("64-bit integers", lambda dtype: dtype == torch.int64),
    "boolean": ("True and False", lambda dtype: dtype == torch.bool),
    "integer": (
        "integers",
        lambda dtype: not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool,
    ),
}

_SIZES = ("in_features", "in_channels", "num_features", "normalized_shape")

_SEEDS = (-(2**63), 2**64 - 1)

_INTEGERS = (-(2**63), 2**63 - 1)

# Their frames are passed over to find the line that called this package.
_OWN_FILES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


@overload
def checked(function: F, /) -> F: ...


@overload
def checked(*, late: bool = False, passes_on: str = "", **shapes: str) -> Callable[[F], F]: ...


def checked(
    function: Callable | None = None, /, *, late: bool = False, passes_on: str = "", **shapes: str
) -> Callable[..., Any]:
    """Makes a function raise typed errors for arguments of a wrong type or shape.

    Checked annotations are numbers, text, the names of a ``Literal``, tensors, classes, callables,
    ``None`` and unions, and sequences and mappings with their first elements. A tensor on the
    device "meta" is refused.

    A shape is written as in the docstrings: ``"(*batch, n, d)"``, or several of them with ``|``
    between. A name stands for one size in all arguments, at least 1 (``n?`` may be 0), ``*batch``
    for shapes that broadcast, another name with a star for one shape in all arguments. Each element
    of a list has the shape, with sizes of its own. A prefix gives the type: ``float`` (single or
    double precision), ``integer``, ``boolean`` or ``index`` (64-bit integers below the size ``n``);
    without one, any real numbers are accepted.

    Args:
        function: Function to check, if it takes no tensors; for a class, its constructor.
        late: Check only after the function has raised an error that does not name an argument.
            Functions in the loops of a fit then cost nothing more.
        passes_on: Argument that is passed to a module of the caller. Where a layer of PyTorch
            refuses its shape, type or device, this is explained as an error of that argument; all
            other errors of the module are raised as they are.
        **shapes: Shapes by the argument's name.

    Examples:
        >>> from torch import Tensor
        >>> from gpclml._utils.arguments import checked
        >>> @checked(features="(n, d)", labels="integer (n,)")
        ... def score(features: Tensor, labels: Tensor, k: int = 3): ...
        ...
    """
    if function is not None:
        return _wrap(function, {}, False, "")
    patterns = {
        name: [_Pattern(shape) for shape in text.split("|")] for name, text in shapes.items()
    }
    return lambda function: _wrap(function, patterns, late, passes_on)


def check_counts(least: int = 1, suggestion: str = "", /, **numbers: int | None) -> None:
    """Raises an ArgumentError where a number is no integer or below the least; None passes."""
    for name, number in numbers.items():
        if number is None:
            continue
        if isinstance(number, bool) or not is_integer(number) or number < least:
            raise ArgumentError(name, number, f"an integer of at least {least}", suggestion)


def seeded(seed: int | torch.Generator) -> torch.Generator:
    """A generator on the CPU with this seed, which may be NumPy's; generators stay as they are."""
    if isinstance(seed, torch.Generator):
        return seed
    return torch.Generator().manual_seed(operator.index(seed))


def tensor_like(value: float | Tensor, like: Tensor) -> Tensor:
    """A number or tensor with the dtype and device of another, with all digits of a number."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def check_positive(suggestion: str = "", /, **numbers: float | Tensor | None) -> None:
    """Raises an ArgumentError where a number, or one in a tensor, is not positive or infinite."""
    for name, number in numbers.items():
        if number is None:
            continue
        # A NaN is found too: it makes the minimum one, which is not above zero.
        lowest = float(number.detach().min()) if isinstance(number, Tensor) else number
        if not 0 < lowest < math.inf:
            many = isinstance(number, Tensor) and number.numel() > 1
            got = f"as low as {lowest:g}" if many else lowest
            raise ArgumentError(name, got, "positive and finite", suggestion)


def check_finite(argument: str, values: Tensor, suggestion: str = "") -> None:
    """Raises a NonFiniteError where a value is NaN or infinite; says how many are."""
    if not all_finite(values):
        bad = int((~torch.isfinite(values)).sum())
        got = f"{bad} of {values.numel()} values not finite"
        raise NonFiniteError(argument, got, "finite values", suggestion)


def check_classes(argument: str, labels: Tensor, ways: int, suggestion: str = "") -> None:
    """Raises an ArgumentError where a label is no integer from 0 to ``ways - 1``."""
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ArgumentError(argument, str(labels.dtype), "classes as integers", suggestion)
    least, most = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
    if least < 0 or most >= ways:
        got = f"classes from {least} to {most}"
        raise ArgumentError(argument, got, f"integers from 0 to {ways - 1}", suggestion)


def reads_are_free(device: torch.device) -> bool:
    """Whether values can be read at once; a GPU first finishes all that is queued."""
    return device.type == "cpu"


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    A sum is finite only where every value is; if it overflows every value is checked.
    """
    total = values if values.ndim == 0 else values.detach().sum()
    return math.isfinite(total.item()) or (values.ndim > 0 and bool(torch.isfinite(values).all()))


def check_placement(
    argument: str, value: Tensor, like: Tensor, name: str = "the model's output"
) -> None:
    """Raises an ArgumentError where a tensor differs in type or device from one like it."""
    if value.dtype != like.dtype or value.device != like.device:
        got, expected = f"{value.dtype} on {value.device}", f"{like.dtype} on {like.device}"
        suggestion = "Move data, model and likelihood to one dtype and device with .to(...)."
        raise ArgumentError(argument, got, f"{expected}, as {name}", suggestion)


def callers_level() -> int:
    """The ``stacklevel`` by which a warning is about the line that called this package.

    However many functions of it, or their checks, are between.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        level, frame = level + 1, frame.f_back
    return level


def _wrap(function: Any, patterns: dict[str, list[_Pattern]], late: bool, passes_on: str) -> Any:
    if inspect.isclass(function):
        init = _wrap(function.__init__, patterns, late, passes_on)
        setattr(function, "__init__", init)  # noqa: B010  pyright knows no such attribute
        return function
    check = _Check(function, patterns, passes_on)

    @functools.wraps(function)
    def checks(*args: Any, **kwargs: Any) -> Any:
        if not late:
            check(args, kwargs)
        try:
            return function(*args, **kwargs)
        except _NO_REASON:
            raise
        except Exception as error:
            check.explain(args, kwargs, error)
            raise

    return checks


class _Check:
    """All that is known of a function's arguments, read from it at its first call."""

    def __init__(
        self, function: Callable, patterns: dict[str, list[_Pattern]], passes_on: str
    ) -> None:
        self.function, self.patterns, self.passes_on = function, patterns, passes_on

    @functools.cached_property
    def known(self) -> tuple[tuple[str, ...], str, dict[str, Any]]:
        """Names of arguments by position, that of all further ones, and annotations by name."""
        # At the first call: annotations may name what is defined below the function.
        parameters = inspect.signature(self.function).parameters.values()
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = tuple(p.name for p in parameters if p.kind in kinds)
        variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
        scope, hints = getattr(self.function, "__globals__", {}), {}
        for p in parameters:
            if p.kind is not p.VAR_KEYWORD and isinstance(p.annotation, str):
                # Names that modules import for type checkers alone are not checked, but for pandas.
                frames = "pandas." in p.annotation
                local = {"pandas": importlib.import_module("pandas")} if frames else {}
                with contextlib.suppress(NameError, AttributeError, TypeError):
                    hints[p.name] = eval(p.annotation, scope, local)
        return names, variadic, hints

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> _Sizes:
        sizes: _Sizes = {}
        hints, patterns = self.known[2], self.patterns
        for name, value in self.given(args, kwargs):
            if name in hints:
                _check_type(name, value, hints[name])
            if name in patterns and isinstance(value, Tensor):
                _check_tensor(name, value, patterns[name], sizes)
            elif name in patterns and isinstance(value, list | tuple):
                for index, element in enumerate(value):
                    if isinstance(element, Tensor):
                        _check_tensor(f"{name}[{index}]", element, patterns[name], dict(sizes))
        return sizes

    def given(self, args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Names and values; those beyond the named ones have the name of all of them."""
        names, variadic, _ = self.known
        further = [(variadic, value) for value in args[len(names) :]]
        return [*zip(names, args, strict=False), *further, *kwargs.items()]

    def explain(self, args: tuple, kwargs: dict[str, Any], error: Exception) -> None:
        """Raises what is wrong with the arguments, from the error that they caused."""
        try:
            self._check_values(dict(self.given(args, kwargs)), self(args, kwargs))
        except ArgumentError as explained:
            raise explained from error
        given = dict(self.given(args, kwargs)).get(self.passes_on)
        if isinstance(given, Tensor) and (takes := _taken_by_layer(error)):
            got = f"{given.dtype} of shape {tuple(given.shape)}"
            suggestion = f"{takes}. It said: {' '.join(str(error).split())}"
            raise ShapeError(
                self.passes_on, got, "an input that the module takes", suggestion
            ) from error

    def _check_values(self, given: dict[str, Any], sizes: _Sizes) -> None:
        """Refuses what has a right type and shape: mixed dtypes, indices beyond the data."""
        first = ""
        for name, patterns in self.patterns.items():
            value, kind = given.get(name), patterns[0].kind
            if not isinstance(value, Tensor):
                continue
            if kind == "float":
                # All tensors of real numbers have the type and device of the first.
                if first:
                    check_placement(name, value, given[first], first)
                first = first or name
            if kind == "index" and "n" in sizes:
                n, (least, most) = sizes["n"][0], value.aminmax()
                if int(least) < 0 or int(most) >= n:
                    got = f"indices from {int(least)} to {int(most)}"
                    raise ArgumentError(name, got, f"indices from 0 to {n - 1}")


def _taken_by_layer(error: Exception) -> str:
    """What the layer of PyTorch that raised an error takes, if it was given something else.

    Empty for all other errors, such as lack of memory and errors of the caller's own modules: these
    are not about the input.
    """
    # The innermost module is the one that raised it, also within modules of the caller.
    layer: Any = None
    value: object = None
    traceback = error.__traceback__
    while traceback is not None:
        scope = traceback.tb_frame.f_locals
        if isinstance(scope.get("self"), torch.nn.Module):
            layer, value = scope["self"], scope.get("input", scope.get("x"))
        traceback = traceback.tb_next
    size = next((getattr(layer, name) for name in _SIZES if hasattr(layer, name)), None)
    is_of_torch = type(layer).__module__.startswith("torch.nn.")
    if size is None or not is_of_torch or not isinstance(value, Tensor):
        return ""
    name, weight = type(layer).__name__, layer.weight
    if isinstance(weight, Tensor) and value.device != weight.device:
        return f"A {name} on {weight.device} got {value.device}"
    autocast = torch.is_autocast_enabled(value.device.type)
    if isinstance(weight, Tensor) and value.dtype != weight.dtype and not autocast:
        return f"A {name} of {weight.dtype} got {value.dtype}"
    try:
        # Without numbers nothing but a shape can be refused.
        state = {n: t.to("meta") for n, t in [*layer.named_parameters(), *layer.named_buffers()]}
        torch.func.functional_call(layer, state, (value.to("meta"),))
    except (RuntimeError, ValueError):
        channels = size[-1] if isinstance(size, tuple) else size
        return f"A {name} takes {channels} channels, and {tuple(value.shape)} came"
    return ""


_SUGGESTIONS = {
    "a tensor": "Use torch.as_tensor(...).",
    "conditioning": "Pass a strategy such as LeaveOneOut(); LastPoints(m=0) gives the LML.",
    "data": "Pass a DataLoader, or a pair (x, y) of tensors.",
    "function_dist": "Pass the model's output: mll(model(x), target).",
    "images": "Use torch.as_tensor(...).",
    "likelihood": "Were likelihood and model swapped?",
    "mll": "Make one: ConditionalMarginalLogLikelihood(model.likelihood, model).",
    "models": "Pass a dictionary of models by name.",
    "optimizer": "Pass its name or its class: 'adam', torch.optim.Adam.",
}
"""What to do about an argument of another type, by its name or that of the type."""


def _check_type(name: str, value: object, hint: Any) -> None:
    if unlike := mismatch(name, value, hint):
        name, value, hint = unlike
        is_number = isinstance(value, bool | int | float | complex)
        got, expected = repr(value) if is_number else type(value).__name__, describe(hint)
        if isinstance(value, type):
            got = f"the class {value.__name__}"
        elif isinstance(value, Tensor) and value.is_meta:
            got = 'a tensor on the device "meta", which has no numbers'
        suggestion = _SUGGESTIONS.get("a tensor" if expected == "a tensor" else name, "")
        if suggestion and isinstance(value, torch.distributions.Distribution):
            suggestion = "Were arguments swapped? An objective is called as mll(output, target)."
        raise UnsupportedError(name, got, expected, suggestion)
    if isinstance(value, str) and (names := known_names(hint)) and value not in names:
        raise UnknownNameError(name, value, names)
    # torch and numpy overflow on integers of more than 64 bits.
    if isinstance(value, int):
        least, most = _SEEDS if name.endswith("seed") else _INTEGERS
        if not least <= value <= most:
            raise ArgumentError(name, value, f"an integer from {least} to {most}")
    elif isinstance(value, float) and value != value:
        raise NonFiniteError(name, value, "a number")
    elif isinstance(value, list | tuple):
        least, most = _INTEGERS
        for element in value[:FEW]:
            if isinstance(element, int) and not least <= element <= most:
                raise ArgumentError(name, element, f"integers from {least} to {most}")


class _Pattern:
    """A shape as it is written: sizes, and one ``*name`` for any number of them."""

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"\s*(?:(real|float|index|boolean|integer)\s*)?(\(.*\))\s*", text)
        assert match is not None, text
        self.kind, self.text = match[1] or "real", match[2]
        self.sizes = [label.strip() for label in self.text[1:-1].split(",") if label.strip()]
        stars = [index for index, label in enumerate(self.sizes) if label.startswith("*")]
        self.star = stars[0] if stars else None
        self.any = self.sizes.pop(self.star) if self.star is not None else ""

    def bound(self, shape: torch.Size, known: _Sizes, name: str) -> _Sizes | None:
        """The known sizes with those of this shape; None where it is another."""
        more = len(shape) - len(self.sizes)
        if more < 0 or (more > 0 and self.star is None):
            return None
        at, sizes = self.star or 0, dict(known)
        for text, size in zip(self.sizes, shape[:at] + shape[at + more :], strict=True):
            label = text.rstrip("?")
            first = int(text) if text.isdigit() else sizes.setdefault(label, (size, name))[0]
            if size != first or (size == 0 and label == text):
                return None
        # The batch broadcasts; any other name with a star is one shape in all arguments.
        if not self.any:
            return sizes
        middle = shape[at : at + more]
        before = sizes.get(self.any)
        if before is not None and self.any != "*batch" and before[0] != middle:
            return None
        try:
            middle = torch.broadcast_shapes(before[0] if before else (), middle)
        except RuntimeError:
            return None
        if before is None or self.any == "*batch":
            sizes[self.any] = (middle, name)
        return None if 0 in middle else sizes


def _check_tensor(name: str, value: Tensor, patterns: list[_Pattern], sizes: _Sizes) -> None:
    words, takes = _KINDS[patterns[0].kind]
    if not takes(value.dtype):
        suggestion = f"Use {name}.double()." if patterns[0].kind == "float" else ""
        raise ArgumentError(name, f"a tensor of {value.dtype}", words, suggestion)
    for pattern in patterns:
        bound = pattern.bound(value.shape, sizes, name)
        if bound is not None:
            sizes.update(bound)
            return
    labels = {label.rstrip("?") for pattern in patterns for label in (*pattern.sizes, pattern.any)}
    given = [
        f"{label} = {tuple(size) if isinstance(size, torch.Size) else size} as {other} has it"
        for label, (size, other) in sizes.items() if label in labels and other != name
    ]  # fmt: skip
    detail = f" with {', '.join(given)}" if given else ", nothing of size zero"
    expected = " or ".join(pattern.text for pattern in patterns)
    raise ShapeError(name, tuple(value.shape), expected + detail)
