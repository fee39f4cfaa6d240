"""Deep Kernel Transfer on few-shot tasks: ``python -m benchmarks.dkt run | report``."""
