"""Gradient steps timed against GPyTorch's: ``python -m benchmarks.speed``."""
