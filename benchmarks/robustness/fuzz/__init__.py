"""Calls of the public API with wrong arguments: ``python -m benchmarks.robustness fuzz``."""
