"""Wrong arguments at the public API: results, or errors that say what is wrong."""

from __future__ import annotations

import contextlib
import os
import time

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.robustness.__main__ import app
from benchmarks.robustness.fuzz import by_kind, raw_errors, run, without_example
from benchmarks.robustness.fuzz.examples import EXAMPLES, Example
from benchmarks.robustness.fuzz.mutations import KINDS, mutations_of
from benchmarks.robustness.fuzz.study import Call, draw, perform
from gpclml.errors import ArgumentError, DataError

READ_FILES = {"models.GPRegression.load", "meta.load_model"}


def test_every_public_callable_has_an_example():
    assert without_example() == []


@pytest.mark.filterwarnings("ignore")  # of models that are too small to be fitted well
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_are_valid(name, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    example = EXAMPLES[name]
    no_file = pytest.raises(DataError) if name in READ_FILES else contextlib.nullcontext()
    with no_file:
        example.call(**example.arguments())


def test_wrong_shapes_and_types_raise_no_raw_error():
    results = [(call, *perform(call)) for call in (draw(8, index) for index in range(500))]
    raw = [
        f"{call.name}({call.wrong}): {error}"
        for call, outcome, error in results
        if outcome not in ("result", "typed", "memory")
        and ("shape" in call.kind or call.kind in ("type", "empty", "device"))
    ]
    assert not raw, "\n".join(raw)
    counts = pd.Series([call.kind for call, *_ in results]).value_counts()
    assert counts["shape"] > 40
    assert sum(outcome == "typed" for _, outcome, _ in results) > 250


def test_a_call_is_the_same_for_the_same_seed_and_number():
    for index in range(0, 200, 7):
        one, other = draw(3, index), draw(3, index)
        assert (one.name, one.kind, one.wrong) == (other.name, other.kind, other.wrong)
        for name, value in one.arguments.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                again = other.arguments[name]
                torch.testing.assert_close(value, again, rtol=0, atol=0, equal_nan=True)
    first, second = ([draw(seed, index).wrong for index in range(40)] for seed in (3, 4))
    assert first != second


def test_mutations_differ_from_the_argument():
    for value in (torch.ones(3, 2), 3, 0.5, "text", True, (1, 2), {"a": torch.ones(2)}):
        options = mutations_of(value, is_size=False)
        assert {kind for kind, *_ in options} <= set(KINDS)
        assert len(options) > 8
    options = mutations_of(torch.ones(3, 2), is_size=False)
    shapes = [make(None).shape for kind, _, make in options if kind == "shape"]
    assert torch.Size([3, 2]) not in shapes


def _calls_of(monkeypatch, **calls):
    """What is called, in the process that makes the calls."""
    examples = {name: Example(name, call, lambda: {"x": 1}) for name, call in calls.items()}
    monkeypatch.setattr("benchmarks.robustness.fuzz.study.EXAMPLES", examples)
    return [Call(0, name, "type", "x: 1", {"x": 1}) for name in calls]


def test_what_is_raised_is_told_apart(monkeypatch):
    def raises(error):
        def call(x):
            raise error

        return call

    calls = _calls_of(
        monkeypatch,
        fine=lambda x: x,
        named=raises(ArgumentError("x", 1, "another")),
        signature=raises(TypeError("x")),
        torch=raises(RuntimeError("size mismatch")),
        memory=raises(MemoryError()),
    )
    outcomes = [perform(call)[0] for call in calls]
    assert outcomes == ["result", "typed", "signature", "raw", "memory"]
    assert perform(Call(0, "signature", "shape", "x: 1", {"x": 1}))[0] == "raw"


def _hang(connection, seed, first, calls):
    """In place of the process that makes calls: the second never ends, the fourth kills it."""
    for index in range(first, calls):
        row = {"index": index, "callable": "f", "kind": "shape", "wrong": ""}
        connection.send(row)
        if index == 1:
            while True:
                time.sleep(0.01)
        if index == 3:
            os._exit(1)
        connection.send(row | {"outcome": "result", "error": ""})
    connection.send(None)


@pytest.mark.slow
def test_a_call_that_hangs_or_kills_its_process_is_counted_and_the_rest_is_made(monkeypatch):
    monkeypatch.setattr("benchmarks.robustness.fuzz.study._work", _hang)
    results = run(calls=6, limit=5.0)
    assert results["outcome"].tolist() == ["result", "hang", "result", "crash", "result", "result"]
    assert results["index"].tolist() == list(range(6))
    assert by_kind(results).loc["all", ["calls", "hang", "crash"]].tolist() == [6, 1, 1]
    assert raw_errors(results)["raw"].tolist() == [2]


def test_no_call_is_an_error():
    with pytest.raises(ArgumentError, match="calls"):
        run(calls=0)


@pytest.mark.slow
def test_command_prints_tables_and_writes_rows(tmp_path):
    file = tmp_path / "calls.csv"
    result = CliRunner().invoke(app, ["fuzz", "--calls", "30", "--csv", str(file)])
    assert result.exit_code == 0, result.output
    assert "outcome" in result.output
    rows = pd.read_csv(file, comment="#")
    assert len(rows) == 30
    assert rows["outcome"].isin(["result", "typed"]).all()
