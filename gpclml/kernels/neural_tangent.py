"""The covariance of a network that is linear in its weights."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.curvature import GaussianWeightPrior, sample_gradients
from gpclml.errors import ShapeError, UnsupportedError

__all__ = ["NeuralTangentKernel"]


class NeuralTangentKernel(Kernel):
    r"""Inner products of a network's gradients in its weights, under their prior.

    .. math:: k(x, x') = J_{w_*}(x) \, P_0^{-1} J_{w_*}(x')^\top

    (Jacot et al. 2018; Immer et al. 2021, Section 2). With the mean of
    :class:`~gpclml.kernels.LinearizedMean` it makes the linearized network a GP. Differentiable in
    prior precisions and in the points; the weights stay where they are.

    Args:
        network: Maps ``(N, *event)`` to ``(N, 1)``, each point on its own.
        prior: Over its trainable parameters.

    Examples:
        >>> kernel = NeuralTangentKernel(network, GaussianWeightPrior(network))
    """

    @checked
    def __init__(self, network: torch.nn.Module, prior: GaussianWeightPrior) -> None:
        super().__init__()
        self.network = network
        self.prior = prior

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: object,
    ) -> Tensor:
        """Covariances of points.

        Args:
            x1: Points. Shape ``(n, d)``.
            x2: Points. Shape ``(m, d)``.
            diag: Only those of corresponding points.
            last_dim_is_batch: Not supported.
            **params: Not used.

        Returns:
            Shape ``(n, m)``; ``(n,)`` with ``diag``.

        Raises:
            UnsupportedError: ``last_dim_is_batch`` is set, or points come in a batch.
            ShapeError: The network has several outputs.
        """
        if last_dim_is_batch:
            raise UnsupportedError("last_dim_is_batch", True, "False")
        first = self._rows(x1)
        second = first if x1 is x2 or torch.equal(x1, x2) else self._rows(x2)
        return (first * second).sum(-1) if diag else first @ second.mT

    def _rows(self, x: Tensor) -> Tensor:
        """Gradients over the roots of precisions, ``(n, P)``."""
        if x.ndim != 2:
            raise UnsupportedError("x", f"shape {tuple(x.shape)}", "points (n, d), no batch")
        gradients = sample_gradients(self.network, x, _only_output)
        parts = [
            gradients[name][:, 0].reshape(len(x), -1) * precision.rsqrt()
            for name, precision in self.prior.precisions().items()
        ]
        return torch.cat(parts, dim=-1)


def _only_output(outputs: Tensor) -> Tensor:
    if outputs.shape[-1] != 1:
        expected = "one: a GP for each output is independent of the others only with one"
        raise ShapeError("network", f"{outputs.shape[-1]} outputs", expected)
    return torch.ones_like(outputs).unsqueeze(1)
