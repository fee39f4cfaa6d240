"""The linearized network as an exact GP."""

from __future__ import annotations

from typing import Any, cast

from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.kernels import LinearizedMean, NeuralTangentKernel
from gpclml.models.linearized_network import LinearizedNetwork

__all__ = ["LinearizedGP"]


class LinearizedGP(ExactGP):
    r"""A network, linear in its weights around where they are, as a GP over functions.

    Every objective of exact GPs takes it: log marginal likelihood, conditional, leave-one-out.
    Its evidence is that of the linear model with the weights integrated out exactly, and at
    least the Laplace evidence at :math:`w_*`:

    .. math:: \text{GP} - \text{Laplace} = \tfrac12 g^\top (H + P_0)^{-1} g

    with g the gradient of the log joint density; equal where the weights are at the mode. The
    point of linearization has seen all data: the conditional density is not that of a network
    trained on the points that are conditioned on.

    Args:
        train_x: Points, ``(n, d)``.
        train_y: Their targets, ``(n,)``.
        likelihood: A Gaussian likelihood.
        network: The network, of one output, and its prior.

    Examples:
        >>> gp = LinearizedGP(train_x, train_y, likelihood, LinearizedNetwork(network))
        >>> mll = ConditionalMarginalLogLikelihood(likelihood, gp)
        >>> value = mll(gp(train_x), train_y)
    """

    @checked(train_x="float (N, *event)", train_y="float (N,)")
    def __init__(
        self, train_x: Tensor, train_y: Tensor, likelihood: Likelihood, network: LinearizedNetwork
    ) -> None:
        super().__init__(train_x, train_y, cast(Any, likelihood))
        self.mean_module = LinearizedMean(network.network)
        self.covar_module = NeuralTangentKernel(network.network, network.prior)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at points.

        Args:
            x: Points, ``(n, d)``.
        """
        return MultivariateNormal(cast(Tensor, self.mean_module(x)), self.covar_module(x))
