"""Features of a network with a linear map beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError
from gpclml.kernels.networks import MLP

__all__ = ["SkipFeatures"]


class SkipFeatures(torch.nn.Module):
    r"""A linear map of the inputs beside the outputs of a network.

    .. math:: g(x) = \big[\operatorname{diag}(e^{s}) x + M x,\ \operatorname{MLP}(x)\big]

    The full matrix lets a stationary kernel on the features measure distance along sums of
    inputs, which no lengthscale an input can; the diagonal is a logarithm, so that a line
    search reaches scales that tell single values apart. Everything starts near zero.

    Args:
        sizes: Widths of the network, input and output included.
        start: About the size of the features at the start.
        activation: Makes the module between two layers.
        generator: Source of the start; seed 0 if None.

    Raises:
        ArgumentError: Fewer than two sizes, a size that is not a positive integer, or a start
            that is not positive.

    Examples:
        >>> SkipFeatures([3, 50, 50, 2])(torch.randn(10, 3)).shape
        torch.Size([10, 5])
    """

    @checked
    def __init__(
        self,
        sizes: Sequence[int],
        start: float = 1e-3,
        activation: type[torch.nn.Module] = torch.nn.SiLU,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not 0 < start < math.inf:
            raise ArgumentError("start", start, "a positive number")
        self.start = start
        self.network = MLP(sizes, activation, output_scale=start, generator=generator)
        self.sizes = self.network.sizes
        d = self.sizes[0]
        self.log_scale = torch.nn.Parameter(torch.full((d,), math.log(start)))
        self.mixing = torch.nn.Parameter(torch.zeros(d, d))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the network anew and puts the linear map back to its start, in place.

        Args:
            generator: Source of the draws; seed 0 if None.
        """
        self.network.reset_parameters(generator)
        self.log_scale.fill_(math.log(self.start))
        self.mixing.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Features of points.

        Args:
            x: Points. Shape ``(*batch, n, d)``.

        Returns:
            Features. Shape ``(*batch, n, d + q)``.
        """
        return torch.cat([x * self.log_scale.exp() + x @ self.mixing, self.network(x)], dim=-1)
