"""Bayesian optimization as a study: its grid, its tables, its figure."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

from typer import Option

from benchmarks._options import check_known, check_positive, names
from benchmarks.bo.cells import run_cell
from benchmarks.bo.surrogates import FUNCTIONS, SURROGATES
from benchmarks.bo.tables import REGRETS, draw_figure, labelled, sections
from benchmarks.study import Study

_OBJECTIVES = ("lml", "clml", "loo")  # of benchmarks.uci.training


def make_grid(
    functions: Annotated[
        tuple[str, ...],
        Option(help="Test functions, comma-separated: branin, hartmann-6, ackley-10, levy-10."),
        names,
    ] = tuple(FUNCTIONS),
    surrogates: Annotated[
        tuple[str, ...],
        Option(
            help="Surrogates, comma-separated: single-task (BoTorch's SingleTaskGP), deep "
            "(DeepKernelGP), laplace (the Laplace posterior of a network, under the LML alone)."
        ),
        names,
    ] = ("single-task", "deep"),
    objectives: Annotated[
        tuple[str, ...], Option(help="Objectives, comma-separated: lml, clml, loo."), names
    ] = _OBJECTIVES,
    seeds: Annotated[int, Option(min=1, help="Number of seeds, 0, 1, ....")] = 20,
    iterations: Annotated[
        int, Option(min=1, help="Evaluations after the 2 (d + 1) initial ones.")
    ] = 20,
    steps: Annotated[int, Option(min=1, help="Adam steps of a network at each fit.")] = 15,
) -> list[dict[str, Any]]:
    """Every combination of these settings; ``steps`` is None in cells without a network.

    Raises:
        UnknownNameError: No such function, surrogate or objective.
        ArgumentError: A number is below 1.
    """
    check_known("functions", functions, FUNCTIONS)
    check_known("surrogates", surrogates, SURROGATES)
    check_known("objectives", objectives, _OBJECTIVES)
    check_positive(seeds=seeds, iterations=iterations, steps=steps)
    # Seeds outermost: a run that is stopped has all methods on the seeds that it has.
    return [
        {
            "function": function, "surrogate": surrogate, "objective": objective, "seed": seed,
            "iterations": iterations, "steps": steps if surrogate == "deep" else None,
        }
        for seed, function, surrogate, objective in itertools.product(
            range(seeds), functions, surrogates, objectives
        )
        if surrogate != "laplace" or objective == "lml"  # its evidence is an LML
    ]  # fmt: skip


STUDY = Study(
    name="bo",
    about="Bayesian optimization with surrogates fitted under several objectives.",
    title="Bayesian optimization",
    running="Maximizes each test function with each surrogate, fitted under each objective, one "
    "evaluation at a time by LogExpectedImprovement, once a seed.",
    reporting="regrets over seeds, differences paired by seed.",
    grid=make_grid,
    cell=run_cell,
    needed=("function", "surrogate", *REGRETS),
    label="{function} {surrogate} {objective} seed {seed}",
    prepare=labelled,
    tables=sections,
    figure=draw_figure,
    caption="Regret against evaluations",
    data=False,
)
