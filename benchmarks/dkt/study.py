"""Deep Kernel Transfer as a study: its grid and its tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any

import pandas
from typer import Option

from benchmarks._options import (
    Device,
    check_device,
    check_known,
    check_positive,
    names,
    whole_numbers,
)
from benchmarks._tables import section, table, with_error, with_interval
from benchmarks.dkt.baselines import BASELINES
from benchmarks.dkt.cells import BASELINE, OBJECTIVES, label, run_cell, run_together
from benchmarks.dkt.studies import STUDIES, study_named
from benchmarks.runner import Batches
from benchmarks.study import Study
from gpclml.errors import ArgumentError
from gpclml.meta import KERNELS

_METRICS = {  # title, factor and digits
    "accuracy": ("accuracy, %", 100, 1), "mse": ("squared error", 1, 3),
    "nll": ("NLL, nats a query point", 1, 3),
    "calibration_error": ("expected calibration error", 1, 3),
    "tempered_nll": ("NLL, tempered", 1, 3),
    "tempered_calibration_error": ("calibration error, tempered", 1, 3),
}  # fmt: skip
_KEYS = ["study", "ways", "shots", "kernel", "objective"]
_ABOUT = (
    "Mean over seeds ± its standard error, and half the 95% interval over the test tasks of all "
    "seeds. `pixels` is the nearest neighbour in classification and a GP fitted to each task alone "
    "in regression. Tempered: with the temperature that is best for validation tasks."
)
_ABOUT_DIFFERENCES = (
    "CLML less LML, paired by seed: mean ± half the 95% interval over seeds (Student's t). The "
    "CLML conditions on the support points and scores the query points, clml-half on a random half."
)


def sections(done: pandas.DataFrame) -> Iterator[str]:
    """The sections of the report."""
    done = _name_ways(done.assign(objective=done["objective"].fillna("-")))
    for name in sorted(set(done["study"])):
        yield f"- `{name}`: {STUDIES[name].about}."
    yield section("Results", _ABOUT, table(_results(done)))
    differences = paired_differences(done)
    if len(differences):
        yield section("CLML less LML", _ABOUT_DIFFERENCES, table(differences))


def _results(done: pandas.DataFrame) -> pandas.DataFrame:
    columns, keys = {}, _keys(done)
    for name, (title, factor, digits) in _METRICS.items():
        if name in done:
            columns[title] = done.groupby(keys)[name].agg(_mean, factor, digits)
        if name in done and name in ("accuracy", "mse"):
            # Intervals of seeds are combined as of independent tasks.
            halves = done.assign(half=factor * done["interval"].where(done[name].notna()))
            combined = halves.groupby(keys)["half"].agg(_interval, digits)
            columns[f"95% over tasks ({name})"] = combined
    if "train_seconds" in done:
        seconds = done.groupby(keys)["train_seconds"].mean()
        columns["seconds of training"] = seconds.map("{:.0f}".format, na_action="ignore")
    return pandas.DataFrame(columns).fillna("-")


def _name_ways(done: pandas.DataFrame) -> pandas.DataFrame:
    """With numbers of ways as text, ``-`` for the study's own."""
    if "ways" not in done:
        return done
    ways = [
        "-" if pandas.isna(value) or value == "-" else str(int(value)) for value in done["ways"]
    ]
    return done.assign(ways=ways)


def _keys(done: pandas.DataFrame) -> list[str]:
    """What tells rows of a table apart: of runs with other numbers of ways these too."""
    return [name for name in _KEYS if name != "ways" or "ways" in done]


def _mean(values: pandas.Series, factor: int, digits: int) -> str:
    """Over seeds, with its standard error where there are several."""
    return with_error(factor * values.dropna(), digits)


def _interval(halves: pandas.Series, digits: int) -> str:
    """Half the 95% interval of the mean over the test tasks of all seeds together."""
    halves = halves.dropna()
    return f"± {math.sqrt((halves**2).sum()) / len(halves):.{digits}f}" if len(halves) else "-"


def paired_differences(
    done: pandas.DataFrame, of: str = "objective", base: str = "lml"
) -> pandas.DataFrame:
    """Scores less those of one objective, or of one kernel, paired by seed.

    Args:
        done: Finished cells.
        of: ``"objective"`` or ``"kernel"``: what differs in a pair; all else is the same.
        base: The objective or kernel whose scores are subtracted.

    Returns:
        A row for each study, number of ways and shots, kernel and objective, with means and half
        their 95% intervals over seeds.
    """
    done = _name_ways(done.assign(objective=done["objective"].fillna("-")))
    keys, metrics = _keys(done), [name for name in ("accuracy", "mse", "nll") if name in done]
    same = [*(name for name in keys if name != of), "seed"]
    bases = done[done[of] == base].set_index(same)[metrics].add_suffix("_base")
    pairs = done[done[of] != base].join(bases, on=same, how="inner")
    columns, rows = {}, [pairs[key] for key in keys]
    for name, (title, factor, digits) in _METRICS.items():
        if name in metrics:
            less = factor * (pairs[name] - pairs[f"{name}_base"])
            columns[title] = less.groupby(rows).agg(_paired, digits)
    return pandas.DataFrame(columns).dropna(axis="columns", how="all").fillna("-")


def _paired(values: pandas.Series, digits: int) -> str | float:
    values = values.dropna()
    return with_interval(values, digits, "+") if len(values) else math.nan


def make_grid(
    study: Annotated[
        tuple[str, ...],
        Option(help=f"Studies, comma-separated: {', '.join(STUDIES)}."),
        names,
    ],
    shots: Annotated[
        tuple[int, ...] | None,
        Option(help="Images a class or points to learn from, comma-separated; the study's."),
        whole_numbers,
    ] = None,
    ways: Annotated[int | None, Option(min=2, help="Classes of a task; the study's.")] = None,
    kernels: Annotated[
        tuple[str, ...],
        Option(
            help="Kernels on features, comma-separated, and baselines: "
            f"{', '.join((BASELINE, *BASELINES))}."
        ),
        names,
    ] = ("cosine", "batch-norm-cosine", "linear", BASELINE),
    objectives: Annotated[
        tuple[str, ...],
        Option(
            help="lml, clml (given the support points), clml-half (given a random half of the "
            "points), comma-separated."
        ),
        names,
    ] = ("lml", "clml"),
    seeds: Annotated[int, Option(min=1, help="Number of seeds, 0, 1, ....")] = 10,
    steps: Annotated[int, Option(min=1, help="Adam steps.")] = 2500,
    tasks_per_step: Annotated[int, Option(min=1, help="Tasks of a step.")] = 1,
    lr: Annotated[float, Option(help="Learning rate of Adam.")] = 1e-3,
    test_tasks: Annotated[int, Option(min=1, help="Tasks to test on.")] = 600,
    device: Device = "cpu",
) -> list[dict[str, Any]]:
    """Every combination of these settings, each cell once; draws one task of each to check.

    Raises:
        UnknownNameError: A name is not known; the message lists the nearest known ones.
        ArgumentError: A number is out of range, or data do not suffice for so many shots.
        DataError: Data are not there and cannot be fetched.
    """
    # Cells name kernels with hyphens, as those of results that are stored do.
    kernels = tuple(dict.fromkeys(name.replace("_", "-") for name in kernels))
    known = [name.replace("_", "-") for name in (*KERNELS, BASELINE, *BASELINES)]
    check_known("kernels", kernels, known)
    check_known("objectives", objectives, OBJECTIVES)
    counts = {"steps": steps, "tasks_per_step": tasks_per_step, "test_tasks": test_tasks}
    check_positive(seeds=seeds, lr=lr, **counts)
    check_device(device)
    # One task of each is drawn before anything runs: missing data are told at once.
    pairs = [(name, k) for name in study for k in shots or study_named(name).shots]
    for name, k in pairs:
        unfit = [value for value in kernels if value in BASELINES]
        if unfit and not study_named(name).classes:
            fix = "Leave out that study or baseline."
            raise ArgumentError("kernels", unfit[0], f"kernels or pixels for {name}", fix)
        if ways is not None and not study_named(name).classes:
            raise ArgumentError("ways", ways, f"none for {name}, which has no classes")
        study_named(name).sources_of({"shots": k, "seed": 0, "ways": ways})
    cells = []
    for (name, k), kernel, objective, seed in itertools.product(
        pairs, kernels, objectives, range(seeds)
    ):
        trained, is_gp = kernel != BASELINE, kernel not in (BASELINE, *BASELINES)
        cell = {
            "study": name, "shots": k, "seed": seed, "kernel": kernel,
            "objective": objective if is_gp else None, "steps": steps if trained else None,
            "tasks_per_step": tasks_per_step if trained else None, "lr": lr if trained else None,
            "test_tasks": test_tasks, "device": device,
        }  # fmt: skip
        # Left out where it is the study's own, so that older results keep their keys.
        if ways is not None:
            cell["ways"] = ways
        cells.append(cell)
    return list({tuple(cell.items()): cell for cell in cells}.values())


STUDY = Study(
    name="dkt",
    about="Deep Kernel Transfer on few-shot tasks under the LML and the CLML.",
    title="Deep Kernel Transfer",
    running="Trains a model for each study, number of shots, kernel, objective and seed on tasks "
    "of some classes, and tests it on tasks of others.",
    reporting="means over seeds, and the CLML less the LML by seed.",
    grid=make_grid,
    cell=run_cell,
    batches=Batches(run_together, label, lambda _: 3),  # studies of one training, at most
    needed=("study", "shots", "kernel", "objective", "interval"),
    label="{study} shots={shots} {kernel} {objective} seed {seed}",
    stand_in="Without files: --study digits, images that come with scikit-learn; or --study "
    "periodic, sine waves.",
    tables=sections,
)
