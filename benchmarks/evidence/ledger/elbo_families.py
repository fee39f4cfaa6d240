"""Hyperparameters by lower bounds whose posteriors have a diagonal, a rank or every freedom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.evidence.ledger.claims import Claim, Experiment, graded, with_error
from benchmarks.evidence.ledger.elbo_published import (
    EPSILON,
    MODULES,
    NUM_DATA,
    NUM_FEATURES,
    drawn_features,
    published_run,
    sine,
)
from benchmarks.evidence.linear_bound import fit_linear_bound
from gpclml.conditioning import RandomOrderings
from gpclml.evaluation import (
    conditional_log_marginal_likelihood,
    leave_one_out,
    log_marginal_likelihood,
    marginal_log_predictive,
)
from gpclml.kernels import RandomFourierFeatures
from gpclml.linalg.gaussians import DiagonalFamily, FullFamily, LowRankFamily
from gpclml.mlls import LinearEvidenceLowerBound
from gpclml.models import BayesianLinearModel

__all__ = ["EXPERIMENT", "LearnedBound", "learned_bound"]

_NUM_TEST = 500


@dataclass(frozen=True)
class LearnedBound:
    """A model whose hyperparameters have the largest bound of several runs.

    Attributes:
        model: The linear model.
        bound: Its bound at the temperature it was learned at, in nats in all.
        bound_at_one: That at temperature one, of the same q.
        objective: The objective that it was learned under, which has q.
        test_x: Points of the same distribution.
        test_y: Their targets.
    """

    model: Any
    bound: float
    bound_at_one: float
    objective: Any
    test_x: Any
    test_y: Any

    def scores(self) -> dict[str, float]:
        """Hyperparameters, and what other criteria and test points say of them.

        Returns:
            ``noise`` (standard deviation), ``lengthscale``, ``amplitude``, ``prior_variance``;
            in nats in all ``elbo`` (at temperature one), ``lml``, ``clml`` (mean over 2000 orders,
            given 15 points), ``loo``; ``test`` log density, nats a point, and ``rmse``.
        """
        model, features = self.model, self.model.covar_module.features
        orders = RandomOrderings(k=2000, m=15, seed=0)
        with torch.no_grad():
            predicted = model.predict(self.test_x, marginal=True)
            test = marginal_log_predictive(model, self.test_x, self.test_y).mean()
            return {
                "noise": float(model.noise.sqrt()), "lengthscale": float(features.lengthscale),
                "amplitude": float(features.amplitude),
                "prior_variance": float(model.prior_variance[0]), "elbo": self.bound_at_one,
                "lml": float(log_marginal_likelihood(model)),
                "clml": float(conditional_log_marginal_likelihood(model, orders).mean()),
                "loo": float(leave_one_out(model).sum()), "test": float(test),
                "rmse": float((predicted.mean - self.test_y).square().mean().sqrt()),
            }  # fmt: skip

    def scores_of_q(self) -> dict[str, float]:
        """What the restricted posterior q itself, not the exact one, predicts at test points.

        Returns:
            ``q_test`` log density, nats a point, and ``q_rmse``, both with the learned noise.
        """
        model, x = self.model, self.test_x
        with torch.no_grad():
            data = self.objective.data_at(model(*model.train_inputs), model.train_targets)
            q, phi = self.objective.weights_at(data), model.features(x)
            mean = model.mean_module(x) + phi @ q.mean
            variance = q.predictive_variance(phi) + model.noise
            density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(self.test_y)
            return {
                "q_test": float(density.mean()),
                "q_rmse": float((mean - self.test_y).square().mean().sqrt()),
            }


def learned_bound(
    family: str,
    seed: int,
    steps: int,
    rates: Sequence[float],
    temperature: float = 1.0,
    empirical_bayes: bool = False,
    num_features: int = NUM_FEATURES,
    drawn: tuple[Tensor, Tensor] | None = None,
) -> LearnedBound:
    """Hyperparameters by coordinate ascent, of the best of several learning rates.

    Args:
        family: ``"diagonal"``, ``"rank-1"`` or ``"full"``.
        seed: Of the data, :math:`y = sin(3 x) + .1 e` with x and e standard normal, and of the
            features.
        steps: Of each run.
        rates: Learning rates of Adam.
        temperature: Of the bound.
        empirical_bayes: Whether the prior variance is learned as well.
        num_features: Number R of features.
        drawn: Their weights and biases; None draws those of the seed.
    """
    families = {
        "diagonal": DiagonalFamily(), "rank-1": LowRankFamily(1, EPSILON), "full": FullFamily(),
    }  # fmt: skip
    x, y = sine(np.random.RandomState(seed), NUM_DATA)
    test_x, test_y = sine(np.random.RandomState(1000 + seed), _NUM_TEST)
    weight, bias = drawn or drawn_features(torch.Generator().manual_seed(seed), num_features)
    runs = []
    for rate in rates:
        features = RandomFourierFeatures(1, len(bias), weight=weight, bias=bias)
        model = BayesianLinearModel(x, y, features)
        mll = LinearEvidenceLowerBound(
            model.likelihood, model, families[family], temperature=temperature
        )
        fit = fit_linear_bound(mll, steps=steps, lr=rate, empirical_bayes=empirical_bayes)
        with torch.no_grad():
            untempered = float(mll.at_temperature(1.0, model(x), y))
        bounds = (NUM_DATA * fit.objective, NUM_DATA * untempered)
        runs.append(LearnedBound(model, *bounds, mll, test_x, test_y))
    return max(runs, key=lambda run: run.bound)


_FAMILIES = ("diagonal", "rank-1", "full")
_SEEDS, _STARTS = 5, 10
# Seed 0 of the paper: noise, lengthscale, amplitude, ELBO, LML, with the digits recomputed.
_PUBLISHED = {
    "diagonal": (0.3949, 0.3278, 0.3071, -15.7618, -13.0351),
    "rank-1": (5.539e-4, 0.0204, 0.5563, -6443.5416, -15.1993),
    "full": (0.1340, 0.6738, 1.0797, -2.2153, -2.2153),
}
_NAMES = ("noise", "lengthscale", "amplitude", "elbo", "lml")


def _cells() -> list[dict[str, Any]]:
    common = {"experiment": "elbo-families", "steps": 1000, "rates": [0.1, 0.01]}
    kinds = [(name, False) for name in _FAMILIES] + [("rank-1", True)]
    return [
        common | {"seed": seed, "family": name, "empirical_bayes": learned}
        for seed in range(_SEEDS)
        for name, learned in kinds
    ] + [
        common | {"seed": 0, "family": "rank-1, v by Adam", "empirical_bayes": True, "start": start}
        for start in range(_STARTS)
    ]


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters of one family, and what other criteria say of them.

    Args:
        cell: ``seed``, ``family``, ``empirical_bayes``, ``steps``, ``rates``; a ``start`` asks for
            :func:`published_run`.

    Returns:
        Those of :meth:`LearnedBound.scores`; for seed 0 the predictive ``mean`` and ``deviation``
        on a ``grid``, with the points ``x`` and ``y``.
    """
    if "start" in cell:
        return published_run(cell["seed"], cell["steps"], cell["rates"], start=cell["start"])
    learned = learned_bound(
        cell["family"], cell["seed"], cell["steps"], cell["rates"],
        empirical_bayes=cell["empirical_bayes"],
    )  # fmt: skip
    scores: dict[str, Any] = dict(learned.scores())
    if cell["seed"] == 0:
        grid = torch.linspace(-3, 3, 301, dtype=torch.float64)
        with torch.no_grad():
            predicted = learned.model.predict(grid, marginal=True)
        scores |= {
            "grid": grid.tolist(), "mean": predicted.mean.tolist(),
            "deviation": predicted.stddev.tolist(),
            "x": learned.model.train_inputs[0].squeeze(-1).tolist(),
            "y": learned.model.train_targets.tolist(),
        }  # fmt: skip
    return scores


def _rows(cells: pandas.DataFrame, family: str, learned: bool = False) -> pandas.DataFrame:
    chosen = cells[(cells["family"] == family) & (cells["empirical_bayes"] == learned)]
    return chosen.set_index("seed").sort_index()


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    rows = {name: _rows(cells, name) for name in _FAMILIES}
    learned = _rows(cells, "rank-1", learned=True)
    source = "Harvey and Hughes 2026, "
    claims = [
        _digits(source + "Figure 1", name, rows[name])
        for name in _FAMILIES
        if 0 in rows[name].index
    ]
    seeds = [
        seed
        for seed in rows["full"].index
        if all(seed in family_rows.index for family_rows in rows.values())
    ]
    if seeds:
        paired = {name: family_rows.loc[seeds] for name, family_rows in rows.items()}
        claims += [
            _over_and_under(source + "Figures 1 and 3", paired),
            _evidence_prefers(source + "Figures 1 and 5", paired),
        ]
    if 0 in learned.index:
        claims.append(_underfits(source + "Figure 3", learned))
        if 0 in rows["rank-1"].index:
            claims.append(_bound_prefers(source + "Figure 3", learned, rows["rank-1"]))
    ascended = cells[cells["family"] == "rank-1, v by Adam"]
    if len(ascended):
        claims.append(_unfinished(source + "Figure 3", ascended))
    return claims


def _digits(source: str, name: str, rows: pandas.DataFrame) -> Claim:
    ours, published = [float(rows.loc[0, key]) for key in _NAMES], _PUBLISHED[name]
    same = [
        abs(value - digits) <= 5.5e-5 * max(1.0, abs(digits) / 1000) if abs(digits) > 1e-3
        else abs(value / digits - 1) < 1e-3
        for value, digits in zip(ours, published, strict=True)
    ]  # fmt: skip
    return Claim(
        source,
        f"Seed 0, {name}: noise deviation, lengthscale, amplitude, ELBO, LML.",
        ", ".join(f"{value:g}" for value in published),
        ", ".join(f"{value:.{4 if abs(value) > 1e-3 else 7}f}" for value in ours),
        graded(*same),
        rule="all printed digits",
    )


_SEEDS_DOUBT = (
    "Ours, by the rule: the paper shows seeds 0 and 2, where all of it holds. On one of the other "
    "seeds rank one's noise is above .05. Tried with two learning rates; noise of each seed: "
)


def _over_and_under(source: str, rows: dict[str, pandas.DataFrame]) -> Claim:
    noise = {name: rows[name]["noise"].tolist() for name in _FAMILIES}
    seed_noises = "; ".join(
        f"{name} " + ", ".join(f"{value:.2g}" for value in noise[name]) for name in _FAMILIES
    )
    order = zip(noise["rank-1"], noise["full"], noise["diagonal"], strict=True)
    return Claim(
        source,
        "The diagonal underfits and rank one overfits: noise deviation above and below the .1 of "
        "the data, the full family near it.",
        "seed 0: .39, .00055 and .13",
        "; ".join(f"{name} {with_error(noise[name], 4)}" for name in _FAMILIES)
        + "; test log density "
        + ", ".join(f"{name} {with_error(rows[name]['test'].tolist(), 2)}" for name in _FAMILIES),
        graded(
            all(low < middle < high for low, middle, high in order),
            max(noise["rank-1"]) < 0.05, min(noise["diagonal"]) > 0.2,
        ),
        rule="for each seed in that order, rank one below .05, the diagonal above .2",
        doubt=_SEEDS_DOUBT + seed_noises,
        remark="Test log densities are those of the exact posterior at the learned "
        "hyperparameters. What is wrong is the learned noise and not the approximate posterior.",
    )  # fmt: skip


def _evidence_prefers(source: str, rows: dict[str, pandas.DataFrame]) -> Claim:
    over = {
        name: int((rows["rank-1"][name] > rows["diagonal"][name]).sum())
        for name in ("lml", "clml", "loo", "elbo", "test")
    }
    count = len(rows["full"])
    return Claim(
        source,
        "Of the underfit and the overfit solution the evidence sometimes prefers the overfit one, "
        "the ELBO never.",
        "seed 0: LML -13.04 and -15.20; seed 2: -16.48 and -15.59",
        f"overfit preferred in {over['lml']} of {count} seeds by the LML, {over['clml']} by the "
        f"CLML given 15 points, {over['loo']} by LOO, {over['elbo']} by the ELBO, {over['test']} "
        "by the test log density",
        graded(0 < over["lml"] < count, over["elbo"] == 0),
        rule="by the LML for some seeds and not for all; by the ELBO for none",
        doubt="Ours: few seeds.",
        remark="CLML and LOO do not solve this: they too can prefer the overfit solution.",
    )


def _bound_prefers(source: str, rows: pandas.DataFrame, fixed: pandas.DataFrame) -> Claim:
    seeds = [seed for seed in rows.index if seed in fixed.index]
    elbo, lml = (rows.loc[seeds, name] - fixed.loc[seeds, name] for name in ("elbo", "lml"))
    first = rows.loc[0], fixed.loc[0]
    return Claim(
        source,
        "The ELBO prefers what empirical Bayes learns with rank one to what rank one learns "
        "without it; the LML does not.",
        "seed 0: ELBO -118.09 against -6443.54, LML -20.54 against -15.20",
        f"seed 0: ELBO {first[0]['elbo']:.2f} against {first[1]['elbo']:.2f}, LML "
        f"{first[0]['lml']:.2f} against {first[1]['lml']:.2f}; larger by the ELBO for "
        f"{int((elbo > 0).sum())} of {len(seeds)} seeds, by the LML for {int((lml > 0).sum())}",
        graded(bool(elbo.loc[0] > 0), bool(lml.loc[0] < 0), bool((elbo > 0).all())),
        rule="so for seed 0, and by the ELBO for every seed",
    )


def _underfits(source: str, rows: pandas.DataFrame) -> Claim:
    noise, first = rows["noise"].tolist(), rows.loc[0]
    return Claim(
        source,
        "With a learned prior variance rank one no longer overfits; it underfits instead.",
        "seed 0: noise .68, LML -20.54",
        f"seed 0: noise {first['noise']:.2f}, LML {first['lml']:.2f}; noise {with_error(noise, 2)}",
        graded(min(noise) > 0.2, abs(float(first["lml"]) + 20.54) < 0.005),
        rule="noise above .2 for each seed; the LML of seed 0 to the printed digits",
        remark="Here the prior variance ends at ε for every seed, where q is the prior.",
    )


def _unfinished(source: str, rows: pandas.DataFrame) -> Claim:
    """Bound and prior variance of runs that have the authors' steps, from several starts."""
    ends = {name: (rows[name].min(), rows[name].max()) for name in ("elbo", "prior_variance")}
    (low, high), (least, most) = ends.values()
    return Claim(
        source,
        "Seed 0, rank one with a learned prior variance: the variance and its ELBO.",
        "1.99e-6, -118.09",
        f"Adam on v and the prior variance, from {len(rows)} starts of v: variance {least:.2e} to "
        f"{most:.2e}, ELBO {low:.0f} to {high:.0f}; both in closed form: variance 1.00e-06, ELBO "
        "-20.54",
        graded(bool(low <= -118.09 <= high), bool(least <= 1.99e-6 <= most)),
        rule="both within the range over starts",
        remark="The published variance and ELBO are where a thousand steps of Adam on v, from a "
        "random start, happen to end. The best v has a closed form, with which the variance ends "
        "at ε and the ELBO at that of noise alone.",
    )


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    kinds = [(name, False) for name in _FAMILIES] + [("rank-1", True)]
    for axes, (name, learned) in zip(
        figure.subplots(1, 4, sharex=True, sharey=True), kinds, strict=True
    ):
        axes.set(xlabel="x", ylim=(-2.5, 2.5))
        rows = _rows(cells, name, learned)
        if 0 not in rows.index:
            continue
        row = rows.loc[0]
        grid, mean, spread = row["grid"], row["mean"], row["deviation"]
        low = [m - 2 * s for m, s in zip(mean, spread, strict=True)]
        high = [m + 2 * s for m, s in zip(mean, spread, strict=True)]
        axes.fill_between(grid, low, high, alpha=0.25, linewidth=0)
        axes.plot(grid, mean)
        axes.plot(row["x"], row["y"], "k.", markersize=4)
        axes.set_title(f"{name}{', learned prior' if learned else ''}", fontsize=9)
        text = f"ELBO {row['elbo']:.2f}\nLML {row['lml']:.2f}\nnoise {row['noise']:.2g}"
        axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=7)


EXPERIMENT = Experiment(
    "elbo-families", "Which posterior family a lower bound learns hyperparameters with", _cells,
    run_cell, _claims, _draw, size=(10.0, 2.8),
    modules=MODULES[1:],
)  # fmt: skip
"""Harvey and Hughes (2026), Figures 1-3."""
