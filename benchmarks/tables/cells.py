"""Cells: one method, fitted to a few rows of a table and tested on others; or several at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import data
from benchmarks._tables import describe_error
from benchmarks.tables.candidates import ABOUT, Candidates, TableRows
from benchmarks.tables.peers import PEERS
from benchmarks.tables.scores import score
from gpclml import StackedGP
from gpclml.tables import StackedPrediction

DEVELOPMENT = (
    "autompg", "bike", "challenger", "concreteslump", "fertility", "kin40k", "machine", "pendulum",
    "power", "pumadyn32nm", "stock", "wine-red", "yacht",
)  # fmt: skip
"""The tables by which anything may be chosen or tuned: every other name of the registry."""

JUDGED = (
    "autos", "boston", "concrete", "energy", "forest", "kin8nm", "naval", "pol", "protein", "servo",
    "tamielectric", "wine-white",
)  # fmt: skip
"""The others, by which what was chosen is judged, and nothing else."""

STACK = "stack"
"""``gpclml.StackedGP`` as it comes."""

METHODS: Mapping[str, str] = (
    ABOUT | {STACK: "gpclml.StackedGP"} | {name: peer.about for name, peer in PEERS.items()}
)
"""What each method is, by name; those of this library first."""

TEST_SHARE = 0.2
"""Share of a table's rows that no training set of a split has."""

_WORTH_ITS_OWN = 1.25  # how much larger than the size before a size must be that was cut


def sizes_of(num_data: int, sizes: tuple[int, ...]) -> list[int]:
    """Numbers of training rows of a table: those asked for, cut to what it has.

    A size that was cut and is not a quarter larger than another is left out.

    Args:
        num_data: Number of rows of the table.
        sizes: The numbers asked for.
    """
    # Test rows come first: no size may eat into them.
    most = num_data - round(TEST_SHARE * num_data)
    whole = sorted({size for size in sizes if size <= most})
    if len(whole) < len(set(sizes)) and (not whole or most >= _WORTH_ITS_OWN * whole[-1]):
        whole.append(most)
    return whole


def balanced(splits: range, sizes: Mapping[str, list[int]]) -> Iterator[dict[str, Any]]:
    """A ``table``, ``n`` and ``split`` for each size of each table in each split.

    Splits and then sizes are outermost, so that what is stopped early is still balanced.
    """
    for split, rank in itertools.product(splits, range(max(map(len, sizes.values())))):
        for name, several in sizes.items():
            yield from ({"table": name, "n": n, "split": split} for n in several[rank : rank + 1])


def table_rows(table: str, n: int, split: int, most_test: int) -> TableRows:
    """The rows of a cell: n random ones of a random 80%, and as many of the others as asked for.

    Training rows of a smaller n are among those of a larger one, and test rows are the same for
    every n.

    Args:
        table: Name of the table.
        n: Number of training rows.
        split: Seed of the split.
        most_test: Most test rows.
    """
    whole = data.load(table)
    rows = data.split(whole.num_data, split, TEST_SHARE)
    train, test = data.subset(rows.train, n, split), rows.test[:most_test]
    y = whole.targets[train]
    return TableRows(
        whole.inputs[train], y, whole.inputs[test], whole.targets[test], float(y.std()) or 1.0
    )


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Fits one method and tests it.

    Args:
        cell: Its configuration: ``table``, ``n`` (training rows), ``split``, ``method``
            and ``most_test``.

    Returns:
        - the scores of :func:`benchmarks.tables.scores.score`, in units of the standard deviation
          of the training targets, and ``seconds`` of fit and prediction;
        - ``num_test``, ``num_data``, ``num_features``: of the table;
        - of this library's candidates ``problem``, what the fit says is wrong, and the criteria of
          :data:`benchmarks.tables.candidates.CRITERIA`; of the stack ``weights``, as text;
        - ``failure``: the error that ended the method, in whose place there are no scores; else
          empty.
    """
    return run_cells([cell])[0]


def run_cells(cells: list[Any]) -> list[Any]:
    """The same of several cells of one table, n and split, which fit each candidate once."""
    table, n, split, most_test = batch_label(cells[0])
    rows = table_rows(table, n, split, most_test)
    # Fitted once for all cells of these rows.
    candidates = Candidates(rows, split)
    about = {"num_test": len(rows.test_y), "num_features": rows.x.shape[1]}
    about["num_data"] = data.load(table).num_data
    answers = []
    for cell in cells:
        try:
            prediction, more = _predicted(cell["method"], rows, candidates, split)
            scores = score(prediction, rows.test_y.numpy(), rows.unit)
            answers.append({**about, **scores, **more, "failure": ""})
        except Exception as error:  # how a method fails is a result
            answers.append({**about, "failure": describe_error(error)})
    return answers


def _predicted(
    method: str, rows: TableRows, candidates: Candidates, seed: int
) -> tuple[StackedPrediction, dict[str, Any]]:
    if method in ABOUT:
        return candidates.predict(method)
    start, more = time.perf_counter(), {}
    if method == STACK:
        stack = StackedGP(seed=seed).fit(rows.x, rows.y, progress=False)
        prediction = stack.predict(rows.test_x)
        more["weights"] = ", ".join(f"{gp.name} {gp.weight:.2f}" for gp in stack.components)
    else:
        x, y, test_x = rows.x.numpy(), rows.y.numpy(), rows.test_x.numpy()
        prediction = PEERS[method].predict(x, y, test_x, seed)
    return prediction, {"seconds": time.perf_counter() - start, **more}


def batch_label(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """What cells share that :func:`run_cells` may take together."""
    return tuple(cell[name] for name in ("table", "n", "split", "most_test"))


def most_in_batch(cell: Mapping[str, Any]) -> int:
    """One, but for what the fits of the candidates serve."""
    return len(ABOUT) if cell["method"] in ABOUT else 1
