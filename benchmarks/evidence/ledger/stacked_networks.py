"""Regression networks trained in one stack, with hyperparameters learned online or fixed."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from gpclml.curvature import (
    Diagonal,
    Full,
    FunctionSpace,
    GaussianWeightPrior,
    Kronecker,
    output_gradients,
)
from gpclml.kernels.networks import MLP, StackedNetwork
from gpclml.mlls import LaplaceEvidence, LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

_WIDTH, _RATES, _BURN_IN = 50, (1e-2, 1e-5), 100
_ROWS_AT_ONCE = 8192  # of all networks of a product: 50 activations of each stay in the cache


class Networks:
    """Networks [D, 50, 1] of several data sets of one size, trained in one stack.

    Weights are trained in the default dtype. Evidences are taken in float64, since the curvature
    of a precise network is singular to rounding in float32.

    Attributes:
        single: The networks in float64, with the weights of the last :meth:`copy_weights`.
        x: The points, float64.
        y: Their targets.

    Args:
        seeds: Of their starts.
        x: Points, ``(k, n, d)``.
        y: Targets, ``(k, n)``.
        epochs: Number of epochs that the learning rate falls over.
        batch_size: Points at most of a step; all if None.
        rates: Learning rates of the first epoch and the last.
    """

    def __init__(
        self, seeds: Sequence[int], x: Tensor, y: Tensor, epochs: int,
        batch_size: int | None = None, rates: tuple[float, float] = _RATES,
    ) -> None:  # fmt: skip
        to, generator = torch.get_default_dtype(), lambda seed: torch.Generator().manual_seed(seed)
        self.epochs, self.batch_size, self.rates = epochs, batch_size, rates
        self.x, self.y = x.double(), y.double()
        self._points = x.to(to), y.to(to)
        sizes = [x.shape[-1], _WIDTH, 1]
        self.single = [MLP(sizes, generator=generator(seed)) for seed in seeds]
        # One batched product trains all networks, far faster than one after another.
        stack = StackedNetwork(self.single)
        self.names, self.weights = zip(*stack.named_stacks(), strict=True)
        self.adam = torch.optim.Adam(self.weights, lr=rates[0], fused=True)
        self._order = generator(0)
        for network in self.single:
            network.double()

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Gives the single networks the weights as they are."""
        for index, network in enumerate(self.single):
            for name, weight in zip(self.names, self.weights, strict=True):
                network.get_parameter(name).copy_(weight[index])

    def outputs(self, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """Of network i at member i of the points, ``(k, n)``; by default of all networks."""
        # products of batches are faster than a mapped network
        w, b, v, c = self.weights if weights is None else weights
        hidden = torch.baddbmm(b.unsqueeze(1), x, w.mT).relu()
        return torch.baddbmm(c.unsqueeze(1), hidden, v.mT).squeeze(-1)

    def epoch(self, done: int, noise: Tensor, precisions: Tensor) -> Tensor:
        """A pass over the points, in one step or in batches of a random order.

        Args:
            done: Number of epochs before.
            noise: Variances, ``(k,)``.
            precisions: Of each tensor, ``(k, 4)``.

        Returns:
            Mean squared errors before each step, ``(k,)``.
        """
        first, last = self.rates
        # From one to zero along half a cosine.
        along = 0.5 + 0.5 * math.cos(math.pi * done / max(self.epochs - 1, 1))
        self.adam.param_groups[0]["lr"] = last + (first - last) * along
        (x, y), n = self._points, self.y.shape[1]
        if self.batch_size is None:
            return self._step(x, y, noise, precisions) / n
        errors, count = torch.zeros_like(noise), math.ceil(n / self.batch_size)
        for rows in torch.randperm(n, generator=self._order).chunk(count):
            errors += self._step(x.index_select(1, rows), y[:, rows], noise, precisions)
        return errors / n

    def _step(self, x: Tensor, y: Tensor, noise: Tensor, precisions: Tensor) -> Tensor:
        """A step on a batch; gives the sums of squared errors before it."""
        k, b = y.shape
        share = b / self.y.shape[1]  # of the prior in a batch
        errors = torch.empty_like(noise)
        for weight in self.weights:
            weight.grad = torch.empty_like(weight)
        size = max(1, _ROWS_AT_ONCE // b)
        for some in (slice(start, start + size) for start in range(0, k, size)):
            weights = [weight[some] for weight in self.weights]
            error = (self.outputs(x[some], weights) - y[some]).square().sum(1)
            squares = torch.stack([w.square().flatten(1).sum(1) for w in weights], -1)
            loss = error / noise[some] + share * (precisions[some] * squares).sum(-1)
            gradients = torch.autograd.grad(loss.sum() / (2 * b), weights)
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad[some] = gradient
            # Before the step: they are the residuals of weights that made the gradients.
            errors[some] = error.detach()
        self.adam.step()
        return errors


def objective(
    network: torch.nn.Module,
    num_data: int,
    method: str = "full",
    by: Literal["network", "parameter"] = "parameter",
    precision: float = 1.0,
    noise: float = 1.0,
) -> LaplaceMarginalLogLikelihood:
    """The evidence by a curvature.

    It is the ``"full"`` GGN, ``"kronecker"``, ``"diagonal"``, or the full ``"ef"``; ``"kernel"`` is
    the full GGN from inner products of points, faster where there are fewer points than weights.
    """
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(1e-7))
    likelihood.to(next(network.parameters())).noise = noise
    model = LinearizedNetwork(network, GaussianWeightPrior(network, by, precision))
    hessian = "ef" if method == "ef" else "ggn"
    structures = {"kronecker": Kronecker, "diagonal": Diagonal, "kernel": FunctionSpace}
    structure = structures.get(method, Full)()
    return LaplaceMarginalLogLikelihood(likelihood, model, num_data, structure, hessian=hessian)


def function_variance(
    mll: LaplaceMarginalLogLikelihood, evidence: LaplaceEvidence, x: Tensor
) -> Tensor:
    """Variance of the linearized network at points under the posterior, ``(n,)``."""
    # The precision of the likelihood, by which the GGN is multiplied.
    scale = float(torch.as_tensor(evidence.curvature_scale()).detach())
    precisions = {name: p.detach() for name, p in mll.model.prior.precisions().items()}
    covariance = evidence.curvature.output_covariance(precisions, scale)
    return covariance(output_gradients(mll.model.network, x)).flatten()


def train_online(
    networks: Networks, mlls: Sequence[LaplaceMarginalLogLikelihood], cell: Mapping[str, Any]
) -> list[list[float]]:
    """Trains weights, and hyperparameters on the evidence of all points now and then.

    From the epoch that ends the ``burn_in``, ``every`` so many, precisions and noise of each
    network make a step of Adam, at its ``rate``, on its evidence. Each is kept as it was at its
    largest. Where the cell does not say, these are 100, 50 and .1.

    Returns:
        The evidence of each network before these steps, in nats a point.
    """
    every, burn_in = cell.get("every", 50), cell.get("burn_in", _BURN_IN)
    groups = [[mll.model.prior.log_precision, *mll.likelihood.parameters()] for mll in mlls]
    hyper = [torch.optim.Adam(group, lr=cell.get("rate", 0.1)) for group in groups]
    best: list[Any] = [None] * len(mlls)
    history: list[list[float]] = [[] for _ in mlls]
    noise, precisions = _hyperparameters(networks, mlls)
    for done in range(networks.epochs):
        networks.epoch(done, noise, precisions)
        epoch = done + 1
        # Evidences cost far more than epochs; the last one is always taken.
        if (epoch < burn_in or epoch % every) and epoch < networks.epochs:
            continue
        networks.copy_weights()
        for k, mll in enumerate(mlls):
            value = mll.evidence_of(networks.x[k], networks.y[k])()
            history[k].append(float(value.detach()))
            # The state has the weights too, which fit these hyperparameters.
            if history[k][-1] >= max(history[k]):
                best[k] = copy.deepcopy(mll.state_dict())
            hyper[k].zero_grad()
            (-value).backward()
            hyper[k].step()
        noise, precisions = _hyperparameters(networks, mlls)
    for mll, state in zip(mlls, best, strict=True):
        mll.load_state_dict(state)
    return history


@torch.no_grad()
def _hyperparameters(
    networks: Networks, mlls: Sequence[LaplaceMarginalLogLikelihood]
) -> tuple[Tensor, Tensor]:
    noise = torch.cat([mll.likelihood.noise.reshape(1) for mll in mlls])
    priors = [mll.model.prior.precisions() for mll in mlls]
    precisions = torch.stack([torch.stack([p[n] for n in networks.names]) for p in priors])
    return noise.to(networks.weights[0]), precisions.to(networks.weights[0])


def train_fixed(networks: Networks, precisions: Sequence[float]) -> list[float]:
    """Trains weights under one precision each; gives noise variances, as the errors have them.

    Args:
        networks: Trained in place.
        precisions: Of all weights of each network.

    Returns:
        The mean squared error of each at the last of every tenth epoch.
    """
    tensor_precisions = torch.tensor(precisions).unsqueeze(-1).expand(-1, len(networks.names))
    variances = torch.ones(len(precisions))
    for done in range(networks.epochs):
        errors = networks.epoch(done, variances, tensor_precisions)
        if done >= _BURN_IN and done % 10 == 0:
            # A network that fits every point would have no noise.
            variances = errors.clamp(min=1e-6)
    networks.copy_weights()
    return variances.tolist()
