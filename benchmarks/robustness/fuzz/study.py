"""Calls with wrong arguments, each in a limited time, and tables of what came of them."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import pandas as pd
import torch
from botorch.exceptions.errors import BotorchError
from linear_operator.utils.errors import NanError, NotPSDError

from benchmarks.robustness.fuzz.examples import EXAMPLES
from benchmarks.robustness.fuzz.mutations import mutations_of
from gpclml.errors import ArgumentError, DataError

__all__ = ["OUTCOMES", "Call", "by_kind", "draw", "perform", "raw_errors", "run"]

OUTCOMES = ("result", "typed", "signature", "memory", "raw", "hang", "crash")
"""What may come of a call: see :func:`benchmarks.robustness.fuzz.study.run`."""

_TYPED = ArgumentError, DataError, NanError, NotPSDError, BotorchError
_SHARE_OF_TWO = 0.2  # of calls with two wrong arguments
_MORE_TENSORS, _MORE_SHAPES = 3, 3  # how much likelier they are than others


@dataclass(frozen=True)
class Call:
    """A call that is to be made; ``kind`` is "several" where mutations are of several kinds."""

    index: int
    name: str
    kind: str
    wrong: str
    arguments: dict[str, Any]


def draw(seed: int, index: int) -> Call:
    """The call of that number, the same for the same seed.

    Callables take turns; one argument of a call is wrong, in a fifth of the calls two. Tensors are
    four times as likely to be wrong as other arguments, and their shapes as other things of them.
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
    """Makes a call: its outcome, and the error that it raised with its message."""
    from matplotlib import pyplot

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
            pyplot.close("all")
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


_MEMORY = 12 * 2**30  # bytes of address space that a worker may have


def run(calls: int = 15_000, seed: int = 0, limit: float = 60.0) -> pd.DataFrame:
    """Calls public callables with wrong arguments, in a process that is ended where it hangs.

    Outcomes: ``result``, the call did what it was asked for; ``typed``, an error that names what is
    wrong (of ``gpclml.errors``, ``NanError``, ``NotPSDError``, or BoTorch's own of its models);
    ``signature``, Python's own ``TypeError`` at a wrong type; ``memory``, more was asked for than
    there is; ``raw``, any other error; ``hang``, it did not end in time; ``crash``, it ended its
    process.
    """
    if calls < 1:
        raise ArgumentError("calls", calls, "an integer of at least 1")
    return pd.DataFrame(_rows(calls, seed, limit))


def _rows(calls: int, seed: int, limit: float) -> Iterator[dict]:
    context = multiprocessing.get_context("spawn")
    first = 0
    while first < calls:
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(theirs, seed, first, calls), daemon=True)
        worker.start()
        theirs.close()
        for row in _received(ours, limit):
            yield row
            first = row["index"] + 1
        worker.kill()
        worker.join()
        ours.close()


def _received(connection: Connection, limit: float) -> Iterator[dict]:
    """Rows of one worker, the last one perhaps of a call that did not end."""
    started: dict = {}
    while True:
        # The first call waits for imports, and so is not limited as others are.
        patience = limit if started else 600.0
        if not connection.poll(patience):
            yield started | {"outcome": "hang", "error": f"no end within {patience} s"}
            return
        try:
            row = connection.recv()
        except EOFError:
            if not started:
                raise RuntimeError("the process that makes the calls ended before one") from None
            yield started | {"outcome": "crash", "error": "the process ended"}
            return
        if row is None:
            return
        if "outcome" in row:
            started = {}
            yield row
        else:
            started = row


def _work(connection: Connection, seed: int, first: int, calls: int) -> None:
    """Makes calls, saying of each when it begins and what came of it."""
    import torch

    from benchmarks.robustness.fuzz.study import draw, perform

    torch.set_num_threads(1)
    _limit_memory()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["GPCLML_DATA"] = folder
        os.environ["MPLBACKEND"] = "agg"
        for index in range(first, calls):
            call = draw(seed, index)
            row = {
                "index": index, "callable": call.name, "kind": call.kind, "wrong": call.wrong,
            }  # fmt: skip
            connection.send(row)
            outcome, error = perform(call)
            connection.send(row | {"outcome": outcome, "error": error})
        os.chdir("/")
    connection.send(None)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def by_kind(results: pd.DataFrame) -> pd.DataFrame:
    """How many calls of each kind of mutation had each outcome."""
    counts = pd.crosstab(results["kind"], results["outcome"])
    counts = counts.reindex(columns=list(OUTCOMES), fill_value=0)
    counts.insert(0, "calls", counts.sum(axis=1))
    counts.loc["all"] = counts.sum()
    return counts


def raw_errors(results: pd.DataFrame) -> pd.DataFrame:
    """Raw errors by callable: how many of how many calls, of which kinds, and an example."""
    totals = results.groupby("callable").size()
    bad = results[results["outcome"].isin(["raw", "hang", "crash"])]
    rows = [
        {
            "callable": name, "raw": len(group), "calls": totals[name],
            "kinds": ", ".join(sorted(group["kind"].unique())),
            "example": f"{group['wrong'].iloc[0]} -> {group['error'].iloc[0]}"[:160],
        }
        for name, group in bad.groupby("callable")
    ]  # fmt: skip
    columns = ["callable", "raw", "calls", "kinds", "example"]
    return pd.DataFrame(rows, columns=columns).sort_values("raw", ascending=False)
