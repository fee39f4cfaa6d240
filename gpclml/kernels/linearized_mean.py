"""The mean of a network that is linear in its weights."""

from __future__ import annotations

import torch
from gpytorch.means import Mean
from torch import Tensor
from torch.func import functional_call, jvp

from gpclml._utils.arguments import checked

__all__ = ["LinearizedMean"]


class LinearizedMean(Mean):
    r"""What the linearized network is on average over its prior: :math:`f(x; w_*) - J(x) w_*`.

    For a prior of mean zero over the weights. The weights stay where they are: nothing is
    differentiated in them.

    Args:
        network: Maps ``(N, *event)`` to ``(N, 1)``.
    """

    @checked
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The mean at points.

        Args:
            x: Points. Shape ``(n, d)``.

        Returns:
            Shape ``(n,)``.
        """
        weights = {k: p.detach() for k, p in self.network.named_parameters() if p.requires_grad}
        both = jvp(
            lambda parameters: functional_call(self.network, parameters, (x,)),
            (weights,),
            (weights,),
        )
        return (both[0] - both[1]).squeeze(-1)
