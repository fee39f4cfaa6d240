"""Gaussian process regression on UCI data sets under several objectives.

``python -m benchmarks.uci run`` computes, ``python -m benchmarks.uci report`` shows. One cell
is one model trained on a few random rows of a data set and tested on rows set apart; every
kernel and objective sees the same rows for the same seed, so that differences are paired.
"""

from benchmarks.uci.cells import run_cell
from benchmarks.uci.figure import draw_figure
from benchmarks.uci.grid import make_grid
from benchmarks.uci.objectives import make_objective, objective_names
from benchmarks.uci.report import make_report, write_csv
from benchmarks.uci.studies import STUDIES, Product
from benchmarks.uci.training import optimizer_for, train

__all__ = [
    "STUDIES",
    "Product",
    "draw_figure",
    "make_grid",
    "make_objective",
    "make_report",
    "objective_names",
    "optimizer_for",
    "run_cell",
    "train",
    "write_csv",
]
