"""Evidence of networks as a study: the options of its grid, its tables, the page of its ledger."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas
import typer
from numpy.typing import NDArray
from typer import Argument, Option

from benchmarks._options import CsvFile, Device, ResultsFile, errors_as_text, names, real_numbers
from benchmarks._tables import section, table, with_error
from benchmarks.evidence.cells import STUDIES, make_grid, run_cell
from benchmarks.evidence.ledger.claims import rank_correlation_rows
from benchmarks.evidence.ledger.page import (
    EXPERIMENTS,
    chosen_experiments,
    is_rows,
    ledger_cells,
    write_page,
    write_rows,
)
from benchmarks.evidence.ledger.perturbed import run_perturbed
from benchmarks.evidence.ledger.uci_networks import PUBLISHED
from benchmarks.evidence.training import DATA
from benchmarks.runner import load_results
from benchmarks.study import Study, Sweep
from gpclml.errors import ArgumentError

# Columns of Immer et al. (2021), Table 1; a curvature stands for their online marginal likelihood.
_PUBLISHED_METHODS = ("CV MAP", "CV Laplace", "full, ggn", "full, ef", "kronecker, ggn")
_SCORES = (
    "lml", "lml_global", "lml_layer", "lml_online", "clml", "clml_sampled", "clml_marginal",
    "clml_sgld", "clml_ensemble", "validation",
)  # fmt: skip
_REACHED = (
    "accuracy_map", "accuracy_bma", "log_density_map", "log_density_bma",
    "log_density_map_tempered", "log_density_bma_tempered", "log_density_sgld",
    "log_density_ensemble", "log_density_online",
)  # fmt: skip
_CONVOLUTIONAL = ("cnn", "convnet", "resnet", "wrn")
_GROUPS = {"all": ("mlp", *_CONVOLUTIONAL), "mlp": ("mlp",), "cnn, resnet": _CONVOLUTIONAL}


_AVERAGED = tuple(
    f"{result}_{label}"
    for result in ("accuracy", "log_density")
    for label in ("train", "map", "bma", "sgld", "ensemble", "online")
)
"""Accuracies and log densities by what is averaged over."""


def _present(cells: pandas.DataFrame, names: Iterable[str]) -> list[str]:
    return [name for name in names if name in cells]


def correlations(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Spearman's rho of scores with test results, by precision and family of three or more."""
    rows = []
    scores, reached = _present(cells, _SCORES), _present(cells, _REACHED)
    family = cells["architecture"].str.partition("-")[0]
    for precision, same_precision in cells.groupby("precision"):
        for group, families in _GROUPS.items():
            chosen = same_precision[family[same_precision.index].isin(families)]
            means = chosen.groupby("architecture")[[*scores, *reached]].mean()
            if len(means) >= 3:
                rho = means.corr(method="spearman").loc[scores, reached]
                shown = rho.map("{:+.2f}".format)
                rows.append(pandas.concat({(f"{precision:g}", group): shown}))
    names = ["precision", "of", "score"]
    return pandas.concat(rows).rename_axis(index=names) if rows else pandas.DataFrame()


_COLLAPSED = 0.2  # accuracy of a network that has learned nothing; guessing has .1
# Correlations with intervals are shown for these results only.
_COMPARED = (
    "log_density_bma", "log_density_map", "log_density_ensemble", "log_density_online",
    "accuracy_map",
)  # fmt: skip


def intervals(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Spearman's rho with an interval over networks, and differences from the validation loss.

    An interval has 95 % of 2000 bootstrap samples of three or more networks. Those that learned
    nothing are left out, if three are left.
    """
    random = np.random.RandomState(0)
    scores, compared = _present(cells, _SCORES), _present(cells, _COMPARED)
    rows = []
    for precision, same_precision in cells.groupby("precision"):
        means = same_precision.groupby("architecture")[[*scores, *compared]].mean()
        if len(means) < 3:
            continue
        # Collapsed networks agree on every score and would raise each correlation.
        learned = means[means["accuracy_map"] > _COLLAPSED]
        learned = means if len(learned) < 3 else learned
        drawn = random.randint(len(learned), size=(2000, len(learned)))
        # The networks themselves come first, then the samples of them.
        samples = np.concatenate([np.arange(len(learned))[None], drawn])
        values = {name: learned[name].to_numpy()[samples] for name in {*scores, *compared}}
        for name in scores:
            row = {"precision": f"{precision:g}", "networks": len(learned), "score": name}
            for reached in compared:
                rho, validation = (
                    rank_correlation_rows(values[score], values[reached])
                    for score in (name, "validation")
                )
                row[reached] = _interval_text(rho)
                row[f"{reached}, less validation"] = _interval_text(rho - validation)
            rows.append(row)
    names = ["precision", "networks", "score"]
    return pandas.DataFrame(rows).set_index(names) if rows else pandas.DataFrame()


def _interval_text(values: NDArray[np.float64]) -> str:
    """The first of them, and an interval of the others."""
    low, high = np.nanquantile(values[1:], (0.025, 0.975))
    return f"{values[0]:+.2f} [{low:+.2f}, {high:+.2f}]"


def posterior_scales(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Scales of the CLML's posterior, and how many draws have its weight."""
    counted = {
        "scale at the edge of its grid": cells["posterior_at_edge"] > 0,
        "fewer than five effective draws": cells["clml_draws"] < 5,
        "collapsed": cells["accuracy_map"] < _COLLAPSED,
    }
    groups = cells.assign(**counted).groupby("precision")
    frame = groups[[*counted]].sum().astype(int)
    frame.insert(0, "cells", groups.size())
    frame.insert(2, "median scale", groups["posterior_scale"].median())
    return frame.rename("{:g}".format)


def mean_results(cells: pandas.DataFrame) -> pandas.DataFrame:
    """What the networks reach on test points, mean over all of a precision."""
    means = cells.groupby("precision")[_present(cells, _AVERAGED)].mean()
    return means.map("{:.3f}".format).rename("{:g}".format)


def architecture_rows(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Scores and test results of each network and precision."""
    means = cells.groupby(["precision", "architecture", "parameters"])[
        _present(cells, [*_SCORES, *_AVERAGED])
    ].mean()
    shown = means.map("{:.3f}".format)
    accuracies = [name for name in means if name.startswith("accuracy")]
    shown[accuracies] = (100 * means[accuracies]).map("{:.1f}".format)
    return shown


def _tables_of_sizes(make: _Table, cells: pandas.DataFrame) -> pandas.DataFrame:
    """A table for every number of images, where there are several."""
    tables = {str(int(n)): make(some) for n, some in cells.groupby("num_train")}
    # With a single number of images a column for it would say nothing.
    if len(tables) == 1:
        return tables.popitem()[1]
    tables = {n: frame for n, frame in tables.items() if len(frame)}
    return pandas.concat(tables, names=["images"]) if tables else pandas.DataFrame()


def bound_rows(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Every estimate by its time, with its gap to the full GGN."""
    keys = ["architecture", "structure", "hessian", "batch_size", "partition", "outputs"]
    sizes = cells["batch_size"].fillna(0).astype(int).replace(0, "all")
    means = cells.assign(batch_size=sizes).groupby(keys)
    means = means[["evidence", "evidence_spread", "seconds_each"]].mean()
    full = means.xs(("full", "ggn", "all", "random", "all"), level=tuple(keys[1:]))["evidence"]
    gap = full.reindex(means.index.get_level_values("architecture")).to_numpy() - means["evidence"]
    shown = means.assign(gap=gap)[["seconds_each", "evidence", "gap", "evidence_spread"]]
    # By time within each architecture: a stable sort keeps the order.
    shown = shown.sort_values("seconds_each").sort_index(level="architecture", sort_remaining=False)
    return shown.map("{:.4f}".format)


def regression_rows(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Test errors of networks on UCI sets, beside the published ones."""
    cells = cells.assign(method=cells["structure"] + ", " + cells["hessian"])
    names = ("nll_map", "nll_laplace", "rmse", "evidence")
    shown = _means_and_errors(cells, ["data", "method"], names)
    # Published methods that were not run get rows of their own, beside ours.
    for data in set(PUBLISHED) & set(cells["data"]):
        for method, (value, error) in zip(_PUBLISHED_METHODS, PUBLISHED[data], strict=True):
            shown.loc[(data, method), "published NLL"] = f"{value:.2f} ± {error:.2f}"
    return shown.fillna("-").sort_index()


def size_rows(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Accuracy of each network by the number of points."""
    means = cells.groupby(["architecture", "num_train"])["accuracy_map"].mean().unstack()
    return (100 * means.rename(columns="{:.0f}".format)).map("{:.1f}".format)


def speed_ranks(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Training speed and evidence of each network beside what it reaches with all points."""
    nats = cells.assign(nats=cells["next_log_density"] * cells["num_train"])
    totals = nats.groupby(["architecture", "seed"])["nats"].sum()
    last = cells[cells["num_train"] == cells["num_train"].max()].groupby("architecture")
    columns = {
        "training speed": totals.groupby(level=0).mean(),
        "LML": last["lml"].mean(),
        "accuracy, %": 100 * last["accuracy_map"].mean(),
        "log density": last["log_density_map"].mean(),
    }
    frame = pandas.DataFrame(columns).sort_values("log density", ascending=False)
    return frame.map(lambda value: f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}")


def _means_and_errors(
    cells: pandas.DataFrame, keys: Sequence[str], names: Sequence[str]
) -> pandas.DataFrame:
    """Means over seeds with their standard errors."""
    groups = cells.groupby(list(keys))[_present(cells, names)]
    return groups.agg(lambda values: with_error(values.dropna()))


_Table = Callable[[pandas.DataFrame], pandas.DataFrame]
_LEARNED_SCORES = "evidence", "accuracy_map", "log_density_map", "calibration_error_map"
_CURVE_SCORES = (
    "lml", "lml_layer", "clml_sampled", "clml_marginal", "validation", "log_density_map",
    "log_density_bma", "accuracy_map",
)  # fmt: skip

_SECTIONS: tuple[tuple[str, str, str, _Table], ...] = (
    (
        "architectures",
        "Which score says how a network generalizes",
        "Spearman correlation over networks of each score with what they reach on test points; "
        "`lml_global` and `lml_layer` have precisions fitted to the evidence after training; "
        "`lml_online` and `online` are of networks in whose training they are learned. "
        "`bma` is the average over the Laplace posterior, `sgld` over ten Langevin draws, "
        "`ensemble` over networks from other starts, `tempered` after temperature scaling.",
        correlations,
    ),
    (
        "architectures",
        "With intervals over networks",
        "Spearman correlation with test results, and its difference from that of the "
        "validation log density; in brackets 95 % of 2000 bootstrap samples of the networks, "
        "without those that learned nothing.",
        intervals,
    ),
    (
        "architectures",
        "What the CLML scores",
        "At the smallest scale draws of the posterior are nearly its mode, and the CLML is the "
        "validation loss by another name. Where few of 100 draws have the weight, "
        "`clml_sampled` is the density of the best one.",
        posterior_scales,
    ),
    (
        "architectures",
        "What one network and averages reach",
        "Mean over the networks and seeds: accuracy, and log density in nats a point; `train` "
        "is the mode at its training points.",
        mean_results,
    ),
    (
        "architectures",
        "The networks",
        "Nats a point, mean over seeds; accuracy in %.",
        architecture_rows,
    ),
    (
        "bounds",
        "Tightness and cost of estimates",
        "Nats a point, of one trained network each. `spread`: standard deviation over at most "
        "ten batches of a partition. `seconds`: one estimate with its gradient in the "
        "precisions of layers, the fastest. Gap: full GGN less the estimate; a lower bound "
        "has a positive one.",
        bound_rows,
    ),
    (
        "invariance",
        "A rotation that is learned",
        "Mean over seeds ± standard error; `rotation` is half the range, in degrees, "
        "from a start of 11.5.",
        partial(
            _means_and_errors,
            keys=("architecture", "turned", "invariance"),
            names=("rotation", "evidence", "accuracy_map", "log_density_map"),
        ),
    ),
    (
        "online-regression",
        "UCI networks [D, 50, 1], precisions and noise learned online",
        "Test NLL, nats in original units, mean over splits ± standard error, beside Immer et "
        "al. (2021, Table 1; ten splits of their own).",
        regression_rows,
    ),
    (
        "online-search",
        "Precisions from a grid, and learned online",
        "Mean over seeds ± standard error. `grid`: one precision throughout; `network` and "
        "`layer`: learned in training, from 1.",
        partial(
            _means_and_errors,
            keys=("data", "architecture", "by", "precision"),
            names=_LEARNED_SCORES,
        ),
    ),
    (
        "curves",
        "Learning curves",
        "Nats a point and shares, mean over seeds ± standard error; `lml` at the precision that is "
        "the weight decay, `lml_layer` with precisions of layers fitted to it.",
        partial(
            _means_and_errors,
            keys=("data", "architecture", "num_train"),
            names=_CURVE_SCORES,
        ),
    ),
    (
        "learned",
        "Precisions and invariances that are learned in training",
        "Mean over seeds ± standard error; `evidence` in nats a point, by the estimate.",
        partial(
            _means_and_errors,
            keys=("recipe", "data", "num_train", "architecture", "estimate"),
            names=(*_LEARNED_SCORES, "seconds_hyper"),
        ),
    ),
    ("training-speed", "Against the number of points", "Accuracy, %, mean over seeds.", size_rows),
    (
        "training-speed",
        "Speed and end",
        "Training speed is the sum of log densities of the next n points, n = 25, 50, ..., in "
        "nats; the LML is that of the last n with precisions fitted to it.",
        speed_ranks,
    ),
)
"""Study, title, text and table of each section."""


def sections(done: pandas.DataFrame) -> Iterator[str]:
    """The sections of the report."""
    for study, title, text, make in _SECTIONS:
        cells = done[done["study"] == study].dropna(axis="columns", how="all")
        if len(cells):
            shown = _tables_of_sizes(make, cells) if study == "architectures" else make(cells)
            if len(shown):
                yield section(title, text, table(shown))


def _grid(
    study: Annotated[
        str,
        Argument(
            help=f"{', '.join(STUDIES)}; an experiment of the ledger; or ledger for all of those."
        ),
    ],
    data: Annotated[
        str | None, Option(help=f"Images: {', '.join(DATA)}; digits are embedded.")
    ] = None,
    architectures: Annotated[
        tuple[str, ...] | None,
        Option(
            help="Networks, comma-separated: by width x depth mlp-32x2, cnn-8x3, convnet-8x5, "
            "resnet-8x1; by depth and width resnet-20-16, wrn-16-4; lenet; of torchvision "
            "resnet18, vgg19, densenet121, googlenet."
        ),
        names,
    ] = None,
    precisions: Annotated[
        tuple[float, ...] | None,
        Option(help="Prior precisions of weights, comma-separated."),
        real_numbers,
    ] = None,
    num_train: Annotated[int | None, Option(min=1, help="Images to train on.")] = None,
    epochs: Annotated[int | None, Option(min=1, help="Passes over them.")] = None,
    seeds: Annotated[int | None, Option(min=1, help="Number of seeds, 0, 1, ....")] = None,
    members: Annotated[
        int | None,
        Option(min=1, help="Networks of an ensemble in architectures and lotfi-2022; 1: none."),
    ] = None,
    lr: Annotated[
        float | None,
        Option(
            help="Learning rate at the start of trainings in architectures (.003 for MLPs and "
            "CNNs, .01 for residual networks, if not given), and in studies of papers."
        ),
    ] = None,
    perturbed: Annotated[
        int | None,
        Option(
            help="Of experiments of the ledger: every start of a search times 1 + 1e-6 N(0, 1), "
            "of that seed, to see whether verdicts stay; give it a results file of its own."
        ),
    ] = None,
    device: Device = "cpu",
) -> list[dict[str, Any]]:
    """The cells of a study, whose settings options replace, or of experiments of the ledger."""
    given = dict(
        data=data, architectures=architectures, precisions=precisions, num_train=num_train,
        epochs=epochs, seeds=seeds, members=members, lr=lr,
    )  # fmt: skip
    if study in STUDIES:
        if perturbed is not None:
            fix = f"Leave it out: {study} has no verdicts."
            raise ArgumentError("perturbed", perturbed, "nothing", fix)
        return make_grid(study, **given, device=device)
    # An experiment has the paper's settings: options would make it another one.
    for name, value in given.items():
        if value is not None:
            fix = f"Leave out --{name.replace('_', '-')}."
            raise ArgumentError(name, value, f"nothing: {study} has its own", fix)
    chosen = chosen_experiments(study, STUDIES)
    for experiment in chosen:
        experiment.ready()  # a missing file is told before a cell runs
    starts = {} if perturbed is None else {"perturbed": perturbed}
    return [cell | starts for experiment in chosen for cell in experiment.cells()]


def _sweeps(cells: list[dict[str, Any]]) -> Iterator[Sweep]:
    for name, some in itertools.groupby(cells, lambda cell: cell.get("experiment")):
        several, run = list(some), EXPERIMENTS[name].run if name else run_cell
        yield Sweep(several, run_perturbed if "perturbed" in several[0] else run)


def _study_cells(cells: pandas.DataFrame) -> pandas.DataFrame:
    # Results of an experiment of the ledger may be named like a setting of a study.
    rows = cells[cells["experiment"].isna()] if "experiment" in cells else cells
    return rows[rows["study"].notna()] if "study" in rows else rows[:0]


STUDY = Study(
    name="evidence",
    about="Laplace evidence, its bounds, and conditional evidence of networks.",
    title="Evidence of networks",
    running="Options replace the settings of a study.\n\n"
    "- architectures: which score of a network says how it generalizes;\n"
    "- bounds: tightness and cost of every estimate of the evidence; use --jobs 1 for its times;\n"
    "- invariance: a rotation learned from turned images and from upright ones;\n"
    "- online: precisions learned in training beside a grid of them, and UCI networks;\n"
    "- training-speed: architectures against the number of points;\n"
    "- lotfi-2022, immer-2021 and immer-2023, each with what it is about: the papers' networks at "
    "their settings, for those with the data and a GPU. docs/reproduce.md says how long they "
    "take; --num-train, --epochs, --architectures and --seeds shrink them;\n"
    "- ledger, or the name of one of its experiments: claims of papers, one after the other; "
    "they take no options but those of any run. Those of an hour or more run by their names only.",
    reporting="tables of studies; of the ledger its claims.",
    grid=_grid,
    cell=run_cell,
    sweeps=_sweeps,
    choose=_study_cells,
    needed=("study",),
    label="{study} {data} seed {seed}",
    stand_in="Without files: run ledger, which takes scikit-learn's digits where images are "
    "missing; or another study with --data digits.",
    tables=sections,
)


def report(
    results: ResultsFile,
    csv: CsvFile = None,
    page: Annotated[Path, Option(help="The page of the ledger; its pictures go beside it.")] = Path(
        "benchmarks/evidence/RESULTS.md"
    ),
) -> None:
    """Print the report: tables of studies in Markdown; of the ledger its claims.

    Where the file has experiments of the ledger their page is written, with a picture each. It can
    also be made of the ledger's rows: --results benchmarks/evidence/results/ledger.csv.gz.
    """
    with errors_as_text():
        ledger = ledger_cells(results)
        # A file may hold both: studies then follow the ledger's claims.
        both = bool(ledger) and not is_rows(results) and len(_study_cells(load_results(results)))
        if both and csv is not None:
            fix = "Keep studies and the ledger in results files of their own."
            raise ArgumentError("csv", str(csv), "a results file of one kind", fix)
        if ledger:
            typer.echo(write_page(results, page))
            if csv is not None:
                write_rows(results, csv)
        if not ledger or both:
            typer.echo(STUDY.sections(results, csv))
