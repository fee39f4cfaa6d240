"""Calls of the public API with wrong arguments: ``python -m benchmarks.robustness fuzz``."""

from benchmarks.robustness.fuzz.examples import EXAMPLES, public_callables, without_example
from benchmarks.robustness.fuzz.study import by_kind, raw_errors, run

__all__ = ["EXAMPLES", "by_kind", "public_callables", "raw_errors", "run", "without_example"]
