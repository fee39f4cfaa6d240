"""Kernel and mean of a network that is linear in its weights."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.means import Mean
from torch import Tensor
from torch.func import functional_call, jvp
from typing_extensions import override

from gpclml._utils.arguments import checked
from gpclml.curvature import GaussianWeightPrior, sample_gradients
from gpclml.errors import ShapeError, UnsupportedError
from gpclml.kernels.features import JointKernel, once_if_equal

__all__ = [
    "LinearizedMean",
    "NeuralTangentKernel",
]


class NeuralTangentKernel(JointKernel):
    r"""Neural tangent kernel: inner products of a network's gradients under a prior of weights.

    .. math:: k(x, x') = J_{w_*}(x) \, P_0^{-1} J_{w_*}(x')^\top

    (Jacot et al. 2018; Immer et al. 2021, Section 2). With :class:`LinearizedMean` as mean it
    makes the linearized network a GP. It is differentiable in the prior precisions and in the
    points, not in the weights. Points in a batch and networks of several outputs are refused.

    Args:
        network: Maps ``(N, *event)`` to ``(N, 1)``, each point independently.
        prior: Prior over its trainable parameters.

    Examples:
        >>> kernel = NeuralTangentKernel(network, GaussianWeightPrior(network))
    """

    @checked
    def __init__(self, network: torch.nn.Module, prior: GaussianWeightPrior) -> None:
        super().__init__()
        self.network = network
        self.prior = prior

    @override
    def _covariances(self, x1: Tensor, x2: Tensor, diag: bool, **params: Any) -> Tensor:
        first, second = once_if_equal(self._rows, x1, x2)
        return (first * second).sum(-1) if diag else first @ second.mT

    def _rows(self, x: Tensor) -> Tensor:
        """Gradients divided by the roots of the prior precisions, ``(n, P)``."""
        if x.ndim != 2:
            raise UnsupportedError("x", f"shape {tuple(x.shape)}", "points (n, d), no batch")
        gradients = sample_gradients(self.network, x, _only_output)
        parts = [
            gradients[name][:, 0].reshape(len(x), -1) * precision.rsqrt()
            for name, precision in self.prior.precisions().items()
        ]
        return torch.cat(parts, dim=-1)


class LinearizedMean(Mean):
    r"""Mean of the linearized network under a prior of mean zero, :math:`f(x; w_*) - J(x) w_*`.

    It is not differentiable in the weights.

    Args:
        network: Maps ``(N, *event)`` to ``(N, 1)``.
    """

    @checked
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The mean at points, ``(n, d)`` to ``(n,)``."""
        weights = {k: p.detach() for k, p in self.network.named_parameters() if p.requires_grad}
        both = jvp(
            lambda parameters: functional_call(self.network, parameters, (x,)),
            (weights,),
            (weights,),
        )
        return (both[0] - both[1]).squeeze(-1)


def _only_output(outputs: Tensor) -> Tensor:
    if outputs.shape[-1] != 1:
        expected = "one: a GP for each output is independent of the others only with one"
        raise ShapeError("network", f"{outputs.shape[-1]} outputs", expected)
    return torch.ones_like(outputs).unsqueeze(1)
