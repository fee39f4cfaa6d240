"""Command line: ``python -m benchmarks.speed.evidence``: the evidence of networks, by estimate."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor
from typer import Option

from benchmarks.speed.runs import (
    Device,
    Rounds,
    interleaved_times,
    ratio_table,
    sweep_command,
)
from gpclml.curvature import FunctionSpace, GaussianWeightPrior, Kronecker
from gpclml.errors import UnknownNameError
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = ["BASE", "evidence_steps", "measure_evidence"]

BASE = "kronecker, all points"
_CLASSES, _BATCH = 10, 250


def _mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), MLP([784, 1024, 512, _CLASSES]))


def _cnn() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 11, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(11, 22, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(22 * 49, _CLASSES),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {"mlp": _mlp, "cnn": _cnn}


def measure_evidence(
    network: Annotated[
        str, Option(help="mlp (1.3 million parameters), cnn (13 thousand); may be repeated.")
    ],
    points: Annotated[int, Option(help="Number of points; may be repeated.")] = 1000,
    rounds: Rounds = 5,
    device: Device = "cpu",
    others: bool = True,
) -> pd.DataFrame:
    """Time of the evidence with its gradient in the precisions of all parameter tensors.

    Images of 28 x 28 pixels, ten classes, a softmax, float32; curvature in batches of 250.

    Returns:
        A row a method. ``milliseconds`` is the median, ``ratio`` the median over rounds of its
        time over that of the Kronecker evidence of all points, ``low`` and ``high`` their
        quartiles. ``150-1`` has 150 points and one output for all.

    Raises:
        UnknownNameError: No such network.
    """
    module, steps = evidence_steps(network, points, device, others)
    times = interleaved_times(steps, rounds, device)
    more = {
        "network": network, "parameters": sum(p.numel() for p in module.parameters()),
        "points": points, "milliseconds": 1e3 * times.median(),
    }  # fmt: skip
    return ratio_table(times, BASE, ratio="ratio", name="method", more=more)


def evidence_steps(
    network: str, points: int, device: str, others: bool = True
) -> tuple[torch.nn.Module, dict[str, Callable[[], object]]]:
    """The network, and what is compared by :func:`measure_evidence`, whose arguments these are.

    Raises:
        UnknownNameError: No such network.
    """
    if network not in NETWORKS:
        raise UnknownNameError("network", network, NETWORKS)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, 1, 28, 28, generator=generator).to(device)
    y = torch.randint(_CLASSES, (points,), generator=generator).to(device)
    module = NETWORKS[network]().to(device)
    steps = {
        BASE: _of_all(module, x, y),
        "kronecker, 150-10": _of_a_batch(module, x, y, Kronecker(), "all"),
        "kronecker, 150-1": _of_a_batch(module, x, y, Kronecker(), "single"),
        "kernel, 150-1": _of_a_batch(module, x, y, FunctionSpace(), "single"),
    }
    if others and importlib.util.find_spec("laplace") is not None:
        steps |= _others(module, x, y)
    return module, steps


def _objective(network: torch.nn.Module, points: int, structure: Any, outputs: Any):
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "parameter"))
    likelihood = SoftmaxLikelihood(num_classes=_CLASSES, mixing_weights=False)
    return LaplaceMarginalLogLikelihood(likelihood, model, points, structure, outputs=outputs)


def _of_all(network: torch.nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    mll = _objective(network, len(x), Kronecker(), "all")
    model: Any = mll.model

    def step() -> None:
        parts = []
        for rows in torch.arange(len(x), device=x.device).split(_BATCH):
            parts.append(mll.evidence_of(x[rows], y[rows]))
        value = sum(parts[1:], parts[0])()
        torch.autograd.grad(value, model.prior.log_precision)

    return step


def _of_a_batch(
    network: torch.nn.Module, x: Tensor, y: Tensor, structure: Any, outputs: str
) -> Callable[[], object]:
    mll = _objective(network, len(x), structure, outputs)
    model: Any = mll.model

    def step() -> None:
        value = mll.evidence_of(x[:150], y[:150])()
        torch.autograd.grad(value, model.prior.log_precision)

    return step


def _others(network: torch.nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    import copy

    import laplace
    from laplace.curvature import asdl, backpack, curvlinops
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(x, y), batch_size=_BATCH)
    backends = {
        "laplace-torch, Asdl": asdl.AsdlGGN,
        "laplace-torch, Curvlinops": curvlinops.CurvlinopsGGN,
        "laplace-torch, BackPACK": backpack.BackPackGGN,
    }

    def step_of(backend: Any) -> Callable[[], object]:
        module = copy.deepcopy(network)  # a backend leaves hooks behind

        def step() -> None:
            fitted: Any = laplace.Laplace(
                module, "classification", subset_of_weights="all", hessian_structure="kron",
                backend=backend,
            )  # fmt: skip
            fitted.fit(loader)
            count = len(list(module.parameters()))
            log_precision = torch.zeros(count, device=x.device, requires_grad=True)
            value = fitted.log_marginal_likelihood(log_precision.exp())
            torch.autograd.grad(value, log_precision)

        return step

    return {name: step_of(backend) for name, backend in backends.items()}


main = sweep_command(
    "benchmarks.speed.evidence",
    measure_evidence,
    {"network": list(NETWORKS), "points": [1000]},
    "Value and gradient of a network's evidence: all points, estimates, laplace-torch.",
    digits=".3f",
)

if __name__ == "__main__":
    typer.run(main)
