"""Many calls with wrong arguments, each in a limited time, and tables of what came of them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pandas as pd

from benchmarks.robustness.fuzz.calls import OUTCOMES
from gpclml.errors import ArgumentError

__all__ = ["by_kind", "raw_errors", "run"]

_MEMORY = 12 * 2**30  # bytes of address space that a worker may have


def run(calls: int = 15_000, seed: int = 0, limit: float = 60.0) -> pd.DataFrame:
    """Calls public callables with wrong arguments.

    The calls are made in a process of their own, which is ended where one takes too long.

    Args:
        calls: How many.
        seed: Of the family of calls.
        limit: Seconds that one may take.

    Returns:
        A row a call: ``index``, ``callable``, ``kind``, ``wrong``, ``outcome`` and ``error``, the
        type and message of what was raised. Outcomes: ``result``, the call did what it was asked
        for; ``typed``, an error that names what is wrong (of ``gpclml.errors``, ``NanError``,
        ``NotPSDError``, or BoTorch's own of its models); ``signature``, Python's own ``TypeError``
        at a wrong type; ``memory``, more was asked for than there is; ``raw``, any other error;
        ``hang``, it did not end in time; ``crash``, it ended its process.

    Raises:
        ArgumentError: If ``calls`` is below 1.
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

    from benchmarks.robustness.fuzz.calls import draw, perform

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
    """How many calls of each kind of mutation had each outcome.

    Args:
        results: From :func:`run`.
    """
    counts = pd.crosstab(results["kind"], results["outcome"])
    counts = counts.reindex(columns=list(OUTCOMES), fill_value=0)
    counts.insert(0, "calls", counts.sum(axis=1))
    counts.loc["all"] = counts.sum()
    return counts


def raw_errors(results: pd.DataFrame) -> pd.DataFrame:
    """Raw errors by callable: how many of how many calls, of which kinds, and an example.

    Args:
        results: From :func:`run`.
    """
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
