"""Tensors from numpy arrays and pandas objects: training data, points and other arguments."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy
import torch
from torch import Tensor
from typing_extensions import TypeIs

from gpclml._utils.arguments import callers_level, check_finite, check_placement
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError

if TYPE_CHECKING:
    # A tensor, a numpy array, a data frame or a series. Type checkers do not see that a decorator
    # has made a tensor of it.
    ArrayLike: TypeAlias = Any
else:
    ArrayLike = Tensor  # what it is when `checked` looks at it

F = TypeVar("F", bound=Callable)

_FLOATS = (torch.float32, torch.float64)


def takes_arrays(*data: str) -> Callable[[F], F]:
    """Makes a function take numpy arrays and pandas objects where it takes tensors.

    Integers become 64-bit integers, and real numbers keep single or double precision. The arguments
    named here, points first, hold data for the model that is the first argument, and get the type
    and device of its training inputs; if several have an index, it has to be the same. It stands
    above ``checked``.
    """

    def decorated(function: F) -> F:
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def converts(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            for name, value in given.items():
                if name not in data and _is_array(value):
                    given[name] = _tensor_of_kind(name, value)
            model = given.get(names[0])
            if data and (inputs := getattr(model, "train_inputs", None)):
                tables = {name: given[name] for name in data if given.get(name) is not None}
                _check_index(tables)
                for name, value in tables.items():
                    if name == data[0]:
                        columns = getattr(model, "column_names", None)
                        given[name] = points_as_tensor(value, inputs[0], columns, name)
                    else:
                        given[name] = _column(value, _tensor(name, value, inputs[0]))
            positional = [given[name] for name in names[: len(args)]]
            named = {name: given[name] for name in kwargs}
            return function(*positional, *args[len(names) :], **named)

        return converts  # pyright: ignore[reportReturnType]

    return decorated


@dataclass(frozen=True)
class TrainingData:
    """Inputs and targets as tensors, names of columns if there are any, and what was converted."""

    x: Tensor
    y: Tensor
    columns: list[str] | None
    given: str


def checked_training_data(train_x: ArrayLike, train_y: ArrayLike) -> TrainingData:
    """Inputs and targets as tensors of one type on one device, or a typed error.

    Tensors of single or double precision stay as they are. All else takes the type and device of
    the one that is such a tensor, else double precision on the CPU.
    """
    # Training data that are no tensors take the type of those that are.
    like = next((values for values in (train_x, train_y) if _is_float_tensor(values)), None)
    _check_index({"train_x": train_x, "train_y": train_y})
    x, y = _tensor("train_x", train_x, like), _tensor("train_y", train_y, like)
    x = x.unsqueeze(-1) if x.ndim == 1 else x
    y = _column(train_y, y)
    if x.ndim < 2 or 0 in x.shape:
        suggestion = "Give at least one point with at least one column."
        expected = "(n,) or (*batch, n, d), nothing of size zero"
        raise ShapeError("train_x", tuple(x.shape), expected, suggestion)
    if y.shape != x.shape[:-1]:
        suggestion = "Give one target for each point; pass a column as train_y.squeeze(-1)."
        raise ShapeError("train_y", tuple(y.shape), str(tuple(x.shape[:-1])), suggestion)
    check_placement("train_y", y, x, "train_x")
    check_finite("train_x", x, "Drop or impute the rows with missing inputs.")
    if count := int(torch.isinf(y).sum()):
        suggestion = "Mark missing targets with NaN, not with infinity."
        got, expected = f"{count} infinite values", "finite values or NaN"
        raise NonFiniteError("train_y", got, expected, suggestion)
    # Missing targets are marked by NaN, but a member needs one.
    if torch.isnan(y).all(-1).any():
        suggestion = "Give each batch element at least one observed target."
        raise ArgumentError("train_y", "NaN at every point", "an observed target", suggestion)
    given = {"train_x": train_x, "train_y": train_y}
    converted = {name: value for name, value in given.items() if not _is_float_tensor(value)}
    told = [f"{name} was given as {_describe(value)}" for name, value in converted.items()]
    return TrainingData(x, y, _columns(train_x), ", ".join(told))


def points_as_tensor(
    x: ArrayLike, train_x: Tensor, columns: list[str] | None, argument: str = "x"
) -> Tensor:
    """Points as a tensor; arrays, data frames and integers become what the training inputs are."""
    named = _columns(x)
    if named is not None and columns is not None and named != columns:
        suggestion = f"Select them by {argument}[[...]], in the order of the training inputs."
        got, expected = f"columns {', '.join(named)}", f"columns {', '.join(columns)}"
        raise ArgumentError(argument, got, f"{expected}, as in the training inputs", suggestion)
    return _tensor(argument, x, train_x)


def _is_float_tensor(value: object) -> TypeIs[Tensor]:
    return isinstance(value, Tensor) and value.dtype in _FLOATS


def _is_array(value: object) -> bool:
    return isinstance(value, numpy.ndarray) or _is_pandas(value)


def _is_pandas(value: object) -> bool:
    pandas = sys.modules.get("pandas")  # without it nothing can be an object of it
    return pandas is not None and isinstance(value, pandas.DataFrame | pandas.Series)


def _tensor(argument: str, value: Any, like: Tensor | None) -> Tensor:
    """The numbers as a tensor of single or double precision.

    Arrays, pandas objects, integers and booleans take the type and device of ``like``; double
    precision on the CPU if it is None.
    """
    if isinstance(value, Tensor) and value.is_meta:
        got = 'a tensor on the device "meta", which has no numbers'
        raise UnsupportedError(argument, got, "a tensor with numbers")
    if _is_float_tensor(value):
        return value
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            suggestion = f"Use {argument}.double(); factorizations need float32 or float64."
            raise ArgumentError(argument, f"dtype {value.dtype}", "float32 or float64", suggestion)
        made = value.to(torch.float64 if like is None else like.dtype)
        _warn_of_lost_digits(argument, value, made.dtype)
        return made
    if not _is_array(value):
        suggestion = f"Use torch.as_tensor({argument}, dtype=torch.float64)."
        expected = "a tensor, a numpy array or a pandas object"
        raise ArgumentError(argument, type(value).__name__, expected, suggestion)
    # A copy in one piece: a column of a data frame may be read-only or a view.
    array = _real_array(argument, value)
    dtype = torch.float64 if like is None else like.dtype
    made = torch.from_numpy(numpy.array(array, dtype=str(dtype).removeprefix("torch."), order="C"))
    _warn_of_lost_digits(argument, array, dtype)
    return made if like is None else made.to(like.device)


def _tensor_of_kind(argument: str, value: Any) -> Tensor:
    """The numbers of an array or pandas object as a tensor of their own kind."""
    array = _real_array(argument, value)
    kinds = {"b": "bool", "f": "float32" if array.dtype == numpy.float32 else "float64"}
    return torch.from_numpy(
        numpy.array(array, dtype=kinds.get(array.dtype.kind, "int64"), order="C")
    )


def _column(value: Any, made: Tensor) -> Tensor:
    """A data frame of one column, which is made of targets, as a vector."""
    return made.squeeze(-1) if _is_pandas(value) and made.shape[1:] == (1,) else made


def _real_array(argument: str, value: Any) -> numpy.ndarray:
    """The numbers of an array or pandas object, or a typed error."""
    array = _array_of_pandas(argument, value) if _is_pandas(value) else value
    if array.dtype.kind not in "biuf":
        suggestion = f"Use {argument}.astype(float)."
        raise ArgumentError(argument, f"an array of {array.dtype}", "real numbers", suggestion)
    return array


def _array_of_pandas(argument: str, value: Any) -> numpy.ndarray:
    """Missing values as NaN; integers of one type stay integers where none is missing."""
    columns = [value] if value.ndim == 1 else [value.iloc[:, i] for i in range(value.shape[1])]
    unlike = [
        f"{column.name} ({column.dtype})" for column in columns
        if getattr(column.dtype, "kind", "O") not in "biuf"
    ]  # fmt: skip
    if unlike:
        raise ArgumentError(
            argument, f"columns that are not numbers: {', '.join(unlike)}", "numbers",
            "Encode them first, e.g. by pandas.get_dummies; the command gpclml does so by itself.",
        )  # fmt: skip
    arrays = [
        column.to_numpy(dtype="float64", na_value=numpy.nan)
        if column.isna().any() or column.dtype.kind in "bf"
        else column.to_numpy()
        for column in columns
    ]
    if value.ndim == 1:
        return arrays[0]
    if len({array.dtype for array in arrays}) > 1:
        for array in arrays:
            _warn_of_lost_digits(argument, array, torch.float64)
        arrays = [array.astype("float64") for array in arrays]
    return numpy.stack(arrays, -1) if arrays else numpy.empty(value.shape)


def _warn_of_lost_digits(argument: str, values: Any, dtype: torch.dtype) -> None:
    """Warns of integers that are no numbers of a type."""
    exact = round(2 / torch.finfo(dtype).eps)  # up to which all integers are
    array = values.cpu().numpy() if isinstance(values, Tensor) else values
    if array.dtype.kind in "iu" and bool(((array > exact) | (array < -exact)).any()):
        warnings.warn(
            f"{argument}: integers beyond {exact} were rounded to {dtype}, which cannot hold all "
            "of their digits. Subtract an offset first.",
            UserWarning,
            stacklevel=callers_level(),
        )


def _columns(value: Any) -> list[str] | None:
    """Names of the columns of a pandas object, as texts."""
    if not _is_pandas(value):
        return None
    if value.ndim == 1:
        return None if value.name is None else [str(value.name)]
    return [str(name) for name in value.columns]


def _check_index(data: Mapping[str, Any]) -> None:
    """Refuses pandas objects of as many rows as the first one whose index is another."""
    # Rows are matched by position here, and by label in pandas.
    indexed = {name: value for name, value in data.items() if _is_pandas(value)}
    first = next(iter(indexed), "")
    for name, value in indexed.items():
        other = indexed[first]
        if len(value) == len(other) and not value.index.equals(other.index):
            suggestion = f"Use {name}.loc[{first}.index], or drop both by reset_index(drop=True)."
            raise ArgumentError(name, f"another index than {first}", "the same rows", suggestion)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}"
    is_frame = _is_pandas(value) and value.ndim == 2
    kind = "a data frame" if is_frame else "a series" if _is_pandas(value) else "an array"
    dtypes = set(value.dtypes) if is_frame else {value.dtype}
    return f"{kind} of {' and '.join(sorted(map(str, dtypes)))}"
