"""Gradients averaged over processes, and one start for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError
from gpclml.fit.distributed._exchange import Exchange
from gpclml.fit.distributed._processes import Processes, processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["average_gradients", "averaged", "broadcast_parameters"]

TIMEOUT = 300.0


@checked
def average_gradients(
    parameters: Iterable[Tensor],
    value: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> Tensor | None:
    """Replaces each gradient by its mean over the processes, between backward and step.

    A gradient that is None counts as zero, and stays None where it is so in every process.
    One flattened all-reduce a dtype. In one process, or without ``torch.distributed``, nothing
    changes. Every process of the group calls this, or the others fail after ``timeout``.

    Args:
        parameters: Parameters in the same order in every process, of any dtypes and devices;
            those that require no gradient are left out.
        value: The objective of this process, of any shape.
        group: Process group; all processes if None.
        timeout: Seconds to wait for the other processes, their slower backward passes
            included.

    Returns:
        The mean of ``value`` over the processes, detached; None if none is given.

    Raises:
        LostWorkerError: If a process ended or did not come within ``timeout``. Parameters and
            gradients are then as before the call. Process groups cannot be used afterwards.
        ShapeError: In every process, if they disagree in number, shapes, dtypes or call.
        ArgumentError: If no parameter requires a gradient, ``timeout`` is not positive, or
            there is no group of which this process is a member.

    Note:
        Beside the all-reduces, one message to the process of rank 0 and back, which finds
        disagreements and lost processes. A process that ends is noticed at once and named; one
        that hangs is named in the process of rank 0. NCCL alone names none: initialize with
        ``"cpu:gloo,cuda:nccl"`` on GPUs.

    Examples:
        >>> conditioning = DistributedConditioning(RandomHoldout(0.1))
        >>> mll = ConditionalMarginalLogLikelihood(likelihood, model, conditioning, seed=0)
        >>> broadcast_parameters(mll)
        >>> optimizer = torch.optim.Adam(mll.parameters(), lr=0.01)
        >>> for step in range(3):
        ...     optimizer.zero_grad()
        ...     objective = mll(model(train_x), train_y)
        ...     (-objective).backward()
        ...     objective = average_gradients(mll.parameters(), objective)
        ...     optimizer.step()
    """
    return averaged(parameters, value, processes(group), timeout)


def averaged(
    parameters: Iterable[Tensor],
    value: Tensor | None,
    own: Processes,
    timeout: float,
    agreed: Mapping[str, int] | None = None,
) -> Tensor | None:
    """What :func:`average_gradients` does.

    Args:
        parameters: The parameters.
        value: The objective of this process.
        own: Who takes part.
        timeout: Seconds to wait for the others.
        agreed: Numbers by name that must be the same in every process, as :class:`Exchange`.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ArgumentError("parameters", "none that requires a gradient", "at least one")
    values = [] if value is None else [value.detach()]
    exchange = Exchange(own, timeout, "average_gradients", trained, agreed)
    if own.size > 1:
        # Whether a gradient is there at all, as numbers that travel with the gradients.
        given = torch.tensor([p.grad is not None for p in trained]).to(trained[0])
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        given, *sums = exchange.sum([given, *gradients, *values])
        means = [total / own.size for total in sums]
        values = means[len(trained) :]
        with torch.no_grad():
            for parameter, mean, count in zip(trained, means, given.tolist(), strict=False):
                if parameter.grad is not None:
                    parameter.grad.copy_(mean)
                elif count:
                    parameter.grad = mean
    return values[0] if values else None


@checked
def broadcast_parameters(
    module: torch.nn.Module,
    source: int = 0,
    *,
    group: ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Gives all processes the parameters of one, so that they start alike.

    Buffers stay as they are. One flattened broadcast a dtype; without ``torch.distributed``
    nothing changes.

    Args:
        module: A model or objective, built alike in every process.
        source: Rank in the group of the process whose parameters all get.
        group: Process group; all processes if None.
        timeout: Seconds to wait for the other processes.

    Raises:
        LostWorkerError: As :func:`average_gradients`; no parameter is changed then.
        ShapeError: The same.
        ArgumentError: If ``source`` is no rank of the group; or as :func:`average_gradients`.
    """
    own = processes(group)
    parameters = list(module.parameters())
    exchange = Exchange(own, timeout, f"broadcast_parameters from rank {source}", parameters)
    if source not in range(own.size):
        raise ArgumentError("source", source, f"a rank from 0 to {own.size - 1}")
    if own.size > 1 and parameters:
        received = exchange.broadcast(parameters, source)
        with torch.no_grad():
            for parameter, values in zip(parameters, received, strict=True):
                parameter.copy_(values)
