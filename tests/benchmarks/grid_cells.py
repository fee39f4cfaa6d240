"""Cell functions that the runner's tests share; importable by their worker processes.

As a script it runs a sweep: ``grid_cells.py FUNCTION GRID.json PATH JOBS``. The process says
``ready`` when all is imported and starts at a line on stdin.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch


def wait_for(condition, seconds=600):
    """Waits for a condition; the limit is for what would wait for ever."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def cholesky_cell(cell: dict) -> dict:
    """Log-determinants of a seeded covariance, as soon as a gate, if any, is above the seed."""
    if "gate" in cell:
        wait_for(lambda: cell["seed"] < int(Path(cell["gate"]).read_text()))
    generator = torch.Generator().manual_seed(cell["seed"])
    root = torch.randn(100, 100, generator=generator)
    value = torch.linalg.cholesky(root @ root.mT + torch.eye(100)).diagonal().log().sum()
    return {
        "log_determinant": value.double(),
        "spread": math.nan if cell["seed"] % 7 == 0 else value / 100,
        "threads": torch.get_num_threads(),
    }


def cholesky_batch(cells: list[dict]) -> list[dict]:
    return [cholesky_cell(cell) for cell in cells]


def counted_cell(cell: dict) -> dict:
    """Takes a while, and leaves a line for each time it is computed."""
    with open(cell["log"], "a") as log:
        log.write(f"{cell['seed']}\n")
    time.sleep(0.1)
    return {"square": cell["seed"] ** 2}


def counted_batch(cells: list[dict]) -> list[dict]:
    """As ``counted_cell``; leaves one line more, with the number of cells."""
    with open(cells[0]["log"] + ".batches", "a") as log:
        log.write(f"{len(cells)}\n")
    return [counted_cell(cell) for cell in cells]


def faulty_cell(cell: dict) -> dict:
    """Fails at odd seeds as long as the fix is missing; a seed of 4 is Ctrl-C, of 6 an exit."""
    if not Path(cell["fix"]).exists():
        if cell["seed"] % 2:
            raise ZeroDivisionError(f"seed {cell['seed']}")
        if cell["seed"] == 4:
            raise KeyboardInterrupt
        if cell["seed"] == 6:
            raise SystemExit(3)
    return {"half": cell["seed"] / 2}


def faulty_batch(cells: list[dict]) -> list:
    """The answers of ``faulty_cell``, errors among them."""
    answers = []
    for cell in cells:
        try:
            answers.append(faulty_cell(cell))
        except ZeroDivisionError as error:
            answers.append(error)
    return answers


def returned_cell(cell: dict) -> object:
    """Returns what the cell asks for, be it metrics or not."""
    return {
        "list": [1.0],
        "clash": {"kind": 1.0},
        "object": {"rmse": object()},
        "tensor": {"rmse": torch.tensor(0.1), "curve": torch.arange(3)},
    }[cell["kind"]]


def raising_batch(cells: list[dict]) -> list[dict]:
    raise ZeroDivisionError("all of them")


def short_batch(cells: list[dict]) -> list[dict]:
    return [{}] * (len(cells) - 1)


def lethal_cell(cell: dict) -> dict:
    """The cells named lethal take their worker down, once or always; each run leaves a plus."""
    marker = Path(cell["folder"]) / f"{cell['seed']}"
    first = not marker.exists()
    with open(marker, "a") as runs:
        runs.write("+")
    if cell["lethal"] == "always" or (cell["lethal"] == "once" and first):
        os.kill(os.getpid(), signal.SIGKILL)
    return cholesky_cell({"seed": cell["seed"]})


def environment_cell(cell: dict) -> dict:
    return {"values": [os.environ.get(name) for name in cell["names"]]}


if __name__ == "__main__":
    import grid_cells

    from benchmarks.runner import run_grid

    name, grid, path, jobs = sys.argv[1:]
    cells = json.loads(Path(grid).read_text())
    print("ready", flush=True)
    sys.stdin.readline()
    run_grid(cells, getattr(grid_cells, name), path, progress=False, jobs=int(jobs))
