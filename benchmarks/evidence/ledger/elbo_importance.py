"""Importance weights in place of a better posterior: how far they tighten a lower bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.evidence.ledger.claims import Claim, Experiment, array, graded
from benchmarks.evidence.ledger.elbo_families import learned_bound
from benchmarks.evidence.ledger.elbo_published import MODULES

__all__ = ["EXPERIMENT"]

_FAMILIES = ("diagonal", "rank-1", "full")
_SOURCE = "beside Harvey and Hughes 2026; Burda et al. 2016"


def _cells() -> list[dict[str, Any]]:
    return [
        {
            "experiment": "elbo-importance", "seed": seed, "family": family, "steps": 1000,
            "rates": [0.1, 0.01], "num_features": 1024, "draws": 1024, "repeats": 20,
        }
        for seed in (0, 2)
        for family in _FAMILIES
    ]  # fmt: skip


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    r"""The bound :math:`E \log \frac1K \sum_k p(y, w_k) / q(w_k)` by the number K of draws.

    Hyperparameters and q are those that the family learns by its own bound.

    Args:
        cell: ``seed``, ``family``, ``steps``, ``rates``, ``num_features`` as for
            :func:`~benchmarks.evidence.ledger.elbo_families.learned_bound`; ``draws``, a power of
            two, the largest K; ``repeats`` of all draws.

    Returns:
        ``elbo`` and ``lml``, and over K = 1, 2, 4, ... ``bound`` with ``error``; nats in all.
    """
    learned = learned_bound(
        cell["family"], cell["seed"], cell["steps"], cell["rates"],
        num_features=cell["num_features"],
    )  # fmt: skip
    scores = learned.scores()
    generator = torch.Generator().manual_seed(cell["seed"])
    weights = [_log_weights(learned, cell["draws"], generator) for _ in range(cell["repeats"])]
    log_weights = torch.stack(weights)
    counts = [2**power for power in range(int(math.log2(cell["draws"])) + 1)]
    bounds, errors = [], []
    for count in counts:
        groups = log_weights.reshape(cell["repeats"], -1, count)
        values = (groups.logsumexp(-1) - math.log(count)).flatten()
        bounds.append(float(values.mean()))
        errors.append(float(values.std() / math.sqrt(len(values))))
    return {
        "elbo": scores["elbo"], "lml": scores["lml"], "counts": counts, "bound": bounds,
        "error": errors,
    }  # fmt: skip


@torch.no_grad()
def _log_weights(learned: Any, count: int, generator: torch.Generator) -> Tensor:
    """Logarithms of p(y, w) / q(w) at draws of q."""
    model, mll = learned.model, learned.objective
    data = mll.data_at(model(*model.train_inputs), model.train_targets)
    q = mll.weights_at(data)
    weights = q.sample(count, generator)
    centered = (weights - q.mean).mT
    log_q = -0.5 * ((centered * q.precision().times(centered)).sum(0) + q.log_det())
    log_prior = -0.5 * (weights.square() / data.prior_variance + data.prior_variance.log()).sum(-1)
    errors = data.residual - weights @ data.features.mT
    log_likelihood = -0.5 * (errors.square() / data.noise + (2 * math.pi * data.noise).log())
    return log_likelihood.sum(-1) + log_prior - log_q


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    claims = [_tightens(cells)]
    if set(_FAMILIES[:2]) <= set(cells["family"]):
        claims.append(_prefers(cells))
    return claims


def _tightens(cells: pandas.DataFrame) -> Claim:
    bounds, errors = array(cells["bound"]), array(cells["error"])
    lml, elbo = cells["lml"].to_numpy(), cells["elbo"].to_numpy()
    first = np.abs(bounds[:, 0] - elbo) <= 4 * errors[:, 0] + 1e-6 * np.abs(elbo)
    rising = np.diff(bounds, axis=1) >= -2 * (errors[:, 1:] + errors[:, :-1]) - 1e-6 * np.abs(
        lml[:, None]
    )
    below = bounds <= lml[:, None] + 4 * errors + 1e-6 * np.abs(lml[:, None])
    figures = "; ".join(
        f"seed {row['seed']}, {row['family']}: {row['elbo']:.1f}, {row['bound'][-1]:.1f} ± "
        f"{row['error'][-1]:.1f}, {row['lml']:.1f}"
        for _, row in cells.iterrows()
    )
    return Claim(
        _SOURCE,
        "More draws take the bound from the ELBO, K = 1, up towards the LML.",
        "no figure",
        f"ELBO, bound with K = {cells['counts'].iloc[0][-1]}, LML: {figures}",
        graded(bool(first.all()), bool(rising.all()), bool(below.all())),
        rule="at K = 1 the ELBO, rising with K and never above the LML, within errors",
        question=True,
    )


def _prefers(cells: pandas.DataFrame) -> Claim:
    best = {
        family: np.array([row[-1] for row in cells[cells["family"] == family]["bound"]])
        for family in _FAMILIES[:2]
    }
    gap = best["rank-1"] - best["diagonal"]
    return Claim(
        _SOURCE,
        "Importance weights leave the bound's preference for the underfit as it is.",
        "no figure",
        "rank one less diagonal, a seed each: " + ", ".join(f"{value:.0f}" for value in gap),
        graded(bool((gap < 0).all())),
        "With rank one the draws hardly reach the posterior, and a thousand of them close only a "
        "small part of the gap.",
        rule="negative for each seed",
        question=True,
    )


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    axes = figure.subplots()
    for _, row in cells.iterrows():
        below = np.maximum(row["lml"] - np.array(row["bound"]), 1e-3)
        axes.loglog(row["counts"], below, label=f"{row['family']}, seed {row['seed']}", base=2)
    axes.set_yscale("log", base=10)
    axes.set(xlabel="draws K", ylabel="LML less the bound, nats")
    axes.legend(fontsize=7)


EXPERIMENT = Experiment(
    "elbo-importance", "Importance-weighted lower bounds", _cells, run_cell, _claims, _draw,
    size=(5.5, 3.4), modules=MODULES,
)  # fmt: skip
"""Burda et al. (2016) on the model of Harvey and Hughes (2026)."""
