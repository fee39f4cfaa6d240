"""Benchmarks of gpclml: each folder is a command, ``python -m benchmarks.NAME``."""
