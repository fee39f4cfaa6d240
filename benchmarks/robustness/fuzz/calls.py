"""One call with wrong arguments, drawn by a seed and a number, and what comes of it."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from botorch.exceptions.errors import BotorchError
from linear_operator.utils.errors import NanError, NotPSDError

from benchmarks.robustness.fuzz.examples import EXAMPLES
from benchmarks.robustness.fuzz.mutations import mutations_of
from gpclml.errors import ArgumentError, DataError, LostWorkerError

__all__ = ["OUTCOMES", "Call", "draw", "perform"]

OUTCOMES = ("result", "typed", "signature", "memory", "raw", "hang", "crash")
"""What may come of a call: see :func:`benchmarks.robustness.fuzz.study.run`."""

_TYPED = ArgumentError, DataError, LostWorkerError, NanError, NotPSDError, BotorchError
_SHARE_OF_TWO = 0.2  # of calls with two wrong arguments
_MORE_TENSORS, _MORE_SHAPES = 3, 3  # how much likelier they are than others


@dataclass(frozen=True)
class Call:
    """A call that is to be made.

    Attributes:
        index: Its number.
        name: Of the callable.
        kind: Of the first mutation; "several" where there are more.
        wrong: What is wrong, argument by argument.
        arguments: By name.
    """

    index: int
    name: str
    kind: str
    wrong: str
    arguments: dict[str, Any]


def draw(seed: int, index: int) -> Call:
    """The call of that number, the same for the same seed.

    Callables take turns; one argument of a call is wrong, in a fifth of the calls two. Tensors are
    four times as likely to be wrong as other arguments, and their shapes as other things of them.

    Args:
        seed: Of the family.
        index: Number of the call.
    """
    random = Random(seed * 1_000_003 + index)
    names = sorted(EXAMPLES)
    example = EXAMPLES[names[index % len(names)]]
    torch.manual_seed(0)
    arguments = example.arguments()
    known = [name for name in arguments if name != "self"]
    count = min(len(known), 2 if random.random() < _SHARE_OF_TWO else 1)
    kinds, wrong = [], []
    for name in _some(random, known, arguments, count):
        options = mutations_of(arguments[name], example.is_size(name))
        every = sorted({kind for kind, *_ in options})
        kind = random.choice([*every, *["shape"] * (_MORE_SHAPES * ("shape" in every))])
        chosen = random.choice([option for option in options if option[0] == kind])
        arguments[name] = chosen[2](random)
        kinds.append(kind)
        wrong.append(f"{name}: {chosen[1]}")
    kind = kinds[0] if len(set(kinds)) == 1 else "several" if kinds else "none"
    return Call(index, example.name, kind, "; ".join(wrong), arguments)


def _some(random: Random, known: list[str], arguments: dict[str, Any], count: int) -> list[str]:
    """So many different names, those of tensors more often."""
    tensors = [name for name in known if isinstance(arguments[name], torch.Tensor)]
    pool, chosen = [*known, *tensors * _MORE_TENSORS], []
    while len(chosen) < count:
        chosen.append(random.choice([name for name in pool if name not in chosen]))
    return chosen


def perform(call: Call) -> tuple[str, str]:
    """Makes a call: its outcome, and the error that it raised with its message.

    Args:
        call: From :func:`draw`.
    """
    torch.manual_seed(0)
    quiet = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(quiet),
        contextlib.redirect_stdout(quiet),
    ):
        warnings.simplefilter("ignore")
        try:
            EXAMPLES[call.name].call(**call.arguments)
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            return _outcome(error, call.kind), message
        finally:
            _close_figures()
    return "result", ""


def _outcome(error: Exception, kind: str) -> str:
    if isinstance(error, _TYPED):
        return "typed"
    out_of_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    if out_of_memory:
        return "memory"
    if type(error) is TypeError and kind == "type":
        return "signature"
    return "raw"


def _close_figures() -> None:
    from matplotlib import pyplot

    pyplot.close("all")
