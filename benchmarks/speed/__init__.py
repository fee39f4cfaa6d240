"""Steps and fits timed against those of other libraries: ``python -m benchmarks.speed``."""
