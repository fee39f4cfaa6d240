"""The experiments of the ledger, and the page of their claims with a picture of each."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from benchmarks._figures import new_figure, save_figure
from benchmarks._tables import code, describe_cells, read_csv, section, table, write_csv
from benchmarks.evidence.ledger import (
    elbo,
    evidence_bounds,
    evidence_ranking,
    fourier,
    gaussian_processes,
    laplace_toy,
    main_results,
    occam,
    online_curve,
    pac_bayes,
    training_speed_kernel,
    training_speed_linear,
    training_speed_networks,
    uci_networks,
)
from benchmarks.evidence.ledger.claims import Claim, Experiment
from benchmarks.evidence.ledger.out_of_reach import CHECKED, INDEX, OUT_OF_REACH, REASONS
from benchmarks.runner import canonical_json, load_commands, load_failures, load_rows
from gpclml.errors import DataError, UnknownNameError

PAPERS: Mapping[str, tuple[Experiment, ...]] = {
    "Lotfi et al. 2022": (
        main_results.DEEP_KERNELS, main_results.PUBLISHED_DEEP_KERNELS, main_results.FEW_SHOT,
        occam.EXPERIMENT, laplace_toy.EXPERIMENT, fourier.DENSITY, fourier.FOURIER,
        gaussian_processes.SHAPE, gaussian_processes.LENGTHSCALE, gaussian_processes.MEAN,
        fourier.CURVES, fourier.CRITERIA, pac_bayes.EXPERIMENT,
    ),
    "Lyle et al. 2020": (
        training_speed_linear.LINEAR, training_speed_linear.COMBINATION,
        training_speed_kernel.NTK, training_speed_networks.NETWORKS,
        training_speed_networks.SUBNETWORKS,
    ),
    "Harvey and Hughes 2026": (elbo.FAMILIES, elbo.SWEEP, elbo.TEMPERING, elbo.IMPORTANCE),
    "Immer et al. 2021": (
        uci_networks.EXPERIMENT, uci_networks.EVERY_EPOCH, online_curve.EXPERIMENT,
        online_curve.BANANA, evidence_ranking.EXPERIMENT,
    ),
    "Immer et al. 2023": (
        evidence_bounds.BOUNDS, evidence_bounds.ROTATION, evidence_bounds.AFFINE,
    ),
}  # fmt: skip
"""Experiments by the paper that their claims are from, in the order of the page."""

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment for several in PAPERS.values() for experiment in several
}
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


_PARTS = ("configuration", "metrics")  # of a row, as JSON
_UNKNOWN = "Not examined yet: whose fault it is is not known."
_INTRODUCTION = (
    "Each row is a claim of a paper and the experiment that tries it (`python -m "
    "benchmarks.evidence run NAME`). The verdict is computed by the rule in the column "
    "*reproduced if*: all of it holds (*reproduced*), some of it (*partly*), or none (*not*). "
    "Errors are standard errors. A claim is tried at the paper's size if every setting that the "
    "paper states is that of the cells; the column *settings* lists those that are not. What a "
    "paper does not state is our choice. Theorems and identities, which must hold, are checked and "
    "counted apart; so are questions of our own. Below each table, a note on each row that is not "
    "reproduced says whether the reason is ours or the paper's, and what was tried."
)


@dataclass(frozen=True)
class Cells:
    """The cells of an experiment.

    Attributes:
        done: Finished ones, with provenance in columns that begin with an underscore.
        problem: Why no verdict can be read off them; empty if one can.
    """

    done: pandas.DataFrame
    problem: str = ""


def ledger_cells(path: str | os.PathLike[str]) -> dict[str, Cells]:
    """Cells of experiments by name, in the order of the page.

    Args:
        path: A results file, or the CSV file that :func:`write_rows` wrote.

    Raises:
        DataError: There is no such file.
    """
    rows = _read_rows(path)[0] if is_rows(path) else load_rows(path)
    seeds = {row["configuration"].get("perturbed") for row in rows if _is_tried(row)}
    if len(seeds) > 1:
        raise DataError(
            f"{path}: rows with and without perturbed starts, or of several seeds. Keep each in a "
            "results file of its own."
        )
    rows_by_name = {
        name: [row for row in rows if row["configuration"].get("experiment") == name]
        for name in EXPERIMENTS
    }
    return {n: _cells_of(EXPERIMENTS[n], some) for n, some in rows_by_name.items() if some}


def _cells_of(experiment: Experiment, rows: list[dict[str, Any]]) -> Cells:
    done = [dict(row) for row in rows if "metrics" in row]
    configurations, metrics = ([row.pop(name) for row in done] for name in _PARTS)
    wanted = {_without_data(cell) for cell in experiment.cells()}
    # Estimates that share a computation have no time of their own.
    numbers = [[v for k, v in row.items() if not k.startswith("seconds")] for row in metrics]
    counts = {
        "missing": len(wanted - set(map(_without_data, configurations))),
        "failed": len(rows) - len(done),
        "without a number": sum("NaN" in json.dumps(values) for values in numbers),
    }
    problem = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    about = pandas.DataFrame(done).add_prefix("_")
    frames = pandas.DataFrame(configurations), pandas.DataFrame(metrics), about
    return Cells(pandas.concat(frames, axis=1), problem and f"Of {len(wanted)} cells: {problem}.")


def _is_tried(row: Mapping[str, Any]) -> bool:
    return row["configuration"].get("experiment") in EXPERIMENTS


def _without_data(cell: Mapping[str, Any]) -> str:
    """A configuration as text, but for the data, which differ with the machine, and the starts."""
    kept = {name: value for name, value in cell.items() if name not in ("data", "perturbed")}
    return canonical_json(kept)


Differences = list[str] | None
Tried = list[tuple[Claim, Differences]]


def headline(every: Tried, unread: Iterable[str] = ()) -> str:
    """How many claims there are, at which size they are tried, and what became of them.

    Args:
        every: Claims, each with the settings in which its cells differ from the paper's.
        unread: Experiments whose cells allow no verdict, or that are not tried.
    """
    claims = [pair for pair in every if pair[0].kind == "claim"]
    kinds = [claim.kind for claim, _ in every]
    full_size = [pair for pair in claims if pair[1] is not None and not pair[1]]
    unstated = sum(differences is None for _, differences in claims)
    left = [reason for rows in OUT_OF_REACH.values() for items, reason, *_ in rows for _ in items]
    identities = [claim.verdict for claim, _ in every if claim.kind == "identity"]
    text = (
        f"**{len(claims)} claims of papers, their main results included: {_counted(claims)}. "
        f"{len(full_size)} of them are tried at the paper's size: {_counted(full_size)}**; for "
        f"{unstated} the paper states no size. {len(identities)} theorems and identities are "
        f"checked apart: {identities.count('reproduced')} hold. {kinds.count('question')} "
        "questions are our own. Tables and figures out of reach: "
        + ", ".join(f"{left.count(reason)} {words}" for reason, words in REASONS.items())
        + ", each listed."
    )
    names = ", ".join(unread)
    return text + (f" Without a verdict, for want of rows: {names}." if names else "")


def _counted(pairs: Tried) -> str:
    verdicts = [claim.verdict for claim, _ in pairs]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in ("reproduced", "partly", "not"))


def write_page(path: str | os.PathLike[str], page: str | os.PathLike[str]) -> str:
    """Writes the page, and the pictures into a folder ``figures`` beside it.

    Args:
        path: A results file, or a CSV file of :func:`write_rows`.
        page: The Markdown file.

    Returns:
        The headline and the verdicts as a table.

    Raises:
        DataError: There is no finished experiment in the file, or the page cannot be written.
    """
    cells = ledger_cells(path)
    if not any(len(each.done) for each in cells.values()):
        raise DataError(f"{path}: no finished experiments. Run some first.")
    page = Path(page)
    folder = page.parent / "figures"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made ({error}). Name another page.") from error
    tried = _tried(cells)
    unread = [name for name, each in cells.items() if each.problem]
    absent = [name for name in EXPERIMENTS if name not in cells]
    if len(absent) < len(cells):  # a whole ledger, but for those of hours
        unread += absent
    line = headline([*itertools.chain(*tried.values())], unread)
    summary = _summary(tried)
    paragraphs = ["# Claims and what became of them", line, _INTRODUCTION]
    paragraphs += [code(_about(path, cells)), summary]
    for paper, experiments in PAPERS.items():
        paragraphs.append(section(paper, f"Citations were checked: {CHECKED[paper]}"))
        for experiment in experiments:
            name, entry = experiment.name, cells.get(experiment.name)
            if entry is None:
                continue
            if entry.problem:
                paragraphs.append(f"### {name}\n\nNo verdict. {entry.problem}")
                continue
            figure = new_figure(*experiment.size, layout="constrained")
            experiment.draw(entry.done, figure)
            picture = folder / f"{name}.png"
            save_figure(figure, picture)
            paragraphs.append(_section(experiment, tried[name], entry.done, picture))
        paragraphs.append(_index(paper, cells))
    try:
        page.write_text("\n\n".join(paragraphs) + "\n")
    except OSError as error:
        raise DataError(f"{page}: cannot be written ({error}). Name another page.") from error
    return f"{line}\n\n{summary}"


def _tried(cells: Mapping[str, Cells]) -> dict[str, Tried]:
    return {
        name: [
            (claim, EXPERIMENTS[name].differences(claim, entry.done))
            for claim in EXPERIMENTS[name].claims(entry.done)
        ]
        for name, entry in cells.items()
        if not entry.problem
    }


def _about(path: str | os.PathLike[str], cells: Mapping[str, Cells]) -> list[str]:
    if is_rows(path):
        return _read_rows(path)[1]
    every = pandas.concat([entry.done for entry in cells.values()])
    failed = load_failures(path).get("experiment", pandas.Series()).count()
    return [*load_commands(path), *describe_cells(every, failed)]


def write_rows(path: str | os.PathLike[str], csv: str | os.PathLike[str]) -> None:
    """Writes a row for each finished cell, configuration and results as JSON.

    Numbers have twelve significant digits. The page can be made of this file as of the results
    file, and the same cells give the same bytes.

    Args:
        path: The results file.
        csv: The file; compressed.

    Raises:
        DataError: The file cannot be written.
    """
    if not is_rows(csv) or is_rows(path):
        raise DataError(f"{csv}: rows of the ledger are written from a results file, as .csv.gz.")
    rows = [
        {
            "experiment": row["configuration"]["experiment"], "seconds": round(row["seconds"], 2),
            **{name: _rounded(json.dumps(row[name])) for name in _PARTS},
        }
        for row in load_rows(path)
        if "metrics" in row and _is_tried(row)
    ]  # fmt: skip
    write_csv(pandas.DataFrame(rows), csv, _about(path, ledger_cells(path)))


def _rounded(text: str) -> str:
    return json.dumps(json.loads(text, parse_float=lambda number: float(f"{float(number):.12g}")))


def is_rows(path: str | os.PathLike[str]) -> bool:
    """Whether a file is named as one of :func:`write_rows`."""
    return str(path).endswith(".csv.gz")


def _read_rows(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a file of :func:`write_rows`, and the lines at its head."""
    try:
        rows, lines = read_csv(path)
        records = [
            {"seconds": row["seconds"]} | {name: json.loads(row[name]) for name in _PARTS}
            for row in rows.to_dict("records")
        ]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: no rows of the ledger ({error}).") from error
    return records, lines


def _verdict(claim: Claim, differences: Differences) -> str:
    other = "other settings" if differences else ""
    words = {"question": "ours", "identity": "checked", "claim": other}[claim.kind]
    return f"{claim.verdict} ({words})" if words else claim.verdict


def _summary(tried: Mapping[str, Tried]) -> str:
    rows = [
        (paper, f"[{experiment.name}](#{experiment.name})", pair[0].statement, _verdict(*pair))
        for paper, experiments in PAPERS.items()
        for experiment in experiments
        for pair in tried.get(experiment.name, ())
    ]
    names = pandas.Index(["paper", "experiment", "claim", "verdict"])
    frame = pandas.DataFrame(rows, columns=names)
    # A paper is named in the first of its rows.
    frame["paper"] = frame["paper"].mask(frame["paper"].duplicated(), "")
    return table(frame.set_index(["paper", "experiment", "claim"]))


def _section(experiment: Experiment, tried: Tried, cells: pandas.DataFrame, picture: Path) -> str:
    claims = [claim for claim, _ in tried]
    rows = [
        {
            "source": claim.source, "claim": claim.statement, "reproduced if": claim.rule,
            "published": claim.published, "here": claim.ours,
            "settings": "not stated" if differs is None else "; ".join(differs) or "the paper's",
            "verdict": _verdict(claim, differs),
        }
        for claim, differs in tried
    ]  # fmt: skip
    frame = pandas.DataFrame(rows).set_index(["source", "claim", "reproduced if"])
    # Claims of one experiment may share a remark: it is said once.
    remarks = list(dict.fromkeys(claim.remark for claim in claims if claim.remark))
    if experiment.departures:
        remarks.append(f"*Departures from the text:* {experiment.departures}")
    doubts = [
        f"*{claim.verdict.capitalize()}: {claim.statement}* {claim.doubt or _UNKNOWN}"
        for claim in claims
        if claim.verdict != "reproduced"
    ]
    image = f"![{experiment.title}]({picture.parent.name}/{picture.name})"
    time = f"Time: {cells['_seconds'].sum() / 60:.1f} minutes of one core, {len(cells)} cells."
    heads = [f"### {experiment.name}", f"**{experiment.title}.**", table(frame)]
    return "\n\n".join([*heads, *remarks, *doubts, time, image])


def _index(paper: str, cells: Mapping[str, Cells]) -> str:
    """Every table and figure of a paper, and where it is tried or why it is not."""
    where: dict[str, list[str]] = {label: [] for label in INDEX[paper]}
    for experiment in PAPERS[paper]:
        name = experiment.name
        here = f"[{name}](#{name})" if name in cells else f"{name}, without rows here"
        for label in experiment.items:
            where[label].append(here)
    for items, reason, why, instead in OUT_OF_REACH[paper]:
        words = f"out of reach ({REASONS[reason]}): {why}" + f"; instead {instead}" * bool(instead)
        for label in items:
            where[label].append(words)
    rows = [(label, "; ".join(words)) for label, words in where.items()]
    frame = pandas.DataFrame(rows, columns=pandas.Index(["item", "where"]))
    return "\n\n".join([f"### Every table and figure: {paper}", table(frame.set_index("item"))])
