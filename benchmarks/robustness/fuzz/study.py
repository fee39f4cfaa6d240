"""Wrong arguments made of valid ones by hypothesis, and tables of what came of the calls."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import hypothesis
import pandas as pd
import torch
from botorch.exceptions.errors import BotorchError
from hypothesis import strategies as st
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor
from tqdm import tqdm

from benchmarks.robustness.fuzz.examples import EXAMPLES, Example
from gpclml.errors import ArgumentError, DataError

OUTCOMES = ("result", "typed", "signature", "memory", "raw", "hang")
"""What may come of a call: see :func:`run`."""

_TYPED = ArgumentError, DataError, NanError, NotPSDError, BotorchError
_MEMORY = 12 * 2**30  # bytes of address space that the process may have
_SHOWN = 200  # characters of a message

Wrong = st.SearchStrategy[tuple[str, Any]]
"""Kinds of what is wrong, with the wrong argument."""

_TYPES = {
    type(None): None, str: "x", int: 3, float: 0.5, list: [1.0, 2.0], dict: {"a": 1},
    object: object(), type: int, Tensor: torch.ones(3, dtype=torch.float64),
    torch.nn.Linear: torch.nn.Linear(2, 2),
}  # fmt: skip


def wrong_values(value: object, is_size: bool) -> Wrong:
    """What may be given in place of an argument.

    Args:
        value: The valid argument.
        is_size: Whether it says how much work is done: then a huge number is no wrong one.
    """
    # A function of the caller's may raise what it will: its errors are its own.
    types = [
        wrong for kind, wrong in _TYPES.items()
        if kind is not type(value) and not (inspect.isroutine(value) and callable(wrong))
    ]  # fmt: skip
    wrong = st.sampled_from(types).map(lambda other: ("type", other))
    if isinstance(value, Tensor):
        return wrong | _wrong_tensors(value.detach())
    if isinstance(value, bool):
        return wrong | _kind("number", st.just(2))
    if isinstance(value, int):
        # Beyond 64 bits on both sides, where torch raises errors of its own.
        integers = st.integers(-(2**63) - 1, 0) if is_size else st.integers(-(2**64), 2**64)
        return wrong | _kind("number", integers | st.sampled_from([value + 0.5, math.nan, "3"]))
    if isinstance(value, float):
        return wrong | _kind("number", st.floats() | st.sampled_from([1j, "0.5"]))
    if isinstance(value, str):
        return wrong | _kind("name", st.text(max_size=5) | st.just(b"x"))
    if isinstance(value, Mapping):
        return wrong | _wrong_mappings(dict(value), is_size)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return wrong | _wrong_sequences(value, is_size)
    return wrong


def _kind(kind: str, values: st.SearchStrategy) -> Wrong:
    return values.map(lambda value: (kind, value))


def _wrong_sequences(values: Sequence, is_size: bool) -> Wrong:
    same = list if isinstance(values, list) else tuple
    strategy = _kind("empty", st.just(same()))
    if not len(values):
        return strategy
    lengths = st.sampled_from([same(values[:-1]), same([*values, values[-1]])])
    element = wrong_values(values[0], is_size)
    first = element.map(lambda wrong: (wrong[0], same([wrong[1], *values[1:]])))
    return strategy | _kind("shape", lengths) | first


def _wrong_mappings(values: dict, is_size: bool) -> Wrong:
    strategy = _kind("empty", st.just({}))
    for key, value in list(values.items())[:1]:
        entry = wrong_values(value, is_size).map(
            lambda wrong, key=key: (wrong[0], {**values, key: wrong[1]})
        )
        strategy = strategy | _kind("name", st.just({"no such name": value})) | entry
    return strategy


def _wrong_tensors(value: Tensor) -> Wrong:
    """Of another shape, type or device, with no element, and with other numbers."""
    shapes = [value.unsqueeze(0), value.unsqueeze(-1), value.expand(3, *value.shape).clone()]
    shapes += [value.new_ones(11), *([value.flatten()[0]] if value.numel() else [])]
    empty = []
    for dim, size in enumerate(value.shape):
        longer = torch.cat([value, value.narrow(dim, size - 1, 1)], dim)
        shapes += [value.select(dim, 0), value.narrow(dim, 0, size - 1), longer]
        empty.append(value.narrow(dim, 0, 0))
    # A square matrix transposed has the same shape, and may be right.
    if value.ndim > 1 and value.shape[-1] != value.shape[-2]:
        shapes.append(value.mT)
    other_types = (torch.int64, torch.bool, torch.complex128, torch.float16, torch.float32)
    dtypes = [value.nan_to_num().to(kind) for kind in other_types]
    largest = torch.finfo(torch.float64).max
    numbers = (
        st.floats(-largest, largest, width=64) | st.sampled_from([math.nan, math.inf, -math.inf])
        if value.is_floating_point()
        else st.integers(-9, 255 if value.dtype == torch.uint8 else 2**40)
    )

    def changed(number: float, everywhere: bool) -> Tensor:
        if value.dtype == torch.uint8:
            number = max(number, 0)
        # One wrong entry is missed more easily than all.
        copy = torch.full_like(value, number) if everywhere else value.clone()
        if copy.numel():
            copy.view(-1)[0] = number
        return copy

    kinds = {
        "shape": st.sampled_from([shape.clone() for shape in shapes]),
        "dtype": st.sampled_from(dtypes),
        "type": st.sampled_from([value.tolist(), value.numpy()]),
        "device": st.just(value.to("meta")),
        "number": st.builds(changed, numbers, st.booleans()),
    }
    if empty:
        kinds["empty"] = st.sampled_from(empty)
    return st.one_of(*(_kind(kind, values) for kind, values in kinds.items()))


@st.composite
def wrong_arguments(draw: Any, example: Example) -> tuple[str, str, dict[str, Any]]:
    """Arguments of which one or two are wrong: the kind of that, what it is, and all of them.

    The kind is "several" where there are two.
    """
    # The same arguments for the same draws: shrinking repeats calls.
    torch.manual_seed(0)
    arguments = example.arguments()
    known = [name for name in arguments if name != "self"]
    if not known:
        return "none", "", arguments
    chosen = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True))
    kinds = []
    for name in chosen:
        kind, arguments[name] = draw(wrong_values(arguments[name], example.is_size(name)))
        kinds.append(kind)
    told = "; ".join(f"{name}: {_told(arguments[name])}" for name in chosen)
    return kinds[0] if len(kinds) == 1 else "several", told, arguments


def _told(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {str(value)[:40]}"


def perform(
    example: Example, arguments: Mapping[str, Any], kind: str, limit: float = 60.0
) -> tuple[str, str]:
    """Makes a call: its outcome, and the error that it raised with its message."""
    from matplotlib import pyplot

    torch.manual_seed(0)
    quiet = io.StringIO()
    with (
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stderr(quiet),
        contextlib.redirect_stdout(quiet),
    ):
        try:
            with _limited(limit):
                example.call(**arguments)
        except _Hang:
            return "hang", f"no end within {limit:g} s"
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN]
            return _outcome(error, kind), message
        finally:
            pyplot.close("all")
    return "result", ""


def _outcome(error: Exception, kind: str) -> str:
    if isinstance(error, _TYPED):
        return "typed"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "memory"
    return "signature" if type(error) is TypeError and kind == "type" else "raw"


class _Hang(BaseException):
    """Raised in a call that takes too long; no handler of errors catches it."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Within the block :class:`_Hang` is raised after so long, where the system has alarms."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def fuzz(example: Example, calls: int, seed: int, limit: float = 60.0) -> list[dict[str, Any]]:
    """So many calls of one callable; fewer where an error is raw, whose call is made smaller.

    Returns:
        A row a call: ``callable``, ``kind`` and ``wrong`` of its arguments, ``outcome`` and
        ``error``; the last one is the smallest with a raw error, if there is any.
    """
    rows: list[dict[str, Any]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=calls, database=None, deadline=None, derandomize=False,
        report_multiple_bugs=False, print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )  # fmt: skip
    @hypothesis.given(wrong_arguments(example))
    def make_call(call: tuple[str, str, dict[str, Any]]) -> None:
        kind, told, arguments = call
        outcome, error = perform(example, arguments, kind, limit)
        rows.append({"callable": example.name, "kind": kind, "wrong": told, "outcome": outcome,
                     "error": error})  # fmt: skip
        # The failure that hypothesis makes smaller.
        assert outcome not in ("raw", "hang"), error

    with contextlib.suppress(AssertionError), contextlib.redirect_stdout(io.StringIO()):
        make_call()
    return rows


def run(calls: int = 64, seed: int = 0, limit: float = 60.0) -> pd.DataFrame:
    """Calls every public callable with wrong arguments.

    Outcomes: ``result``, the call did what it was asked for; ``typed``, an error that names what is
    wrong (of ``gpclml.errors``, ``NanError``, ``NotPSDError``, or BoTorch's own of its models);
    ``signature``, Python's own ``TypeError`` at a wrong type; ``memory``, more was asked for than
    there is; ``raw``, any other error; ``hang``, it did not end in time.

    Args:
        calls: Number of calls of each callable.
        seed: Seed of the calls.
        limit: Seconds that a call may take.
    """
    torch.set_num_threads(1)
    _limit_memory()
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, {"GPCLML_DATA": folder, "MPLBACKEND": "agg"}),
    ):
        for example in tqdm(EXAMPLES.values(), desc="callables"):
            rows += fuzz(example, calls, seed, limit)
    return pd.DataFrame(rows)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError):
        import resource

        # A call that asks for the whole memory raises, and is counted, instead of ending the run.
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def kinds_table(results: pd.DataFrame) -> pd.DataFrame:
    """How many calls of each kind of wrong argument had each outcome."""
    counts = pd.crosstab(results["kind"], results["outcome"])
    counts = counts.reindex(columns=list(OUTCOMES), fill_value=0)
    counts.insert(0, "calls", counts.sum(axis=1))
    counts.loc["all"] = counts.sum()
    return counts


def raw_table(results: pd.DataFrame) -> pd.DataFrame:
    """The smallest call of each callable that raised a raw error or did not end."""
    bad = results[results["outcome"].isin(["raw", "hang"])]
    return bad.drop_duplicates("callable", keep="last").drop(columns="outcome")
