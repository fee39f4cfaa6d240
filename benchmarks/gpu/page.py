"""The page and the CSV file of a folder of results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks._tables import code, section, table
from benchmarks.gpu.records import Records, Row
from gpclml.errors import DataError

__all__ = ["PARTS", "all_rows", "write_page"]

PARTS = ("speed", "studies", "large")
"""The parts, by the names of their commands."""

_KEYS = (
    "part",
    "study",
    "device",
    "dtype",
    "n",
    "data",
    "kernel",
    "network",
    "tasks",
    "matrices",
    "method",
)
_HEADINGS = {
    "rates": "Rates of the card",
    "batched rates": "Many small matrices",
    "step": "Gradient steps",
    "large n": "Steps beyond one factor",
    "fit": "Whole fits by a line search",
    "CUDA graph": "Steps captured in a CUDA graph",
    "profile": "What a step consists of",
    "batched fits": "Many models at once",
    "few-shot step": "The GP part of a few-shot step",
    "evidence": "The evidence of networks",
    "large fits": "Exact fits of many points",
}
_ABOUT = {
    "rates": """`Gflop/s`: a product counts 2 n³ operations, a factor n³/3, its inverse 2 n³/3 more,
a triangular solve with n columns n³; sums and kernel entries count one each.""",
    "batched rates": """All matrices in one call, as in a step of stacked models.""",
    "step": """Value and gradient of one objective of an ARD RBF GP of 8 inputs, kernel included;
`dense`: the kernel is evaluated by GPyTorch, as those whose derivatives are not in closed form.
`ratio`: to GPyTorch's `ExactMarginalLogLikelihood` by Cholesky in the same round.
`of product`: the time of the least operations (LML n³, a held-out tenth .48 n³, ten folds and
leave-one-out 2 n³) at the rate of a matrix product in the same type, over the step's.
`GiB`: at the peak, beyond data and parameters; `predicted GiB`: what the library expects, and
refuses by.""",
    "large n": """In single precision, the methods of `python -m benchmarks.speed.scale`.""",
    "fit": """BoTorch's `SingleTaskGP` with its default priors, 8 inputs, by L-BFGS-B. `LML a
point`: at the end, with the priors' share.""",
    "CUDA graph": """The LML of an RBF kernel in PyTorch and `conditional_log_density`, value and
gradient, launched anew and replayed; beside it a step of the objective, which reads its value.""",
    "profile": """Of one step: milliseconds without the profiler, kernels and copies, `busy`: the
milliseconds that these took in all; then those that took longest.""",
    "batched fits": """Deep kernels with a bottleneck under the CLML, built and fitted by 20 steps
of Adam.""",
    "few-shot step": """5 ways of 17 images, 64 features: value and gradient. `ratio`: to
GPyTorch's classes way by way.""",
    "evidence": """Value and gradient in the precisions of all parameter tensors, of images of 28 x
28 pixels in ten classes. `ratio`: to the Kronecker evidence of all points.""",
    "large fits": """`GPRegression` by a line search; `seconds` of the fit. LML and leave-one-out
are per training point, test scores of up to 5000 other rows; all in standardized units.""",
}


def all_rows(folder: Path) -> list[Row]:
    """Rows of all parts; steps with their fraction of the rate of a product."""
    rows = [row for part in PARTS for row in Records(folder, part).rows()]
    rates = {
        (row["device"], row["dtype"]): row["Gflop/s"]
        for row in rows
        if row["study"] == "rates" and row.get("method") == "product" and "Gflop/s" in row
    }
    for row in rows:
        rate = rates.get((row.get("device"), row.get("dtype")))
        if row["study"] == "step" and rate and "ms" in row:
            row["of product"] = row["Gflop"] / rate / (1e-3 * row["ms"])
    return rows


def write_page(folder: Path) -> Path:
    """Writes ``gpu.md`` and ``gpu.csv`` into a folder of results.

    Returns:
        The page.

    Raises:
        DataError: There is nothing in the folder, or it cannot be written.
    """
    rows, file = all_rows(folder), folder / "machine.json"
    if not rows or not file.exists():
        raise DataError(f"{folder}: no results. Run the parts first, with the same --results.")
    machine = json.loads(file.read_text())
    frame = pd.DataFrame(rows)
    first = [name for name in _KEYS if name in frame]
    frame = frame[first + [name for name in frame if name not in first]]
    header = "".join(f"# {name}: {value}\n" for name, value in machine.items())
    page = folder / "gpu.md"
    try:
        csv = frame.to_csv(index=False, float_format="%.6g")
        (folder / "gpu.csv").write_text(header + csv)
        page.write_text(_page(frame, machine))
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error}).") from error
    return page


def _page(frame: pd.DataFrame, machine: Mapping[str, Any]) -> str:
    on = machine.get("card", "a CPU: this machine has no GPU, and the sizes are for trying it out")
    lines = [f"{name}: {value}" for name, value in machine.items()]
    parts = [
        f"# Measured on {on}",
        "Made by `make gpu`. Every row is in [gpu.csv](gpu.csv), ratios with their quartiles. "
        "TF32 is off.",
        code(lines),
        *_beside_the_cpu(frame),
    ]
    for study, heading in _HEADINGS.items():
        rows = frame[frame["study"] == study]
        if len(rows):
            parts.append(section(heading, _ABOUT[study], *map(_tables, _groups(rows))))
    return "\n\n".join([*parts, *_left_out(frame)]) + "\n"


def _beside_the_cpu(frame: pd.DataFrame) -> list[str]:
    """What was measured on both devices."""
    keys = [name for name in _KEYS if name in frame and name not in ("part", "device")]
    timed = frame[frame["ms"].notna()]
    timed = timed[~timed["study"].isin(["rates", "profile"])]
    timed = timed.assign(kind=timed["device"].str.partition(":")[0])
    timed = timed.sort_values(["study", "n"], kind="stable")
    known = timed[keys].astype(object).where(timed[keys].notna(), "")
    times = timed.assign(**known).pivot_table("ms", keys, "kind", "first", sort=False)
    if not {"cpu", "cuda"} <= set(times):
        return []
    both = times[["cuda", "cpu"]].dropna().reset_index()
    both["cpu over cuda"] = both["cpu"] / both["cuda"]
    both = both.rename(columns={"cuda": "cuda, ms", "cpu": "cpu, ms"})
    both = both[[name for name in both if (both[name] != "").any()]].map(_number)
    about = "The same steps and fits on the card and on this machine's CPU."
    return [section("Where a card begins to pay", about, table(both.set_index("study")))]


def _groups(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """One table for each device and type."""
    names = [name for name in ("device", "dtype") if name in rows]
    names = [name for name in names if rows[name].notna().any()]
    if not names:
        return [rows]
    return [one for _, one in rows.groupby(names, sort=False, dropna=False)]


def _tables(rows: pd.DataFrame) -> str:
    left_out = {"part", "study", "Gflop", "low", "high"}  # which the CSV file has
    shown = [name for name in rows if name not in left_out and rows[name].notna().any()]
    order = [name for name in ("n", "matrices", "tasks", "network", "kernel") if name in shown]
    rows = rows[shown].sort_values(order, kind="stable") if order else rows[shown]
    fixed = [name for name in ("device", "dtype") if name in shown]
    caption = ", ".join(str(rows[name].iloc[0]) for name in fixed)
    rows = rows.drop(columns=fixed).map(_number)
    return f"{caption}\n\n{table(rows.set_index(rows.columns[0]))}"


def _number(value: Any) -> Any:
    if isinstance(value, float):
        if value != value:
            return ""
        whole = value == int(value) or abs(value) >= 100
        return f"{value:.0f}" if whole and abs(value) < 1e9 else f"{value:.3g}"
    return value


def _left_out(frame: pd.DataFrame) -> list[str]:
    if "skipped" not in frame:
        return []
    skipped = frame[frame["skipped"].notna()]
    lines = dict.fromkeys(f"- {row['study']}: {row['skipped']}" for _, row in skipped.iterrows())
    return [section("Left out", "\n".join(lines))] if lines else []
