"""How tight each estimate of the Laplace evidence is, and what it costs (Immer et al. 2023)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.evidence.training import CLASSES, images, network, objective, trained
from gpclml.conditioning import partition_at_random, partition_by_class
from gpclml.curvature import BlockDiagonal, Diagonal, Full, FunctionSpace, Kronecker
from gpclml.errors import UnknownNameError
from gpclml.mlls import LaplaceMarginalLogLikelihood

__all__ = ["ESTIMATORS", "STRUCTURES", "run_estimator"]

STRUCTURES = {
    "full": Full(), "block": BlockDiagonal("layer"), "block-parameter": BlockDiagonal("parameter"),
    "kronecker": Kronecker(others="diagonal"),
    "kronecker-reduce": Kronecker("reduce", others="diagonal"), "diagonal": Diagonal(),
    "kernel": FunctionSpace(),
}  # fmt: skip
"""The structures of the curvature by name."""

ESTIMATORS = (
    *((name, None, "random", "all") for name in STRUCTURES if name != "kernel"),
    *(
        ("kernel", size, partition, outputs)
        for size in (10, 50, 150)
        for partition in ("random", "class")
        for outputs in ("all", "single", "column")
    ),
    *(
        ("kronecker", size, "random", outputs)
        for size in (50, 150)
        for outputs in ("all", "single")
    ),
    ("block", 150, "random", "all"),
    ("diagonal", 150, "random", "all"),
)
"""Structure, batch size (None: all points), partition and outputs of each estimate."""

_MOST_BATCHES = 10


def run_estimator(cell: Mapping[str, Any]) -> dict[str, float]:
    """Estimates of the evidence of one trained network over the batches of a partition.

    Args:
        cell: ``data``, ``architecture``, ``precision``, ``num_train``, ``epochs``, ``seed``,
            ``device``, ``structure``, ``hessian``, ``batch_size``, ``partition``, ``outputs``.

    Returns:
        In nats per point: ``evidence``, the mean over at most ten batches, and its
        ``evidence_spread`` (standard deviation) over them; ``seconds_each`` of an estimate and
        its gradient in the precisions of layers, the fastest of them.
    """
    if cell["structure"] not in STRUCTURES:
        raise UnknownNameError("structure", cell["structure"], STRUCTURES)
    data = images(cell["data"], cell["num_train"], cell["seed"], cell["device"])
    x, y = data.train_x, data.train_y
    start = network(cell["architecture"], *x.shape[1:3], CLASSES, cell["seed"])
    start = start.to(cell["device"])
    trained(start, x, y, cell["precision"], cell["epochs"], cell["seed"])
    mll = objective(
        start, len(x), cell["precision"], "layer", STRUCTURES[cell["structure"]],
        hessian=cell["hessian"],
        outputs=cell["outputs"], seed=cell["seed"],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(cell["seed"])
    # No batch size means one batch with all points.
    size = cell["batch_size"] or len(x)
    if cell["partition"] == "class":
        batches = partition_by_class(y, size, generator)
    else:
        batches = partition_at_random(len(x), size, generator)
    estimates = [_estimate(mll, x[rows], y[rows]) for rows in batches[:_MOST_BATCHES]]
    values = torch.tensor([value for value, _ in estimates], dtype=torch.float64)
    weights = torch.tensor([float(len(rows)) for rows in batches[:_MOST_BATCHES]]).double()
    return {
        # Batches of a class differ in size: larger ones count for more.
        "evidence": float((weights * values).sum() / weights.sum()),
        "evidence_spread": float(values.std()) if len(values) > 1 else 0.0,
        "seconds_each": min(seconds for _, seconds in estimates),
        "parameters": float(sum(p.numel() for p in start.parameters())),
    }


def _estimate(
    mll: LaplaceMarginalLogLikelihood, x: torch.Tensor, y: torch.Tensor
) -> tuple[float, float]:
    model = mll.model
    start = time.perf_counter()
    value = mll.evidence_of(x, y)()
    torch.autograd.grad(value, model.prior.log_precision)
    number = float(value.detach())  # waits for the device
    return number, time.perf_counter() - start
