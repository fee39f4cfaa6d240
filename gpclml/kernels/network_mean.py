"""A network as a mean function."""

from __future__ import annotations

import torch
from gpytorch.means import Mean
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError
from gpclml.kernels.networks import apply_network

__all__ = ["NetworkMean"]


class NetworkMean(Mean):
    r"""A mean function given by a network: :math:`m(x) = g(x)`.

    In a batch the network is shared.

    Args:
        network: Maps ``(*batch, n, d)`` to ``(*batch, n, 1)``.

    Examples:
        >>> mean = NetworkMean(MLP([3, 50, 50, 1]))
        >>> mean(torch.randn(10, 3)).shape
        torch.Size([10])
    """

    @checked
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    @checked(late=True, passes_on="x", x="float (*batch, n, d)")
    def forward(self, x: Tensor) -> Tensor:
        """The mean at each point.

        Args:
            x: Points. Shape ``(*batch, n, d)``.

        Returns:
            Means. Shape ``(*batch, n)``.

        Raises:
            ShapeError: The network does not give one number a point.
            NonFiniteError: The network's output holds NaN or infinite values.
        """
        output = apply_network(self.network, x)
        if output.shape[-1] != 1:
            mend = "End the network with one output, e.g. MLP([d, 50, 50, 1])."
            expected = str((*x.shape[:-1], 1))
            raise ShapeError("network output", tuple(output.shape), expected, mend)
        return output.squeeze(-1)
