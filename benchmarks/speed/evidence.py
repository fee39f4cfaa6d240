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

from benchmarks.speed.memory import highest_resident, in_fresh_process, start_of_peak
from benchmarks.speed.runs import (
    Device,
    Rounds,
    interleaved_times,
    ratio_table,
    sweep_command,
)
from gpclml.curvature import Diagonal, FunctionSpace, GaussianWeightPrior, Kronecker
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


def _lenet() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(6, 16, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(400, 120), torch.nn.ReLU(), torch.nn.Linear(120, 84), torch.nn.ReLU(),
        torch.nn.Linear(84, _CLASSES),
    )  # fmt: skip


class _Residual(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.relu = torch.nn.ReLU()
        self.second = torch.nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = torch.nn.Conv2d(inputs, outputs, 1, stride)
        self.last = torch.nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.skip(x) + self.second(self.relu(self.first(x))))


def _resnet() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), _Residual(16, 16, 1),
        _Residual(16, 32, 2), _Residual(32, 64, 2), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(64, _CLASSES),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "mlp": _mlp, "cnn": _cnn, "lenet": _lenet, "resnet": _resnet,
}  # fmt: skip
_SHAPES = {"mlp": (1, 28, 28), "cnn": (1, 28, 28), "lenet": (3, 32, 32), "resnet": (3, 32, 32)}


def measure_evidence(
    network: Annotated[
        str,
        Option(
            help="mlp (1.3 million parameters), cnn (13 thousand), lenet (62 thousand), resnet "
            "(78 thousand); may be repeated."
        ),
    ],
    points: Annotated[int, Option(help="Number of points; may be repeated.")] = 1000,
    rounds: Rounds = 5,
    memory: Annotated[bool, Option(help="Peak memory too, each in a process.")] = False,
    device: Device = "cpu",
    others: bool = True,
) -> pd.DataFrame:
    """Time of the evidence with its gradient in the precisions of all parameter tensors.

    Images of 28 x 28 pixels, in colour of 32 x 32 for the last two; ten classes, a softmax,
    float32; curvature in batches of 250.

    Returns:
        A row a method. ``milliseconds`` is the median, ``ratio`` the median over rounds of its
        time over that of the Kronecker evidence of all points, ``low`` and ``high`` their
        quartiles. ``150-1`` has 150 points and one output for all; ``passes alone`` are the
        forward and the backward pass that any such estimate needs. ``MiB`` is the highest memory
        resident in a fresh process, less that after a pass over 20 points.

    Raises:
        UnknownNameError: No such network.
    """
    module, steps = evidence_steps(network, points, device, others)
    times = interleaved_times(steps, rounds, device)
    more = {
        "network": network, "parameters": sum(p.numel() for p in module.parameters()),
        "points": points, "milliseconds": 1e3 * times.median(),
    }  # fmt: skip
    table = ratio_table(times, BASE, ratio="ratio", name="method", more=more)
    if memory:
        from benchmarks.speed.evidence import _peak  # its module's name is not __main__

        peaks = [in_fresh_process(_peak, network, points, one) for one in table["method"]]
        table["MiB"] = [peak / 2**20 for peak in peaks]
    return table


def _peak(network: str, points: int, method: str) -> int:
    """Memory of a method beyond that of 20 points, of this process."""
    torch.set_num_threads(1)
    evidence_steps(network, 20, "cpu")[1][method]()
    step = evidence_steps(network, points, "cpu")[1][method]
    before = start_of_peak()
    step()
    return highest_resident() - before


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
    x = torch.randn(points, *_SHAPES[network], generator=generator).to(device)
    y = torch.randint(_CLASSES, (points,), generator=generator).to(device)
    module = NETWORKS[network]().to(device)
    steps = {
        BASE: _of_all(module, x, y, Kronecker()),
        "diagonal, all points": _of_all(module, x, y, Diagonal()),
        "kronecker, 150-10": _of_a_batch(module, x, y, Kronecker(), "all"),
        "kronecker, 150-1": _of_a_batch(module, x, y, Kronecker(), "single"),
        "kernel, 150-1": _of_a_batch(module, x, y, FunctionSpace(), "single"),
        "passes alone, 150-1": _passes(module, x[:150]),
    }
    if others and importlib.util.find_spec("laplace") is not None:
        steps |= _others(module, x, y)
    return module, steps


def _objective(network: torch.nn.Module, points: int, structure: Any, outputs: Any):
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "parameter"))
    likelihood = SoftmaxLikelihood(num_classes=_CLASSES, mixing_weights=False)
    return LaplaceMarginalLogLikelihood(likelihood, model, points, structure, outputs=outputs)


def _of_all(network: torch.nn.Module, x: Tensor, y: Tensor, structure: Any) -> Callable[[], object]:
    mll = _objective(network, len(x), structure, "all")
    model: Any = mll.model

    batches = list(zip(x.split(_BATCH), y.split(_BATCH), strict=True))

    def step() -> None:
        value = mll.evidence_of(batches, progress=False)()
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


def _passes(network: torch.nn.Module, x: Tensor) -> Callable[[], object]:
    kinds = torch.nn.Linear, torch.nn.Conv2d
    layers = [one for one in network.modules() if isinstance(one, kinds)]

    def step() -> None:
        made: list[Tensor] = []

        def keep(_: object, __: object, output: Tensor) -> None:
            made.append(output)

        handles = [one.register_forward_hook(keep) for one in layers]
        outputs = network(x)
        for handle in handles:
            handle.remove()
        torch.autograd.grad(outputs[:, 0].sum(), made)

    return step


def _others(network: torch.nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    import copy

    import laplace
    from laplace.curvature import asdl, backpack, curvlinops
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(x, y), batch_size=_BATCH)
    backends = {
        "laplace-torch, Asdl": (asdl.AsdlGGN, "kron"),
        "laplace-torch, Curvlinops": (curvlinops.CurvlinopsGGN, "kron"),
        "laplace-torch, BackPACK": (backpack.BackPackGGN, "kron"),
        "laplace-torch, Asdl, diagonal": (asdl.AsdlGGN, "diag"),
    }
    if any(isinstance(part, _Residual) for part in network.modules()):
        del backends["laplace-torch, BackPACK"]  # which takes no modules of one's own

    def step_of(backend: Any, structure: str) -> Callable[[], object]:
        module = copy.deepcopy(network)  # a backend leaves hooks behind

        def step() -> None:
            fitted: Any = laplace.Laplace(
                module, "classification", subset_of_weights="all", hessian_structure=structure,
                backend=backend,
            )  # fmt: skip
            fitted.fit(loader)
            count = len(list(module.parameters()))
            log_precision = torch.zeros(count, device=x.device, requires_grad=True)
            value = fitted.log_marginal_likelihood(log_precision.exp())
            torch.autograd.grad(value, log_precision)

        return step

    return {name: step_of(*backend) for name, backend in backends.items()}


main = sweep_command(
    "benchmarks.speed.evidence",
    measure_evidence,
    {"network": list(NETWORKS), "points": [1000]},
    "Value and gradient of a network's evidence: all points, estimates, laplace-torch.",
    digits=".3f",
)

if __name__ == "__main__":
    typer.run(main)
