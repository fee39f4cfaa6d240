"""Regression networks trained in one stack, with hyperparameters learned online or fixed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from gpclml.curvature import Diagonal, Full, GaussianWeightPrior, Kronecker
from gpclml.kernels.networks import MLP, StackedNetwork
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = ["Networks", "objective", "train_fixed", "train_online"]

_WIDTH, _RATES, _BURN_IN = 50, (1e-2, 1e-5), 100
_ROWS_AT_ONCE = 8192  # of all networks of a product: 50 activations of each stay in the cache


class Networks:
    """Networks [D, 50, 1] of several data sets of one size, trained in one stack.

    Args:
        seeds: Of their starts.
        x: Points, ``(k, n, d)``.
        y: Targets, ``(k, n)``.
        epochs: Number of epochs that the learning rate falls over, from .01 to 1e-5.
        activation: Class of the module after the hidden layer.
    """

    def __init__(
        self, seeds: Sequence[int], x: Tensor, y: Tensor, epochs: int,
        activation: Callable[[], torch.nn.Module] = torch.nn.ReLU,
    ) -> None:  # fmt: skip
        to, generator = torch.get_default_dtype(), lambda seed: torch.Generator().manual_seed(seed)
        self.activation = activation()
        self.x, self.y, self.epochs = x.to(to), y.to(to), epochs
        self.single = [
            MLP([x.shape[-1], _WIDTH, 1], activation, generator=generator(seed)) for seed in seeds
        ]
        stack = StackedNetwork(self.single)
        self.names, self.weights = zip(*stack.named_stacks(), strict=True)
        for place, network in enumerate(self.single):  # whose weights are then those of the stack
            for name, weight in zip(self.names, self.weights, strict=True):
                network.get_parameter(name).data = weight.data[place]
        self.adam = torch.optim.Adam(self.weights, lr=_RATES[0], fused=True)

    def outputs(self, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """Of network i at member i of the points, ``(k, n)``; by default of all networks."""
        # products of batches are faster than a mapped network
        w, b, v, c = self.weights if weights is None else weights
        hidden = self.activation(torch.baddbmm(b.unsqueeze(1), x, w.mT))
        return torch.baddbmm(c.unsqueeze(1), hidden, v.mT).squeeze(-1)

    def epoch(self, done: int, noise: Tensor, precisions: Tensor) -> Tensor:
        """A step on all points; gives mean squared errors before it, ``(k,)``.

        Args:
            done: Number of epochs before.
            noise: Variances, ``(k,)``.
            precisions: Of each tensor, ``(k, 4)``.
        """
        first, last = _RATES
        along = 0.5 + 0.5 * math.cos(math.pi * done / max(self.epochs - 1, 1))
        self.adam.param_groups[0]["lr"] = last + (first - last) * along
        k, n = self.y.shape
        errors = torch.empty_like(noise)
        for weight in self.weights:
            weight.grad = torch.empty_like(weight)
        size = max(1, _ROWS_AT_ONCE // n)
        for some in (slice(start, start + size) for start in range(0, k, size)):
            weights = [weight[some] for weight in self.weights]
            error = (self.outputs(self.x[some], weights) - self.y[some]).square().sum(1)
            squares = torch.stack([w.square().flatten(1).sum(1) for w in weights], -1)
            loss = error / noise[some] + (precisions[some] * squares).sum(-1)
            found = torch.autograd.grad(loss.sum() / (2 * n), weights)
            for weight, gradient in zip(self.weights, found, strict=True):
                cast(Tensor, weight.grad)[some] = gradient
            errors[some] = error.detach()
        self.adam.step()
        return errors / n


def objective(
    network: torch.nn.Module,
    num_data: int,
    method: str = "full",
    by: Literal["network", "parameter"] = "parameter",
    precision: float = 1.0,
    noise: float = 1.0,
) -> LaplaceMarginalLogLikelihood:
    """The evidence by the ``"full"`` GGN, ``"kronecker"``, ``"diagonal"``, or the full ``"ef"``."""
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(1e-7))
    likelihood.noise = noise
    model = LinearizedNetwork(network, GaussianWeightPrior(network, by, precision))
    hessian = cast(Literal["ggn", "ef"], "ef" if method == "ef" else "ggn")
    structure = {"kronecker": Kronecker, "diagonal": Diagonal}.get(method, Full)()
    return LaplaceMarginalLogLikelihood(likelihood, model, num_data, structure, hessian=hessian)


def train_online(
    networks: Networks, mlls: Sequence[LaplaceMarginalLogLikelihood], every: int = 50
) -> list[list[float]]:
    """Trains weights on all points, and hyperparameters on the evidence now and then.

    After 100 epochs and then every so many, precisions and noise of each network make a step of
    Adam at rate .1 on its evidence. Each is kept as it was at its largest.

    Returns:
        The evidence of each network before these steps, in nats a point.
    """
    hyper = [
        torch.optim.Adam([cast(Any, mll.model).prior.log_precision,
                          *cast(Any, mll.likelihood).parameters()], lr=0.1)
        for mll in mlls
    ]  # fmt: skip
    best: list[Any] = [None] * len(mlls)
    found: list[list[float]] = [[] for _ in mlls]
    noise, precisions = _hyperparameters(networks, mlls)
    for done in range(networks.epochs):
        networks.epoch(done, noise, precisions)
        epoch = done + 1
        if (epoch < _BURN_IN or epoch % every) and epoch < networks.epochs:
            continue
        for k, mll in enumerate(mlls):
            value = mll.evidence_of(networks.x[k], networks.y[k])()
            found[k].append(float(value.detach()))
            if found[k][-1] >= max(found[k]):
                best[k] = copy.deepcopy(mll.state_dict())
            hyper[k].zero_grad()
            (-value).backward()
            hyper[k].step()
        noise, precisions = _hyperparameters(networks, mlls)
    for mll, state in zip(mlls, best, strict=True):
        mll.load_state_dict(state)
    return found


@torch.no_grad()
def _hyperparameters(
    networks: Networks, mlls: Sequence[LaplaceMarginalLogLikelihood]
) -> tuple[Tensor, Tensor]:
    noise = torch.cat([cast(Any, mll.likelihood).noise.reshape(1) for mll in mlls])
    precisions = [cast(Any, mll.model).prior.precisions() for mll in mlls]
    return noise, torch.stack([torch.stack([p[n] for n in networks.names]) for p in precisions])


def train_fixed(
    networks: Networks, precisions: Sequence[float], noise: Sequence[float] | None = None
) -> list[float]:
    """Trains weights under one precision each.

    Args:
        networks: Trained in place.
        precisions: Of all weights of each network.
        noise: Variance of each; if None, its mean squared error at every tenth epoch.

    Returns:
        The variances at the end.
    """
    by_tensor = torch.tensor(precisions).unsqueeze(-1).expand(-1, len(networks.names))
    variances = torch.ones(len(precisions)) if noise is None else torch.tensor(noise)
    for done in range(networks.epochs):
        errors = networks.epoch(done, variances, by_tensor)
        if noise is None and done >= _BURN_IN and done % 10 == 0:
            variances = errors.clamp(min=1e-6)
    return variances.tolist()
