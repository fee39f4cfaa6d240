"""Many models at once, few-shot steps and the evidence of networks, on a GPU and on the CPU."""

from __future__ import annotations

import importlib.util
from functools import partial

from benchmarks.gpu.records import Records, Row
from benchmarks.gpu.timing import timed
from benchmarks.speed import evidence
from benchmarks.speed.fits import way_of_fitting
from benchmarks.speed.tasks import PLAIN, task_steps
from gpclml.fit import suggest_batch_size

__all__ = ["run"]

_STEPS = 20  # of Adam in a fit
_WAYS, _IMAGES = 5, 17


def run(records: Records, device: str, small: bool) -> None:
    """All measurements of the part, what tells most first.

    Args:
        records: Where they are kept.
        device: The GPU; a CPU serves to try it.
        small: Tiny sizes.
    """
    if importlib.util.find_spec("laplace") is None:
        records.skip({"study": "evidence, laplace-torch"}, "laplace-torch is not installed")
    if small:
        _batched(records, device, 15, [1, 2], 1, 0.0)
        _tasks(records, device, "rbf", 1, 0.0, ways=2, images=3)
        _evidence(records, device, "cnn", 20, 0.0)
        return
    devices = list(dict.fromkeys([device, "cpu"]))
    for one in devices:
        many = [1, 10, 100, 256] if one != "cpu" else [1, 10]
        _batched(records, one, 100, many, 5, 3.0)
        for tasks in (1, 16):
            _tasks(records, one, "rbf", tasks, 2.0)
    for one in devices:
        for network in ("mlp", "cnn"):
            _evidence(records, one, network, 1000, 2.0)
    _tasks(records, device, "rbf", 64, 2.0)
    _tasks(records, device, "cosine", 16, 2.0)
    for n in (300, 700):
        _batched(records, device, n, [1, 10, 100], 3, 3.0)
        if device != "cpu":
            _batched(records, "cpu", n, [1, 5], 3, 0.0)


def _batched(
    records: Records, device: str, n: int, sizes: list[int], lone: int, seconds: float
) -> None:
    """Models a second as more of them are fitted in one batch."""

    def rows() -> list[Row]:
        seeds = {size: lone if size == 1 else size for size in sizes}
        steps = {
            str(size): way_of_fitting(n, "clml", count, size, _STEPS, device)
            for size, count in seeds.items()
        }
        found = timed(steps, device, seconds, memory=True)
        chosen = suggest_batch_size(n, device)
        return [
            {"method": f"{size} at once", **row}
            | ({"models a second": 1e3 * seeds[size] / row["ms"]} if "ms" in row else {})
            | {"suggested size": chosen}
            for size, row in zip(sizes, found.values(), strict=True)
        ]

    key = {"study": "batched fits", "device": device, "n": n, "dtype": "float64"}
    records.measure(key, rows)


def _tasks(
    records: Records, device: str, kernel: str, tasks: int, seconds: float,
    *, ways: int = _WAYS, images: int = _IMAGES,
) -> None:  # fmt: skip
    def rows() -> list[Row]:
        steps = task_steps(kernel, ways, images, tasks, device)
        found = timed(steps, device, seconds, base=PLAIN)
        return [{"method": name, **row} for name, row in found.items()]

    key = {"study": "few-shot step", "device": device, "kernel": kernel, "tasks": tasks}
    records.measure(key | {"dtype": "float32"}, rows)


def _evidence(records: Records, device: str, network: str, points: int, seconds: float) -> None:
    def rows(others: bool) -> list[Row]:
        _, steps = evidence.evidence_steps(network, points, device, others)
        found = timed(steps, device, seconds, base=evidence.BASE, memory=True)
        return [{"method": name, **row} for name, row in found.items()]

    key = {"study": "evidence", "device": device, "network": network, "n": points}
    records.measure(key | {"dtype": "float32"}, partial(rows, True))
