"""The experiments of the ledger, and the page of their claims with a picture of each."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pandas

from benchmarks._figures import new_figure, save_figure
from benchmarks._tables import code, describe_cells, section, table
from benchmarks.evidence.ledger.claims import Claim, Experiment
from benchmarks.evidence.ledger.out_of_reach import CHECKED, OUT_OF_REACH
from benchmarks.runner import load_commands, load_failures, load_results
from gpclml.errors import DataError, UnknownNameError

__all__ = ["EXPERIMENTS", "PAPERS", "chosen_experiments", "headline", "ledger_cells", "write_page"]

PAPERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Lotfi et al. 2022": (
            "occam", "laplace_toy", "density", "fourier", "rational_quadratic", "lengthscale_bias",
            "mlp_mean", "learning_curves", "criteria", "pac_bayes",
        ),
        "Lyle et al. 2020": (
            "training_speed_linear", "model_combination", "training_speed_kernel",
            "training_speed_networks", "training_speed_subnetworks",
        ),
        "Harvey and Hughes 2026": (
            "elbo_families", "elbo_sweep", "elbo_tempering", "elbo_importance",
        ),
        "Immer et al. 2021": ("uci_networks", "online_curve", "evidence_ranking"),
        "Immer et al. 2023": ("evidence_bounds", "affine_invariance"),
    }
)  # fmt: skip
"""Modules of experiments by the paper that their claims are from, in the order of the page."""


def _experiment(module: str) -> Experiment:
    return importlib.import_module(f"benchmarks.evidence.ledger.{module}").EXPERIMENT


_OF_PAPER = {paper: [_experiment(one) for one in modules] for paper, modules in PAPERS.items()}

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {one.name: one for several in _OF_PAPER.values() for one in several}
)
"""In the order of the page."""


def chosen_experiments(name: str, others: Iterable[str] = ()) -> list[Experiment]:
    """The experiment of that name; for ``"ledger"`` every one that does not take hours.

    Raises:
        UnknownNameError: There is none.
    """
    if name == "ledger":
        return [one for one in EXPERIMENTS.values() if not one.hours]
    if name not in EXPERIMENTS:
        raise UnknownNameError("study", name, [*EXPERIMENTS, "ledger", *others])
    return [EXPERIMENTS[name]]


_FOLDER = "figures"
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
    found = {name: done[done["experiment"] == name] for name in EXPERIMENTS}
    return {
        name: _whole_seeds(cells.dropna(axis="columns", how="all").reset_index(drop=True))
        for name, cells in found.items()
        if len(cells)
    }


def _whole_seeds(cells: pandas.DataFrame) -> pandas.DataFrame:
    """With seeds that are integers, which those beside cells without one are not."""
    return cells.astype({"seed": int}) if "seed" in cells else cells


def headline(claims: Iterable[Claim]) -> str:
    """How many claims there are, at which size they are tried, and what became of them."""
    every = list(claims)
    of_papers = [one for one in every if not one.own]
    counts = {
        verdict: sum(one.verdict == verdict for one in of_papers)
        for verdict in ("reproduced", "partly", "not")
    }
    at_size = [one for one in of_papers if one.at_size]
    reproduced = sum(one.verdict == "reproduced" for one in at_size)
    return (
        f"**{len(of_papers)} claims of papers: {counts['reproduced']} reproduced, "
        f"{counts['partly']} partly, {counts['not']} not. {len(at_size)} of them are tried at the "
        f"paper's size: {reproduced} reproduced.** Beside them {len(every) - len(of_papers)} "
        f"questions of our own, and {sum(map(len, OUT_OF_REACH.values()))} tables and figures out "
        "of reach, listed with the reason."
    )


def write_page(path: str | os.PathLike[str], page: str | os.PathLike[str]) -> str:
    """Writes the page, and the pictures into a folder ``figures`` beside it.

    Returns:
        The headline and the verdicts as a table.

    Raises:
        DataError: There is no finished experiment in the file, or the page cannot be written.
    """
    found = ledger_cells(path)
    if not found:
        raise DataError(f"{path}: no finished experiments. Run some first.")
    page = Path(page)
    folder = page.parent / _FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made ({error}). Name another page.") from error
    claims = {name: EXPERIMENTS[name].claims(cells) for name, cells in found.items()}
    line = headline(one for several in claims.values() for one in several)
    summary = _summary(claims)
    parts = ["# Claims and what became of them", line, _INTRODUCTION, code(_about(path, found))]
    parts.append(summary)
    for paper, experiments in _OF_PAPER.items():
        parts.append(section(paper, f"Citations were checked: {CHECKED[paper]}"))
        for one in experiments:
            if one.name in found:
                picture = f"{_FOLDER}/{one.name}.png"
                _draw(one, found[one.name], page.parent / picture)
                parts.append(_section(one, claims[one.name], found[one.name], picture))
        parts.append(_unreached(paper))
    try:
        page.write_text("\n\n".join(part for part in parts if part) + "\n")
    except OSError as error:
        raise DataError(f"{page}: cannot be written ({error}). Name another page.") from error
    return f"{line}\n\n{summary}"


def _about(path: str | os.PathLike[str], found: dict[str, pandas.DataFrame]) -> list[str]:
    every = pandas.concat(list(found.values()))
    failures = load_failures(path)
    failed = len(failures["experiment"].dropna()) if "experiment" in failures else 0
    return [*load_commands(path), *describe_cells(every, failed)]


def _verdict(claim: Claim) -> str:
    if claim.own:
        return f"{claim.verdict} (ours)"
    return claim.verdict if claim.at_size else f"{claim.verdict} (smaller)"


def _summary(claims: dict[str, Sequence[Claim]]) -> str:
    rows = [
        {
            "paper": paper if place == 0 else "", "experiment": f"[{one.name}](#{one.name})",
            "claim": claim.statement, "verdict": _verdict(claim),
        }
        for paper, experiments in _OF_PAPER.items()
        for place, (one, claim) in enumerate(
            (one, claim) for one in experiments for claim in claims.get(one.name, ())
        )
    ]  # fmt: skip
    return table(pandas.DataFrame(rows).set_index(["paper", "experiment", "claim"]))


def _section(
    experiment: Experiment, claims: Sequence[Claim], cells: pandas.DataFrame, picture: str
) -> str:
    rows = [
        {
            "source": one.source, "claim": one.statement, "reproduced if": one.rule,
            "published": one.published, "here": one.ours, "verdict": _verdict(one),
        }
        for one in claims
    ]  # fmt: skip
    frame = pandas.DataFrame(rows).set_index(["source", "claim", "reproduced if"])
    remarks = list(dict.fromkeys(one.remark for one in claims if one.remark))
    doubts = [
        f"*{one.verdict.capitalize()}: {one.statement}* {one.doubt or _UNKNOWN}"
        for one in claims
        if one.verdict != "reproduced"
    ]
    image = f"![{experiment.title}]({picture})"
    time = f"Time: {cells['_seconds'].sum() / 60:.1f} minutes of one core, {len(cells)} cells."
    parts = [f"**{experiment.title}.**", table(frame), *remarks, *doubts, time, image]
    return "\n\n".join([f"### {experiment.name}", *parts])


def _unreached(paper: str) -> str:
    rows = OUT_OF_REACH.get(paper, ())
    if not rows:
        return ""
    frame = pandas.DataFrame(rows, columns=pandas.Index(["what", "why", "instead"]))
    return f"### Out of reach: {paper}\n\n{table(frame.set_index('what'))}"


def _draw(experiment: Experiment, cells: pandas.DataFrame, path: Path) -> None:
    figure = new_figure(*experiment.size, layout="constrained")
    experiment.draw(cells, figure)
    save_figure(figure, path)
