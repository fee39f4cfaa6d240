"""Runs a grid of cells on several workers and keeps each result in one SQLite file.

A cell is a configuration, a dictionary of JSON values; a cell function makes metrics of it.
:func:`run_grid` computes the cells that a results file lacks, :func:`load_results` reads them.
"""

from benchmarks.runner.code import package_versions
from benchmarks.runner.grid import Batches, GridSummary, run_grid
from benchmarks.runner.results import (
    canonical_json,
    load_commands,
    load_failures,
    load_results,
    load_rows,
)

__all__ = [
    "Batches", "GridSummary", "canonical_json", "load_commands", "load_failures", "load_results",
    "load_rows", "package_versions", "run_grid",
]  # fmt: skip
