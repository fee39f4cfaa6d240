"""Cell functions that the runner's tests share; importable by their worker processes."""

from __future__ import annotations

import math
import os
import signal
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
    """Log-determinants of seeded covariances."""
    generator = torch.Generator().manual_seed(cell["seed"])
    values = []
    for _ in range(2):
        root = torch.randn(cell["num_data"], cell["num_data"], generator=generator)
        covariance = root @ root.mT + cell["noise"] * torch.eye(cell["num_data"])
        values.append(torch.linalg.cholesky(covariance).diagonal().log().sum())
    return {
        "log_determinant": torch.stack(values).double().mean(),
        "spread": math.nan if cell["seed"] % 7 == 0 else torch.stack(values).std(),
        "threads": torch.get_num_threads(),
    }


def cholesky_grid(count: int) -> list[dict]:
    return [{"seed": seed, "num_data": 400, "noise": 0.1} for seed in range(count)]


def gated_cell(cell: dict) -> dict:
    """As ``cholesky_cell``, as soon as the number in a file is above the seed."""
    wait_for(lambda: cell["seed"] < int(Path(cell["gate"]).read_text()))
    return cholesky_cell(cell)


def gated_grid(gate: Path, count: int) -> list[dict]:
    return [cell | {"gate": str(gate)} for cell in cholesky_grid(count)]


def counted_cell(cell: dict) -> dict:
    """Takes a while, and leaves a line for each time it is computed."""
    with open(cell["log"], "a") as log:
        log.write(f"{cell['seed']}\n")
    time.sleep(0.1)
    return {"square": cell["seed"] ** 2, "process": "" if cell["quiet"] else os.getpid()}


def faulty_cell(cell: dict) -> dict:
    """Fails at odd seeds as long as the fix is missing."""
    if cell["seed"] % 2 and not Path(cell["fix"]).exists():
        raise ZeroDivisionError(f"seed {cell['seed']}")
    return {"half": cell["seed"] / 2}


def interrupted_cell(cell: dict) -> dict:
    """Ctrl-C comes in the fourth cell as long as the fix is missing."""
    if cell["seed"] == 3 and not Path(cell["fix"]).exists():
        raise KeyboardInterrupt
    return {"half": cell["seed"] / 2}


def crashing_cell(cell: dict) -> dict:
    """One cell takes its process down, as the system does when memory runs out."""
    if cell["seed"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"half": cell["seed"] / 2}


def returned_cell(cell: dict) -> object:
    """Returns what the cell asks for, be it metrics or not."""
    kinds = {
        "list": [1.0],
        "clash": {"kind": 1.0},
        "object": {"rmse": object()},
        "exit": {"rmse": 0.0},
        "tensor": {"rmse": torch.tensor(0.1), "curve": torch.arange(3)},
    }
    if cell["kind"] == "exit":
        raise SystemExit(3)
    return kinds[cell["kind"]]


def lethal_cell(cell: dict) -> dict:
    """As ``cholesky_cell``; the cells named lethal take their worker down, once or always.

    Each run leaves a plus in a file.
    """
    marker = Path(cell["folder"]) / f"{cell['seed']}"
    first = not marker.exists()
    with open(marker, "a") as runs:
        runs.write("+")
    if cell["lethal"] == "always" or (cell["lethal"] == "once" and first):
        os.kill(os.getpid(), signal.SIGKILL)
    return cholesky_cell({"seed": cell["seed"], "num_data": 400, "noise": 0.1})


def lethal_grid(folder: Path, count: int, lethal: int, when: str = "once") -> list[dict]:
    return [
        {"seed": seed, "folder": str(folder), "lethal": when if seed == lethal else "no"}
        for seed in range(count)
    ]


def cholesky_batch(cells: list[dict]) -> list[dict]:
    return [cholesky_cell(cell) for cell in cells]


def gated_batch(cells: list[dict]) -> list[dict]:
    return [gated_cell(cell) for cell in cells]


def counted_batch(cells: list[dict]) -> list[dict]:
    """As ``counted_cell``; leaves one line more, with the number of cells."""
    with open(cells[0]["log"] + ".batches", "a") as log:
        log.write(f"{len(cells)}\n")
    return [counted_cell(cell) for cell in cells]


def faulty_batch(cells: list[dict]) -> list:
    """The answers of ``faulty_cell``, errors among them."""
    answers = []
    for cell in cells:
        try:
            answers.append(faulty_cell(cell))
        except ZeroDivisionError as error:
            answers.append(error)
    return answers


def returned_batch(cells: list[dict]) -> list:
    return [returned_cell(cell) for cell in cells]


def raising_batch(cells: list[dict]) -> list[dict]:
    raise ZeroDivisionError("all of them")


def exiting_batch(cells: list[dict]) -> list[dict]:
    raise SystemExit(3)


def short_batch(cells: list[dict]) -> list[dict]:
    return [{}] * (len(cells) - 1)


def empty_batch(cells: list[dict]) -> None:
    """Forgets to return its answers."""


def crashing_batch(cells: list[dict]) -> list[dict]:
    """As ``counted_batch``; one batch takes its process down."""
    if any(cell["seed"] == 2 for cell in cells):
        os.kill(os.getpid(), signal.SIGKILL)
    return counted_batch(cells)


def interrupted_batch(cells: list[dict]) -> list[dict]:
    return [interrupted_cell(cell) for cell in cells]


def environment_cell(cell: dict) -> dict:
    return {"values": [os.environ.get(name) for name in cell["names"]]}


def lethal_batch(cells: list[dict]) -> list[dict]:
    return [lethal_cell(cell) for cell in cells]
