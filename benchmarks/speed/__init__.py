"""Gradient steps timed against GPyTorch's: ``python -m benchmarks.speed``."""

from benchmarks.speed.memory import peak_memory
from benchmarks.speed.methods import BASE, LOO_BASE, METHODS, Problem
from benchmarks.speed.study import measure
from benchmarks.speed.timing import interleaved_times, ratios

__all__ = [
    "BASE",
    "LOO_BASE",
    "METHODS",
    "Problem",
    "interleaved_times",
    "measure",
    "peak_memory",
    "ratios",
]
