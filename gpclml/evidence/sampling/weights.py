"""Draws of a network's weights, by Langevin dynamics or an ensemble, and its outputs at them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

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
from gpclml.curvature import sample_gradients
from gpclml.curvature.structure import (
    call_with,
    check_mode,
    differing,
    probe_weights,
    twice_differentiable,
)
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = [
    "linearized_outputs",
    "rescaled",
    "sample_sgld",
    "sampled_outputs",
    "stacked_weights",
]

Weights = Mapping[str, Tensor]
_NUMBERS = 2**24  # of gradients in memory at a time
_POINTS = 256  # of a loader at a time
_BUSY = 64  # points that keep a CPU busy, where draws side by side only need more memory


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
    chain = _Chain(mll, data, generator)
    per_cycle = count // cycles
    first = round(exploration * steps)
    kept = {steps - 1 - ((steps - first) * i) // per_cycle for i in range(per_cycle)}
    draws: list[dict[str, Tensor]] = []
    with progress_bar(total=cycles * steps, desc="SGLD", progress=progress) as bar:
        for _ in range(cycles):
            for k in range(steps):
                chain.step(lr / 2 * (math.cos(math.pi * k / steps) + 1), noise=k >= first)
                if k in kept:
                    draws.append(chain.weights())
                bar.update()
    return {name: torch.stack([one[name] for one in draws]) for name in draws[0]}


@checked
def stacked_weights(networks: Iterable[torch.nn.Module]) -> dict[str, Tensor]:
    """The weights of an ensemble of networks of one architecture, as draws.

    Networks that were trained from different starts explore modes where a Laplace posterior
    explores one (Lakshminarayanan et al. 2017).

    Args:
        networks: The S members.

    Returns:
        Trained parameters by name, ``(S, *shape)``.

    Raises:
        ArgumentError: There is no network.
        ShapeError: Their parameters differ in names or shapes.
    """
    members = [
        {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
        for network in networks
    ]
    if not members:
        raise ArgumentError("networks", "none", "at least one")
    shapes = [{name: tuple(p.shape) for name, p in member.items()} for member in members]
    for other in shapes[1:]:
        if other != shapes[0]:
            raise ShapeError("networks", other, f"{shapes[0]}, as the first")
    return {name: torch.stack([member[name] for member in members]) for name in members[0]}


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
def sampled_outputs(
    network: torch.nn.Module, weights: Weights, x: Points, at_once: int = 20
) -> Tensor:
    """The network's outputs with each draw of weights in turn.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``; parameters without draws keep their values.
        weights: Draws by name, ``(S, *shape)``, as
            :meth:`gpclml.mlls.LaplaceEvidence.sample_weights` gives them.
        x: Points, ``(N, *event)``; or a ``DataLoader`` of points, or of pairs that begin with
            them.
        at_once: Draws in memory at a time, if they are not taken one by one, as on a CPU with 64
            points or more.

    Returns:
        Outputs, ``(S, N, C)``.

    Raises:
        ShapeError: The draws' names or shapes are not those of the network's parameters.
        ModelModeError: Dropout or batch normalization is in train mode.
    """
    _check_weights(network, weights)
    check_mode(network)
    if not isinstance(x, Tensor):
        parts = _loaded(network, x)
        return torch.cat([sampled_outputs(network, weights, one, at_once) for one in parts], 1)

    def of_one(values: dict[str, Tensor]) -> Tensor:
        return call_with(network, values, x)

    expected = of_one(_draw(weights, 0))
    if expected.device.type != "cpu" or len(expected) < _BUSY:
        made = _by_vmap(of_one, weights, at_once)
        if made is not None and not differing({"outputs": made[0]}, {"outputs": expected}):
            return made
    count = len(next(iter(weights.values())))
    return torch.stack([expected, *(of_one(_draw(weights, s)) for s in range(1, count))])


@torch.no_grad()
@checked(passes_on="x", x="(N, *event)")
def linearized_outputs(
    network: torch.nn.Module, weights: Weights, x: Points, at_once: int = 20
) -> Tensor:
    r"""Outputs of the network made linear around its weights, :math:`f + J (w - w_*)`.

    The Gauss-Newton Laplace posterior is that of the linear model (Immer et al. 2021), in which
    draws far from the mode do not leave the region where the curvature holds.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``, with the weights around which it is linear.
        weights: Draws by name, ``(S, *shape)``.
        x: As for :func:`sampled_outputs`, as are errors.
        at_once: Draws in memory at a time.

    Returns:
        Outputs, ``(S, N, C)``.

    Note:
        By a forward-mode derivative for each draw, or, where that takes fewer operations, by the
        gradients of all C outputs at each point, which all draws share: convolutional networks
        with more draws than outputs.
    """
    _check_weights(network, weights)
    check_mode(network)
    if not isinstance(x, Tensor):
        parts = _loaded(network, x)
        return torch.cat([linearized_outputs(network, weights, one, at_once) for one in parts], 1)
    if _gradients_are_cheaper(network, weights, x):
        return _by_gradients(network, weights, x)
    center = {name: network.get_parameter(name).detach() for name in weights}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        return call_with(network, values, x)

    def of_one(values: dict[str, Tensor]) -> Tensor:
        away = {name: value - center[name] for name, value in values.items()}
        both = jvp(outputs, (center,), (away,))
        return both[0] + both[1]

    made = _by_vmap(of_one, weights, at_once)
    if made is not None and _is_linear(network, made[0], _draw(weights, 0), x):
        return made
    return _by_gradients(network, weights, x)


def _loaded(network: torch.nn.Module, x: Points) -> Iterator[Tensor]:
    return points_of("x", x, _POINTS, next(iter(network.parameters())).device)


def _draw(weights: Weights, place: int) -> dict[str, Tensor]:
    return {name: draws[place] for name, draws in weights.items()}


def _by_vmap(
    of_one: Callable[[dict[str, Tensor]], Tensor], weights: Weights, at_once: int
) -> Tensor | None:
    """Outputs for all draws; None where a module has no rule for it, as recurrent layers."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            return vmap(of_one, chunk_size=at_once)(dict(weights))
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None


def _gradients_are_cheaper(network: torch.nn.Module, weights: Weights, x: Tensor) -> bool:
    """Whether gradients of all outputs take fewer operations than derivatives along all draws.

    A derivative along a draw takes two passes through the network, a gradient two passes and a
    product with each draw, which is the smaller part if weights are used at many positions.
    """
    draws = len(next(iter(weights.values())))
    trained = all(network.get_parameter(name).requires_grad for name in weights)
    if draws < 2 or not trained or not len(x):
        return False
    with FlopCounterMode(display=False) as counter:
        outputs = call_with(network, {}, x[:1])
    forward = counter.get_total_flops()
    products = sum(one.numel() for one in weights.values())
    return outputs.shape[-1] * (forward + products) < draws * forward


def _is_linear(
    network: torch.nn.Module, found: Tensor, values: dict[str, Tensor], x: Tensor
) -> bool:
    """Whether outputs are those by the gradients that curvature is made of, in one direction.

    Forward-mode derivatives go through what stops a gradient.
    """
    center = {name: network.get_parameter(name).detach() for name in values}
    leaves = {name: one.clone().requires_grad_() for name, one in center.items()}
    with torch.enable_grad(), twice_differentiable(network):
        outputs = call_with(network, leaves, x)
    u = probe_weights(outputs)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), u, materialize_grads=True)
    expected = torch.stack([
        (gradient * (values[name] - center[name])).sum()
        for name, gradient in zip(leaves, gradients, strict=True)
    ]).sum()  # fmt: skip
    away = (found - outputs.detach()) * u
    # Both are sums in which terms cancel, so that rounding is relative to the terms.
    return float((away.sum() - expected).abs()) <= 1e-3 * (1e-6 + float(away.norm()))


def _by_gradients(network: torch.nn.Module, weights: Weights, x: Tensor) -> Tensor:
    """Linear outputs by the gradients at single points, N C P numbers of some points at a time."""
    outputs = call_with(network, {}, x)
    eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)

    def columns(values: Tensor) -> Tensor:
        return eye.expand(len(values), *eye.shape)

    away = [
        (draws - network.get_parameter(name)).reshape(len(draws), -1)
        for name, draws in weights.items()
    ]
    size = max(1, _NUMBERS // (outputs.shape[-1] * sum(one.shape[1] for one in away)))
    parts = []
    for some in x.split(size):
        rows = sample_gradients(network, some, columns, list(weights))
        flat = [rows[name].reshape(*rows[name].shape[:2], -1) for name in weights]
        products = [torch.einsum("ncp,sp->snc", *pair) for pair in zip(flat, away, strict=True)]
        parts.append(torch.stack(products).sum(0))
    return outputs + torch.cat(parts, dim=1)


class _Chain:
    """Langevin dynamics of the weights of a network, a mini-batch a step."""

    def __init__(
        self, mll: LaplaceMarginalLogLikelihood, data: TrainingBatches, generator: torch.Generator
    ) -> None:
        self._mll, self._data, self._generator = mll, data, generator
        self._model = cast(LinearizedNetwork, mll.model)
        self._trained = {n: p for n, p in self._model.network.named_parameters() if p.requires_grad}
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def step(self, step: float, noise: bool) -> None:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._data)
            batch = next(self._batches)
        value = self._mll.log_joint(self._model(batch[0]), batch[1])
        weights = list(self._trained.values())
        gradients = torch.autograd.grad(value, weights, allow_unused=True)
        deviation = math.sqrt(2 * step / self._mll.num_data) if noise else 0.0
        with torch.no_grad():
            for p, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    p.add_(gradient, alpha=step)
                if noise:
                    p.add_(torch.randn(p.shape, generator=self._generator).to(p), alpha=deviation)

    def weights(self) -> dict[str, Tensor]:
        draw = {name: p.detach().clone() for name, p in self._trained.items()}
        for name, value in draw.items():
            if not all_finite(value):
                raise NonFiniteError("weights", name, "finite values", "Lower lr.")
        return draw


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
