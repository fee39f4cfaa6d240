"""Bayesian optimization as a study: its grid, its tables, its figure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import pandas
from typer import Option

from benchmarks._options import Device, check_device, check_known, check_positive, names
from benchmarks._tables import section, table
from benchmarks.bo.cells import run_cell
from benchmarks.bo.surrogates import FUNCTIONS, SURROGATES
from benchmarks.bo.tables import (
    REGRETS,
    draw_figure,
    labelled,
    less_baseline,
    less_lml,
    mean_rows,
    median_rows,
    second_rows,
)
from benchmarks.study import Study

_OBJECTIVES = ("lml", "clml", "loo")  # of benchmarks.uci.training
_ABOUT = {
    "simple_regret": "The largest value of the function less the best one seen.",
    "inference_regret": "The largest value of the function less its value where the posterior "
    "mean is highest, among the points seen and one found by optimization over the cube.",
}
_DIFFERENCES = (
    "Mean paired difference in log10 of the regret ± standard error over seeds; -1 is a tenth of "
    "the regret. In bold: beyond two standard errors."
)


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
    device: Device = "cpu",
) -> list[dict[str, Any]]:
    """Every combination of these settings; ``steps`` is None in cells without a network.

    Raises:
        UnknownNameError: No such function, surrogate or objective.
        ArgumentError: A number is below 1, or the device is not at hand.
    """
    check_known("functions", functions, FUNCTIONS)
    check_known("surrogates", surrogates, SURROGATES)
    check_known("objectives", objectives, _OBJECTIVES)
    check_positive(seeds=seeds, iterations=iterations, steps=steps)
    check_device(device)
    # Seeds outermost: a run that is stopped has all methods on the seeds that it has.
    return [
        {
            "function": function, "surrogate": surrogate, "objective": objective, "seed": seed,
            "iterations": iterations, "steps": steps if surrogate == "deep" else None,
            "device": device,
        }
        for seed, function, surrogate, objective in itertools.product(
            range(seeds), functions, surrogates, objectives
        )
        if surrogate != "laplace" or objective == "lml"  # its evidence is an LML
    ]  # fmt: skip


def _sections(cells: pandas.DataFrame) -> Iterator[str]:
    for regret, heading in REGRETS.items():
        about = f"{_ABOUT[regret]} Median over {cells['seed'].nunique()} seeds [quartiles]."
        yield section(heading, about, table(median_rows(cells, regret)))
        yield section(
            f"{heading}, log10", "Mean ± standard error.", table(mean_rows(cells, regret))
        )
    # Differences after all means, so that a reader meets the plain numbers first.
    for regret, heading in REGRETS.items():
        for name, differences in (
            ("less that of SingleTaskGP under the LML", less_baseline(cells, regret)),
            ("less that of the LML, same surrogate", less_lml(cells, regret)),
        ):
            if len(differences):
                yield section(f"{heading} {name}", _DIFFERENCES, table(differences))
    about = "All fits + choosing all points, median over seeds, as other processes ran beside."
    yield section("Seconds of an optimization", about, table(second_rows(cells)))
    stopped = int(cells["failed_fits"].sum())
    if stopped:
        yield f"{stopped} fits stopped early; they count with the parameters they kept."


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
    tables=_sections,
    figure=draw_figure,
    caption="Regret against evaluations",
    data=False,
)
