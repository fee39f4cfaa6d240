"""Wrong arguments at the public API: results, or errors that say what is wrong."""

import contextlib
import time

import pandas as pd
import pytest

from benchmarks.robustness.fuzz.examples import EXAMPLES, Example, without_example
from benchmarks.robustness.fuzz.study import fuzz, kinds_table, perform, raw_table
from gpclml.errors import ArgumentError, DataError

READ_FILES = {"models.GPRegression.load"}


def test_every_public_callable_has_an_example():
    assert without_example() == []


@pytest.mark.filterwarnings("ignore")  # of models that are too small to be fitted well
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_valid_arguments_are_taken_and_wrong_ones_raise_no_raw_error(name, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    example = EXAMPLES[name]
    no_file = pytest.raises(DataError) if name in READ_FILES else contextlib.nullcontext()
    with no_file:
        example.call(**example.arguments())
    rows = pd.DataFrame(fuzz(example, calls=3, seed=1))
    # A wrong number may be refused by torch itself, where it is used.
    rows = rows[rows["kind"] != "number"]
    assert raw_table(rows).empty, raw_table(rows).to_string()


def example(call):
    return Example("f", call, lambda: {"x": [1.0, 2.0]})


def test_what_is_raised_is_told_apart():
    def raises(error):
        def call(x):
            raise error

        return example(call)

    calls = {
        "result": example(lambda x: x), "typed": raises(ArgumentError("x", 1, "another")),
        "signature": raises(TypeError("x")), "raw": raises(RuntimeError("size mismatch")),
        "memory": raises(MemoryError()), "hang": example(lambda x: time.sleep(60)),
    }  # fmt: skip
    assert {name: perform(call, {"x": 1}, "type", 0.2)[0] for name, call in calls.items()} == {
        name: name for name in calls
    }
    assert perform(calls["signature"], {"x": 1}, "shape")[0] == "raw"


def test_a_raw_error_is_found_its_call_made_small_and_the_same_for_a_seed():
    def call(x):
        if isinstance(x, list) and len(x) != 2:
            raise RuntimeError("two numbers")

    first, again = (fuzz(example(call), calls=200, seed=3) for _ in range(2))
    assert first == again
    assert first[-1]["wrong"] == "x: list []"
    table = raw_table(pd.DataFrame(first))
    assert table["error"].tolist() == ["RuntimeError: two numbers"]
    counts = kinds_table(pd.DataFrame(first)).loc["all"]
    assert counts["calls"] == len(first) == counts["result"] + counts["raw"]
