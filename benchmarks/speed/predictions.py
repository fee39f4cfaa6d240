"""Command line: ``python -m benchmarks.speed.predictions``: what fast fits predict on tables."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.stats import binomtest
from torch import Tensor
from torch.distributions import Normal
from typer import Option

from benchmarks._options import check_known, errors_as_text
from benchmarks._tables import command_lines
from benchmarks.data import load, names
from benchmarks.speed.runs import Csv, Threads, cpu_name, print_tables
from gpclml.errors import ArgumentError
from gpclml.fit import fit_gpytorch_mll_fused

__all__ = ["TABLES", "compared_fits", "main", "summary"]

TABLES: tuple[str, ...] = tuple(name for name in names() if name != "challenger")
"""Tables with 50 rows or more. Rules of the search are chosen on every second one, from the first
on, and judged on the others."""

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "botorch": {},
    "fused": {"optimizer": fit_gpytorch_mll_fused},
}
_CLEAR = 0.02  # nats a row
_LEAST_TESTED = 30
_MOST_TESTED = 500


def compared_fits(tables: Iterable[str], sizes: Sequence[int], subsets: int) -> Iterator[dict]:
    """Fits of BoTorch's ``SingleTaskGP`` by both optimizers, from the same start on the same rows.

    Args:
        tables: Names of tables.
        sizes: Numbers of training rows; one that leaves fewer than 30 test rows is passed over.
        subsets: Random subsets of rows of each size.

    Yields:
        A row a fit: of both optimizers the negative log density of test rows (``nll``, in nats)
        and their root mean square error (``rmse``), for targets of deviation 1 in the training
        rows, and seconds of processor time.
    """
    for name in tables:
        data = load(name)
        for n in sizes:
            for subset in range(subsets):
                if data.num_data < n + _LEAST_TESTED:
                    continue
                generator = torch.Generator().manual_seed(1000 * subset + n)
                order = torch.randperm(data.num_data, generator=generator)[: n + _MOST_TESTED]
                x, y = data.inputs[order], data.targets[order]
                x = x[:, x[:n].std(0) > 0]
                row: dict[str, Any] = {"table": name, "n": n, "subset": subset}
                for label, options in _OPTIMIZERS.items():
                    scores = _fit(x, y, n, subset, options)
                    row |= {f"{score}_{label}": value for score, value in scores.items()}
                yield row


def _fit(x: Tensor, y: Tensor, n: int, seed: int, options: dict[str, Any]) -> dict[str, float]:
    transform = Normalize(x.shape[-1])
    model = SingleTaskGP(x[:n], y[:n, None], input_transform=transform)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)  # BoTorch tries again
        torch.manual_seed(seed)  # of BoTorch's retries
        start = time.process_time()
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **options)
        seconds = time.process_time() - start
    with torch.no_grad():
        predicted = model.posterior(x[n:], observation_noise=True)
        normal = Normal(predicted.mean[:, 0], predicted.variance[:, 0].sqrt())
    scale = y[:n].std()
    return {
        "nll": -float(normal.log_prob(y[n:]).mean() + scale.log()),
        "rmse": float((normal.mean - y[n:]).square().mean().sqrt() / scale),
        "seconds": seconds,
    }


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """The fused fits less BoTorch's own, paired: of all, of both halves of tables, of each n.

    Args:
        rows: As from :func:`compared_fits`.

    Returns:
        A row a group: number of ``fits``; mean difference in ``nll`` and its standard error
        ``se``; fits that are ``worse`` and ``better`` by more than .02 nats and ``p`` of the
        two-sided sign test between them; geometric mean of the ratios of RMSEs (``rmse``) and
        median ratio of processor times (``time``).
    """
    chosen = rows.table.isin(TABLES[::2])
    groups = {"all": rows, "chosen on": rows[chosen], "judged on": rows[~chosen]}
    groups |= {f"n = {n}": sized for n, sized in rows.groupby("n")}
    table = []
    for name, fits in groups.items():
        if fits.empty:
            continue
        change = fits.nll_fused - fits.nll_botorch
        worse, better = int((change > _CLEAR).sum()), int((change < -_CLEAR).sum())
        clear = worse + better
        table.append(
            {
                "of": name,
                "fits": len(fits),
                "nll": change.mean(),
                "se": change.sem(),
                "worse": worse,
                "better": better,
                "p": binomtest(worse, clear).pvalue if clear else 1.0,
                "rmse": np.exp(np.log(fits.rmse_fused / fits.rmse_botorch).mean()),
                "time": (fits.seconds_fused / fits.seconds_botorch).median(),
            }
        )
    return pd.DataFrame(table)


def main(
    table: Annotated[
        list[str], Option(help="Table; may be repeated. Missing files are downloaded.")
    ] = list(TABLES),  # noqa: B006
    n: Annotated[list[int], Option(help="Training rows; may be repeated.")] = [20, 50, 100, 200],  # noqa: B006
    subsets: Annotated[int, Option(min=1, help="Random subsets of each table and n.")] = 4,
    csv: Csv = None,
    threads: Threads = 1,
) -> None:
    """Fits of SingleTaskGP by BoTorch's optimizer and by fit_gpytorch_mll_fused, and predictions.

    Prints differences in the scores of new rows, paired by fit; the CSV file has the fits.
    """
    with errors_as_text():
        check_known("table", table, names())
        torch.set_num_threads(threads)
        rows = pd.DataFrame(compared_fits(table, n, subsets))
        if rows.empty:
            raise ArgumentError("n", n, "numbers that leave 30 rows to test on")
        program = "benchmarks.speed.predictions"
        print_tables(program, [summary(rows)], threads=threads, digits=".3f")
        if csv:
            machine = f"# {cpu_name()}, {threads} CPU threads"
            csv.write_text(f"{command_lines(program)}\n{machine}\n{rows.to_csv(index=False)}")


if __name__ == "__main__":
    typer.run(main)
