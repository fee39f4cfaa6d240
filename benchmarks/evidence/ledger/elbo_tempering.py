"""Whether a temperature mends what a restricted posterior does to a lower bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.evidence.ledger.claims import Claim, Experiment, graded
from benchmarks.evidence.ledger.elbo_problem import learned_bound

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENT"]

# Of each family: seed, and temperatures with ELBO at temperature one and LML as published.
_PUBLISHED = {
    "diagonal": (0, {
        1.0: (-15.76, -13.04), 0.25: (-29.23, -19.44), 0.0625: (-120.88, -61.54),
        0.015625: (-244567610928819.25, -518.86), 0.00390625: (-73983414302416.33, -825.23),
    }),
    "rank-1": (2, {
        1.0: (-6445.39, -15.59), 4.0: (-6451.13, -20.62), 16.0: (-6463.34, -33.98),
        64.0: (-67604.35, -47.53), 256.0: (-6490.48, -61.12),
    }),
}  # fmt: skip


def _cells() -> list[dict[str, Any]]:
    return [
        {
            "experiment": "elbo-tempering", "seed": seed, "family": family,
            "temperature": temperature, "steps": 1000, "rates": [0.1, 0.01],
        }
        for family, (seed, published) in _PUBLISHED.items()
        for temperature in published
    ]  # fmt: skip


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters of one family at one temperature.

    Args:
        cell: ``seed``, ``family``, ``temperature``, ``steps``, ``rates``.

    Returns:
        Those of :meth:`LearnedBound.scores`.
    """
    found = learned_bound(
        cell["family"], cell["seed"], cell["steps"], cell["rates"], cell["temperature"]
    )
    return found.scores()


def _claims(cells: pandas.DataFrame) -> list[Claim]:
    source = "Harvey and Hughes 2026, "
    at_one = cells[cells["temperature"] == 1.0]["family"].tolist()
    return [
        _claim(
            cells, family, source + figure,
            f"{kind} do not mend {what}: LML and ELBO are lower at each.",
        )
        for family, figure, kind, what in (
            ("diagonal", "Figure 4", "Cold posteriors (T below 1)", "the diagonal's underfit"),
            ("rank-1", "Figure 5", "Warm posteriors (T above 1)", "rank one's overfit"),
        )
        if family in at_one
    ]  # fmt: skip


def _claim(cells: pandas.DataFrame, family: str, source: str, statement: str) -> Claim:
    published = _PUBLISHED[family][1]
    rows = cells[cells["family"] == family].set_index("temperature")
    published = {t: pair for t, pair in published.items() if t in rows.index}
    rows = rows.loc[list(published)]
    others = rows.drop(index=1.0)
    lower = [bool((others[name] < rows.loc[1.0, name]).all()) for name in ("lml", "elbo")]
    same = [
        abs(rows.loc[t, "elbo"] - elbo) < 0.01 and abs(rows.loc[t, "lml"] - lml) < 0.01
        for t, (elbo, lml) in published.items()
    ]
    return Claim(
        source,
        statement,
        "; ".join(f"T={t:g}: {elbo:.2f}, {lml:.2f}" for t, (elbo, lml) in published.items()),
        "; ".join(f"T={t:g}: {row['elbo']:.2f}, {row['lml']:.2f}" for t, row in rows.iterrows()),
        graded(all(lower), all(same)),
        remark=f"Pairs are the ELBO at temperature one and the LML, in nats. {sum(same)} of "
        f"{len(same)} agree to the printed digits; where noise falls to nothing the bound at "
        "temperature one has no bottom, and where a run stops on its way there decides its figure.",
    )


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    for axes, family in zip(figure.subplots(1, 2), _PUBLISHED, strict=True):
        rows = cells[cells["family"] == family].sort_values("temperature")
        for name in ("lml", "clml", "loo"):
            axes.plot(rows["temperature"], rows[name], "o-", label=name.upper())
        axes.set_xscale("log", base=4)
        axes.set_yscale("symlog", linthresh=10)
        axes.set_ylim(2 * rows[["lml", "clml", "loo"]].min().min(), 5)
        axes.set_xlabel("temperature")
        axes.set_ylabel("nats")
        axes.set_title(family, fontsize=9)
        axes.legend(fontsize=8, loc="lower center")


EXPERIMENT = Experiment(
    "elbo-tempering", "Tempered lower bounds", _cells, run_cell, _claims, _draw,
    modules=("benchmarks.evidence.ledger.elbo_problem",),
)  # fmt: skip
"""Harvey and Hughes (2026), Figures 4 and 5."""
