"""Calls of the public API with wrong arguments: ``python -m benchmarks.robustness fuzz``."""

from benchmarks.robustness.fuzz.examples import EXAMPLES, public_callables, without_example
from benchmarks.robustness.fuzz.study import kinds_table, raw_table, run

__all__ = [
    "EXAMPLES", "kinds_table", "public_callables", "raw_table", "run", "without_example",
]  # fmt: skip
