"""Command line: ``python -m benchmarks.tables.counts --n 100``: how often intervals hold counts.

Each data set has three inputs; the logarithm of the mean is a smooth function of two of them.
Counts are Poisson, or negative binomial of a variance that grows with the square of the mean.
Coverage is that of new rows under the distribution that made them, and ``attainable`` that of the
central interval of this distribution itself, which is above the level because counts are whole.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from scipy import stats
from typer import Option

from gpclml import StackedGP

KINDS: dict[str, tuple[float, float, float | None]] = {
    "poisson": (1.0, 1.0, None), "poisson, small": (-0.5, 1.0, None),
    "poisson, steep": (-1.0, 2.0, None), "overdispersed": (1.0, 1.0, 2.0),
    "overdispersed, small": (-0.5, 1.0, 2.0), "very overdispersed": (1.0, 1.0, 0.7),
}  # fmt: skip
"""Log mean at the origin, factor of its function, size of the negative binomial or None."""

LEVEL = 0.9
_NEW = 600  # rows


def coverage(
    kind: str, n: int, seed: int, candidates: tuple[str, ...] | None = None
) -> pd.DataFrame:
    """Coverage of a stack's 90 % intervals of one data set, by thirds of the predicted means.

    Args:
        kind: Name of one of ``KINDS``.
        n: Number of training rows.
        seed: Seed of the data.
        candidates: Models of the stack, None for its own.

    Returns:
        For each third, from small to large predictions: ``covered``, ``attainable``, and ``least``,
        the least lower end.
    """
    draws = np.random.default_rng(seed)
    x = draws.uniform(size=(n + _NEW, 3))
    start, factor, size = KINDS[kind]
    # The third input says nothing.
    means = np.exp(start + factor * (1.2 * np.sin(3 * x[:, 0]) + x[:, 1]))
    y = _counts(means, size).rvs(random_state=draws)
    stack = StackedGP(candidates).fit(x[:n], y[:n].astype(float), progress=False)
    predicted, true = stack.predict(x[n:]), _counts(means[n:], size)
    lower, upper = (end.numpy() for end in predicted.interval(LEVEL))
    # Discrete quantiles cover more than they promise: that is the attainable level.
    tail = 0.5 * (1 - LEVEL)
    rows = {
        "covered": true.cdf(upper) - true.cdf(lower - 1),
        "attainable": true.cdf(true.ppf(1 - tail)) - true.cdf(true.ppf(tail) - 1),
        "least": lower,
    }
    thirds = np.array_split(np.argsort(predicted.mean.numpy()), 3)
    how: dict[str, Any] = {"covered": np.mean, "attainable": np.mean, "least": np.min}
    return pd.DataFrame({name: [how[name](rows[name][third]) for third in thirds] for name in rows})


def _counts(means: np.ndarray, size: float | None) -> Any:
    return stats.poisson(means) if size is None else stats.nbinom(size, size / (size + means))


def main(
    n: Annotated[list[int], Option(help="Numbers of training rows; may be repeated.")],
    seeds: Annotated[int, Option(min=1, help="Data sets of each kind.")] = 10,
) -> None:
    """Coverage of 90 % intervals of counts, in each third of the predictions."""
    torch.set_num_threads(1)
    rows = []
    for kind in KINDS:
        for size in n:
            tables = [coverage(kind, size, seed) for seed in range(seeds)]
            whole = pd.concat(tables, keys=range(seeds)).groupby(level=1)
            table = pd.DataFrame({"kind": kind, "n": size, "third": ["lower", "middle", "upper"]})
            least = whole.min()[["covered", "least"]]
            least.columns = ["worst data set", "least lower end"]
            rows.append(table.join([whole.mean()[["covered", "attainable"]], least]))
            typer.echo(f"{kind}, n = {size}", err=True)
    typer.echo(pd.concat(rows).to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    typer.run(main)
