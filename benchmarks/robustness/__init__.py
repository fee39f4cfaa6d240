"""Hard problems and wrong arguments: ``python -m benchmarks.robustness``."""

from benchmarks.robustness.methods import METHODS
from benchmarks.robustness.problems import HardProblem, draw_problem
from benchmarks.robustness.study import run, summarize

__all__ = ["METHODS", "HardProblem", "draw_problem", "run", "summarize"]
