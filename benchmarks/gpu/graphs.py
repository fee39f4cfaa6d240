"""Whether a step that is captured once and replayed is faster than one launched anew."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.records import FAILED, Row, message_of
from benchmarks.gpu.timing import timed
from benchmarks.speed.methods import Problem, gradient_step
from gpclml.linalg import DenseCovariance

__all__ = ["density_step", "graph_rows"]

_SECONDS = 1.0
_PLAIN = "launched anew"


def density_step(device: str, dtype: str, n: int) -> tuple[Callable[[], None], list[Tensor]]:
    """Value and gradients of the LML of an RBF kernel, in tensors that stay where they are.

    Returns:
        The step, and what it writes: the value, and the gradients of logarithms of lengthscales,
        variance and noise.
    """
    problem = Problem(n, getattr(torch, dtype), device)
    logs = [
        torch.zeros(problem.x.shape[-1], device=device, dtype=problem.x.dtype),
        torch.zeros((), device=device, dtype=problem.x.dtype),
        torch.full((), -2.0, device=device, dtype=problem.x.dtype),
    ]
    for one in logs:
        one.requires_grad_()
    written = [torch.zeros((), device=device, dtype=problem.x.dtype)]
    written += [torch.zeros_like(one) for one in logs]
    identity = torch.eye(n, device=device, dtype=problem.x.dtype)

    def step() -> None:
        scales, variance, noise = (one.exp() for one in logs)
        z = problem.x / scales
        squares = z.square().sum(-1)
        distances = squares[:, None] + squares - 2 * z @ z.mT
        covariance = variance * (-0.5 * distances).exp() + noise * identity
        value = DenseCovariance(covariance, checked=False).log_density(problem.y)
        with torch.no_grad():
            for place, found in zip(
                written, [value, *torch.autograd.grad(value, logs)], strict=True
            ):
                place.copy_(found)

    return step, written


def graph_rows(device: str, dtype: str, n: int) -> list[Row]:
    """Times of a step launched anew and replayed, and of the objective's own step.

    Returns:
        A row a way; ``difference`` of the replayed values from the others, relative.
    """
    step, written = density_step(device, dtype, n)
    step()
    expected = torch.cat([one.flatten() for one in written]).clone()
    whole = gradient_step("LastPoints(m=0)", Problem(n, getattr(torch, dtype), device))
    steps: dict[str, Callable[[], object]] = {_PLAIN: step, "objective's step": whole}
    more: dict[str, Row] = {}
    try:
        with torch.cuda.device(device):
            graph = _captured(step)
        for one in written:
            one.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(device)
        found = torch.cat([one.flatten() for one in written])
        difference = float((found - expected).norm() / expected.norm())
        more["replayed"] = {"difference": difference}
        steps["replayed"] = graph.replay
    except Exception as error:  # a library may refuse to be captured
        more["replayed"] = {FAILED: message_of(error)}
    rows = timed(steps, device, _SECONDS, base=_PLAIN)
    names = list(dict.fromkeys([*rows, *more]))
    return [{"method": name, **rows.get(name, {}), **more.get(name, {})} for name in names]


def _captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
