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
from benchmarks.runner import load_commands, load_failures, load_results
from gpclml.errors import DataError, UnknownNameError

__all__ = ["EXPERIMENTS", "chosen_experiments", "ledger_cells", "write_page"]

_MODULES = (
    "density", "fourier", "rational_quadratic", "lengthscale_bias", "mlp_mean",
    "training_speed_linear", "model_combination", "laplace_toy", "learning_curves",
    "training_speed_kernel", "elbo_families", "elbo_tempering", "training_speed_networks",
    "pac_bayes",
)  # fmt: skip

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        one.name: one
        for module in _MODULES
        for one in [importlib.import_module(f"benchmarks.evidence.ledger.{module}").EXPERIMENT]
    }
)
"""In the order of the page."""


def chosen_experiments(name: str, others: Iterable[str] = ()) -> list[Experiment]:
    """The experiment of that name, or every one for ``"ledger"``.

    Raises:
        UnknownNameError: There is none.
    """
    if name == "ledger":
        return list(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        raise UnknownNameError("study", name, [*EXPERIMENTS, "ledger", *others])
    return [EXPERIMENTS[name]]


_FOLDER = "figures"
_INTRODUCTION = (
    "Claims of papers on the evidence of models, each tried by a named experiment: "
    "*reproduced*, *partly* or *not*. Errors are standard errors over seeds."
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
        name: cells.dropna(axis="columns", how="all").reset_index(drop=True)
        for name, cells in found.items()
        if len(cells)
    }


def write_page(path: str | os.PathLike[str], page: str | os.PathLike[str]) -> str:
    """Writes the page, and the pictures into a folder ``figures`` beside it.

    Returns:
        The verdicts as a table.

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
    parts = ["# Claims and what became of them", _INTRODUCTION, code(_about(path, found))]
    summary = _summary(claims)
    parts.append(summary)
    for name, cells in found.items():
        picture = f"{_FOLDER}/{name}.png"
        _draw(EXPERIMENTS[name], cells, page.parent / picture)
        parts.append(_section(EXPERIMENTS[name], claims[name], picture))
    try:
        page.write_text("\n\n".join(parts) + "\n")
    except OSError as error:
        raise DataError(f"{page}: cannot be written ({error}). Name another page.") from error
    return summary


def _about(path: str | os.PathLike[str], found: dict[str, pandas.DataFrame]) -> list[str]:
    every = pandas.concat(list(found.values()))
    failures = load_failures(path)
    failed = len(failures["experiment"].dropna()) if "experiment" in failures else 0
    return [*load_commands(path), *describe_cells(every, failed)]


def _summary(claims: dict[str, Sequence[Claim]]) -> str:
    rows = [
        {"experiment": f"[{name}](#{name})", "claim": one.statement, "verdict": one.verdict}
        for name, several in claims.items()
        for one in several
    ]
    return table(pandas.DataFrame(rows).set_index(["experiment", "claim"]))


def _section(experiment: Experiment, claims: Sequence[Claim], picture: str) -> str:
    rows = [
        {
            "source": one.source, "claim": one.statement, "published": one.published,
            "here": one.ours, "verdict": one.verdict,
        }
        for one in claims
    ]  # fmt: skip
    frame = pandas.DataFrame(rows).set_index(["source", "claim"])
    remarks = [one.remark for one in claims if one.remark]
    image = f"![{experiment.title}]({picture})"
    return section(experiment.name, f"**{experiment.title}.**", table(frame), *remarks, image)


def _draw(experiment: Experiment, cells: pandas.DataFrame, path: Path) -> None:
    figure = new_figure(*experiment.size, layout="constrained")
    experiment.draw(cells, figure)
    save_figure(figure, path)
