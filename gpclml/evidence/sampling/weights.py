"""Draws of a network's weights by Langevin dynamics, and its outputs at draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from gpclml._utils.arguments import (
    all_finite,
    check_counts,
    check_placement,
    check_positive,
    checked,
    seeded,
)
from gpclml._utils.environment import progress_bar
from gpclml.conditioning.batches import Loader, Points, TrainingBatches, points_of
from gpclml.curvature import OuterProducts, output_gradients
from gpclml.curvature.structure import call_with, check_mode, twice_differentiable
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = ["linearized_outputs", "rescaled", "sample_sgld", "sampled_outputs"]

Weights = Mapping[str, Tensor]
_NUMBERS = 2**24  # of gradients in memory at a time
_POINTS = 256  # of a loader at a time


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def sample_sgld(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor | Loader,
    train_y: Tensor | None = None,
    *,
    count: int = 20,
    cycles: int = 4,
    epochs_per_cycle: int = 20,
    batch_size: int | None = None,
    lr: float = 1e-3,
    exploration: float = 0.8,
    seed: int = 0,
    progress: bool | None = None,
) -> dict[str, Tensor]:
    r"""Draws from the posterior of the weights by Langevin dynamics with a cyclical step.

    .. math:: w \leftarrow w + \epsilon \nabla \frac1N \log p(w, \mathcal D)
        + \sqrt{2 \epsilon / N}\, \xi, \qquad
        \epsilon_k = \frac{\epsilon_0}2 \Big[\cos\Big(\pi \frac{k \bmod M}{M}\Big) + 1\Big]

    with the gradient of a mini-batch (Welling and Teh 2011) and M steps a cycle (Zhang et al.
    2020, Eq. 1). The first part of a cycle explores, without noise; draws are taken evenly over
    its rest. With smaller steps the draws follow the posterior more exactly and are more
    correlated.

    Args:
        mll: The objective, whose :meth:`~gpclml.mlls.LaplaceMarginalLogLikelihood.log_joint` is
            the density; its hyperparameters stay fixed. The network ends with the last weights.
        train_x: Points, ``(N, *event)``; or a ``DataLoader`` of pairs of points and targets.
        train_y: Their targets; None with a loader.
        count: Number S of draws, a multiple of the cycles.
        cycles: Number of cycles.
        epochs_per_cycle: Passes over the data in a cycle.
        batch_size: Points of a batch of tensors; all if None.
        lr: The largest step :math:`\epsilon_0`, per point: N times what it is for the total.
        exploration: Share of a cycle that explores, from which no draw is taken.
        seed: Seed of the batches and the noise.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        Weights by name, ``(S, *shape)``.

    Raises:
        ArgumentError: A number is out of range, ``num_data`` is another, or a loader gives
            nothing or no pairs.
        ShapeError: The numbers of points and targets differ.
        NonFiniteError: Data are not finite, or the weights diverged.
    """
    check_counts(
        count=count, cycles=cycles, epochs_per_cycle=epochs_per_cycle, batch_size=batch_size
    )
    check_positive(lr=lr)
    if not 0 <= exploration < 1:
        raise ArgumentError("exploration", exploration, "at least 0 and below 1")
    generator = seeded(seed)
    device = next(iter(cast(LinearizedNetwork, mll.model).network.parameters())).device
    data = TrainingBatches(
        train_x, train_y, mll.num_data, batch_size=batch_size, generator=generator, device=device
    )
    steps = epochs_per_cycle * len(data)
    if count % cycles or count // cycles > steps - round(exploration * steps):
        most = steps - round(exploration * steps)
        expected = f"a multiple of {cycles} cycles, at most {most} for each"
        raise ArgumentError("count", count, expected, "Take more epochs a cycle, or batches.")
    network = cast(LinearizedNetwork, mll.model).network
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    per_cycle, first = count // cycles, round(exploration * steps)
    kept = {steps - 1 - ((steps - first) * i) // per_cycle for i in range(per_cycle)}
    batches = itertools.chain.from_iterable(itertools.repeat(data))  # a pass after the other
    draws: list[dict[str, Tensor]] = []
    with progress_bar(total=cycles * steps, desc="SGLD", progress=progress) as bar:
        for k in itertools.chain.from_iterable(itertools.repeat(range(steps), cycles)):
            step = lr / 2 * (math.cos(math.pi * k / steps) + 1)
            x, y = next(batches)
            value = mll.log_joint(cast(LinearizedNetwork, mll.model)(x), y)
            gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
            deviation = math.sqrt(2 * step / mll.num_data) if k >= first else 0.0
            with torch.no_grad():
                for p, gradient in zip(trained.values(), gradients, strict=True):
                    if gradient is not None:
                        p.add_(gradient, alpha=step)
                    if deviation:
                        p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=deviation)
            if k in kept:
                draws.append({name: p.detach().clone() for name, p in trained.items()})
                for name, values in draws[-1].items():
                    if not all_finite(values):
                        raise NonFiniteError("weights", name, "finite values", "Lower lr.")
            bar.update()
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


@checked
def rescaled(
    weights: Mapping[str, Tensor], scale: float, center: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Scales draws around their center, so that their covariance is multiplied by a number.

    Args:
        weights: Draws by name, ``(S, *shape)``.
        scale: The number.
        center: Weights that the draws are scaled around, by name; their mean if None.

    Returns:
        The scaled draws.

    Raises:
        ArgumentError: The scale is negative, or the center has other names.
        ShapeError: A center has another shape than the draws.
    """
    if not 0 <= scale < math.inf:
        raise ArgumentError("scale", scale, "a number of at least 0")
    if center is not None and center.keys() != weights.keys():
        expected = f"{', '.join(weights)}, as the draws"
        raise ArgumentError("center", ", ".join(center) or "nothing", expected)
    made = {}
    for name, draws in weights.items():
        if not draws.is_floating_point() or draws.ndim == 0 or len(draws) == 0:
            got = f"{draws.dtype} of shape {tuple(draws.shape)}"
            raise ShapeError(f"weights[{name!r}]", got, "real numbers (S, *shape)")
        middle = draws.mean(0) if center is None else center[name]
        check_placement(f"center[{name!r}]", middle, draws, "the draws")
        if middle.shape != draws.shape[1:]:
            expected = f"{tuple(draws.shape[1:])}, as each draw"
            raise ShapeError(f"center[{name!r}]", tuple(middle.shape), expected)
        made[name] = middle + scale**0.5 * (draws - middle)
    return made


@torch.no_grad()
@checked(passes_on="x", x="(N, *event)")
def sampled_outputs(network: torch.nn.Module, weights: Weights, x: Points) -> Tensor:
    """The network's outputs with each draw of weights in turn.

    The weights of an ensemble of networks, ``torch.func.stack_module_state(networks)[0]``, are
    draws that explore modes where a Laplace posterior explores one (Lakshminarayanan et al. 2017).

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``; parameters without draws keep their values.
        weights: Draws by name, ``(S, *shape)``, as
            :meth:`gpclml.mlls.LaplaceEvidence.sample_weights` gives them.
        x: Points, ``(N, *event)``; or a ``DataLoader`` of points, or of pairs that begin with
            them.

    Returns:
        Outputs, ``(S, N, C)``.

    Raises:
        ShapeError: The draws' names or shapes are not those of the network's parameters.
        ModelModeError: Dropout or batch normalization is in train mode.
    """
    _check_weights(network, weights)
    check_mode(network)
    if not isinstance(x, Tensor):
        return torch.cat(
            [sampled_outputs(network, weights, part) for part in _parts(network, x)], 1
        )
    count = len(next(iter(weights.values())))
    draws = ({name: values[s] for name, values in weights.items()} for s in range(count))
    return torch.stack([call_with(network, draw, x) for draw in draws])


@torch.no_grad()
@checked(passes_on="x", x="(N, *event)")
def linearized_outputs(network: torch.nn.Module, weights: Weights, x: Points) -> Tensor:
    r"""Outputs of the network made linear around its weights, :math:`f + J (w - w_*)`.

    The Gauss-Newton Laplace posterior is that of the linear model (Immer et al. 2021), in which
    draws far from the mode do not leave the region where the curvature holds.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``, with the weights around which it is linear.
        weights: Draws by name, ``(S, *shape)``.
        x: As for :func:`sampled_outputs`, as are errors.

    Returns:
        Outputs, ``(S, N, C)``.

    Note:
        By the gradients of all C outputs at each point, which all draws share; of no more draws
        than outputs by a derivative for each draw.
    """
    _check_weights(network, weights)
    check_mode(network)
    if not isinstance(x, Tensor):
        parts = _parts(network, x)
        return torch.cat([linearized_outputs(network, weights, part) for part in parts], 1)
    outputs = call_with(network, {}, x)
    away = {name: draws - network.get_parameter(name) for name, draws in weights.items()}
    frozen = not all(network.get_parameter(name).requires_grad for name in weights)
    if frozen or len(next(iter(away.values()))) <= outputs.shape[-1]:
        try:
            return outputs + _changes_by_draw(network, away, x)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a layer whose gradients have no derivative
            if frozen:
                raise
    return outputs + _changes_by_output(network, away, x, outputs.shape[-1])


def _parts(network: torch.nn.Module, x: Points) -> Iterator[Tensor]:
    return points_of("x", x, _POINTS, next(iter(network.parameters())).device)


def _changes_by_draw(network: torch.nn.Module, away: Weights, x: Tensor) -> Tensor:
    """J times each change of weights, ``(S, N, C)``: gradients Jᵀu differentiated in u."""
    count = len(next(iter(away.values())))
    center = {name: network.get_parameter(name).detach().requires_grad_() for name in away}
    with torch.enable_grad(), twice_differentiable(network):
        outputs = call_with(network, center, x)
        if not outputs.requires_grad:
            return outputs.new_zeros(count, *outputs.shape)
        u = torch.zeros_like(outputs, requires_grad=True)
        found = torch.autograd.grad(
            outputs, list(center.values()), u, create_graph=True, allow_unused=True
        )
        gradients = {name: g for name, g in zip(away, found, strict=True) if g is not None}
        changes = []
        for s in range(count):
            draw = [away[name][s] for name in gradients]
            changes += torch.autograd.grad(list(gradients.values()), u, draw, retain_graph=True)
    return torch.stack(changes)


def _changes_by_output(
    network: torch.nn.Module, away: Weights, x: Tensor, num_outputs: int
) -> Tensor:
    """J times each change of weights, ``(S, N, C)``, from the gradients of all outputs."""
    few = output_gradients(network, x[:2], num_outputs)
    # Numbers in memory for a point: gradients, or of plain layers what draws make of its inputs.
    numbers = sum(
        len(draws) * rows.gradients.shape[-1]
        if isinstance(rows, OuterProducts)
        else rows[0].numel()
        for rows, draws in ((few[name], draws) for name, draws in away.items())
    )
    chunks = []
    for points in x.split(max(2, _NUMBERS // numbers)):
        gradients = output_gradients(network, points, num_outputs)
        changes = []
        for name, draws in away.items():
            rows = gradients[name]
            if isinstance(rows, OuterProducts):
                moved = torch.einsum("soi,ni->nso", draws.flatten(2), rows.inputs.flatten(1))
                changes.append(torch.einsum("nco,nso->snc", rows.gradients, moved))
            else:
                changes.append(torch.einsum("ncp,sp->snc", rows.flatten(2), draws.flatten(1)))
        chunks.append(torch.stack(changes).sum(0))
    return torch.cat(chunks, 1)


def _check_weights(network: torch.nn.Module, weights: Weights) -> None:
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    if not weights:
        raise ShapeError("weights", "no parameter", f"draws of {', '.join(shapes)}")
    for name, value in weights.items():
        if tuple(value.shape[1:]) != shapes.get(name):
            expected = f"draws of {', '.join(shapes)}"
            if name in shapes:
                expected = f"(S, {', '.join(map(str, shapes[name]))})"
            raise ShapeError("weights", f"{name} of shape {tuple(value.shape)}", expected)
    counts = {name: len(value) for name, value in weights.items()}
    if len(set(counts.values())) > 1:
        raise ShapeError("weights", f"numbers of draws {counts}", "the same number of each")
