"""The experiments of the ledger, and the page of their claims with a picture of each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pandas

from benchmarks._figures import new_figure, save_figure
from benchmarks._tables import code, describe_cells, section, table
from benchmarks.evidence.ledger import (
    density,
    elbo,
    evidence_bounds,
    evidence_ranking,
    fourier,
    kernel_hyperparameters,
    laplace_toy,
    mlp_mean,
    occam,
    online_curve,
    pac_bayes,
    training_speed_kernel,
    training_speed_linear,
    training_speed_networks,
    uci_networks,
)
from benchmarks.evidence.ledger.claims import Claim, Experiment
from benchmarks.evidence.ledger.out_of_reach import CHECKED, OUT_OF_REACH
from benchmarks.runner import load_commands, load_failures, load_results
from gpclml.errors import DataError, UnknownNameError

__all__ = ["EXPERIMENTS", "PAPERS", "chosen_experiments", "headline", "ledger_cells", "write_page"]

PAPERS: Mapping[str, tuple[Experiment, ...]] = MappingProxyType(
    {
        "Lotfi et al. 2022": (
            occam.EXPERIMENT, laplace_toy.EXPERIMENT, density.EXPERIMENT, fourier.FOURIER,
            kernel_hyperparameters.SHAPE, kernel_hyperparameters.LENGTHSCALE, mlp_mean.EXPERIMENT,
            fourier.CURVES, fourier.CRITERIA, pac_bayes.EXPERIMENT,
        ),
        "Lyle et al. 2020": (
            training_speed_linear.LINEAR, training_speed_linear.COMBINATION,
            training_speed_kernel.NTK, training_speed_networks.NETWORKS,
            training_speed_networks.SUBNETWORKS,
        ),
        "Harvey and Hughes 2026": (elbo.FAMILIES, elbo.SWEEP, elbo.TEMPERING, elbo.IMPORTANCE),
        "Immer et al. 2021": (
            uci_networks.EXPERIMENT, online_curve.EXPERIMENT, evidence_ranking.EXPERIMENT,
        ),
        "Immer et al. 2023": (evidence_bounds.BOUNDS, evidence_bounds.AFFINE),
    }
)  # fmt: skip
"""Experiments by the paper that their claims are from, in the order of the page."""

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {experiment.name: experiment for several in PAPERS.values() for experiment in several}
)
"""In the order of the page."""


def chosen_experiments(name: str, others: Iterable[str] = ()) -> list[Experiment]:
    """The experiment of that name; for ``"ledger"`` every experiment that does not take hours.

    Raises:
        UnknownNameError: There is none.
    """
    if name == "ledger":
        return [experiment for experiment in EXPERIMENTS.values() if not experiment.hours]
    if name not in EXPERIMENTS:
        raise UnknownNameError("study", name, [*EXPERIMENTS, "ledger", *others])
    return [EXPERIMENTS[name]]


_UNKNOWN = "Not examined yet: whose fault it is is not known."
_INTRODUCTION = (
    "Each row is a claim of a paper and the experiment that tries it (`python -m "
    "benchmarks.evidence run NAME`). The verdict is computed by the rule in the column "
    "*reproduced if*: all of it holds (*reproduced*), some of it (*partly*), or none (*not*). "
    "Errors are standard errors. "
    "A row marked *ours* is not a claim of the paper but a question of our own; one marked "
    "*smaller* is tried on fewer or other data than the paper's. Below each table, a note on "
    "each row that is not reproduced says whether the reason is ours or the paper's, and what "
    "was tried."
)


def ledger_cells(path: str | os.PathLike[str]) -> dict[str, pandas.DataFrame]:
    """Finished cells of experiments by name, in the order of the page.

    Raises:
        DataError: There is no such file.
    """
    done = load_results(path, provenance=True)
    if "experiment" not in done:
        return {}
    finished = {}
    for name in EXPERIMENTS:
        cells = done[done["experiment"] == name].dropna(axis="columns", how="all")
        if len(cells):
            # Beside cells without a seed those of others are read as numbers with a point.
            whole = cells.astype({"seed": int}) if "seed" in cells else cells
            finished[name] = whole.reset_index(drop=True)
    return finished


def headline(claims: Iterable[Claim]) -> str:
    """How many claims there are, at which size they are tried, and what became of them."""
    every = list(claims)
    published = [claim for claim in every if not claim.question]
    counts = {
        verdict: sum(claim.verdict == verdict for claim in published)
        for verdict in ("reproduced", "partly", "not")
    }
    full_size = [claim.verdict for claim in published if claim.full_size]
    return (
        f"**{len(published)} claims of papers: {counts['reproduced']} reproduced, "
        f"{counts['partly']} partly, {counts['not']} not. {len(full_size)} of them are tried at "
        f"the paper's size: {full_size.count('reproduced')} reproduced.** Beside them "
        f"{len(every) - len(published)} questions of our own, and "
        f"{sum(map(len, OUT_OF_REACH.values()))} tables and figures out of reach, listed with the "
        "reason."
    )


def write_page(path: str | os.PathLike[str], page: str | os.PathLike[str]) -> str:
    """Writes the page, and the pictures into a folder ``figures`` beside it.

    Returns:
        The headline and the verdicts as a table.

    Raises:
        DataError: There is no finished experiment in the file, or the page cannot be written.
    """
    finished = ledger_cells(path)
    if not finished:
        raise DataError(f"{path}: no finished experiments. Run some first.")
    page = Path(page)
    folder = page.parent / "figures"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made ({error}). Name another page.") from error
    claims = {name: EXPERIMENTS[name].claims(cells) for name, cells in finished.items()}
    line = headline(experiment for several in claims.values() for experiment in several)
    summary = _summary(claims)
    paragraphs = [
        "# Claims and what became of them",
        line,
        _INTRODUCTION,
        code(_about(path, finished)),
    ]
    paragraphs.append(summary)
    for paper, experiments in PAPERS.items():
        paragraphs.append(section(paper, f"Citations were checked: {CHECKED[paper]}"))
        for experiment in experiments:
            if experiment.name in finished:
                cells = finished[experiment.name]
                figure = new_figure(*experiment.size, layout="constrained")
                experiment.draw(cells, figure)
                picture = folder / f"{experiment.name}.png"
                save_figure(figure, picture)
                paragraphs.append(_section(experiment, claims[experiment.name], cells, picture))
        # What was not tried comes last, so that no paper seems to be covered in full.
        if rows := OUT_OF_REACH.get(paper):
            frame = pandas.DataFrame(rows, columns=pandas.Index(["what", "why", "instead"]))
            paragraphs += [f"### Out of reach: {paper}", table(frame.set_index("what"))]
    try:
        page.write_text("\n\n".join(paragraphs) + "\n")
    except OSError as error:
        raise DataError(f"{page}: cannot be written ({error}). Name another page.") from error
    return f"{line}\n\n{summary}"


def _about(path: str | os.PathLike[str], finished: dict[str, pandas.DataFrame]) -> list[str]:
    every = pandas.concat(list(finished.values()))
    failures = load_failures(path)
    # A failed cell is counted on the page: claims are read off the others.
    failed = len(failures["experiment"].dropna()) if "experiment" in failures else 0
    return [*load_commands(path), *describe_cells(every, failed)]


def _verdict(claim: Claim) -> str:
    if claim.question:
        return f"{claim.verdict} (ours)"
    return claim.verdict if claim.full_size else f"{claim.verdict} (smaller)"


def _summary(claims: dict[str, Sequence[Claim]]) -> str:
    rows = [
        (paper, f"[{experiment.name}](#{experiment.name})", claim.statement, _verdict(claim))
        for paper, experiments in PAPERS.items()
        for experiment in experiments
        for claim in claims.get(experiment.name, ())
    ]
    names = pandas.Index(["paper", "experiment", "claim", "verdict"])
    frame = pandas.DataFrame(rows, columns=names)
    # A paper is named in the first of its rows.
    frame["paper"] = frame["paper"].mask(frame["paper"].duplicated(), "")
    return table(frame.set_index(["paper", "experiment", "claim"]))


def _section(
    experiment: Experiment, claims: Sequence[Claim], cells: pandas.DataFrame, picture: Path
) -> str:
    rows = [
        {
            "source": claim.source, "claim": claim.statement, "reproduced if": claim.rule,
            "published": claim.published, "here": claim.ours, "verdict": _verdict(claim),
        }
        for claim in claims
    ]  # fmt: skip
    frame = pandas.DataFrame(rows).set_index(["source", "claim", "reproduced if"])
    # Claims of one experiment may share a remark: it is said once.
    remarks = list(dict.fromkeys(claim.remark for claim in claims if claim.remark))
    doubts = [
        f"*{claim.verdict.capitalize()}: {claim.statement}* {claim.doubt or _UNKNOWN}"
        for claim in claims
        if claim.verdict != "reproduced"
    ]
    image = f"![{experiment.title}]({picture.parent.name}/{picture.name})"
    time = f"Time: {cells['_seconds'].sum() / 60:.1f} minutes of one core, {len(cells)} cells."
    paragraphs = [f"**{experiment.title}.**", table(frame), *remarks, *doubts, time, image]
    return "\n\n".join([f"### {experiment.name}", *paragraphs])
