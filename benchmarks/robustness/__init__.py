"""Hard problems and wrong arguments: ``python -m benchmarks.robustness``."""
