"""A network and a prior over its weights, linear in the weights around where they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpytorch.models import GP
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.curvature import GaussianWeightPrior
from gpclml.errors import ShapeError
from gpclml.kernels.networks import check_finite_output

__all__ = ["Linearization", "LinearizedNetwork"]


@dataclass(frozen=True)
class Linearization:
    """The linearized network at points.

    Attributes:
        points: Where, ``(N, *event)``; what an augmentation made of them.
        mean: The network's outputs, ``(N, C)``.
    """

    points: Tensor
    mean: Tensor


class LinearizedNetwork(GP):
    r"""The model :math:`f(x; w_*) + J_{w_*}(x) (w - w_*)` with a Gaussian prior over w.

    What the Laplace approximation with the generalized Gauss-Newton matrix is exact for (Immer
    et al. 2021, Section 2). The weights around which it is linear are those of the network: they
    are trained as ever.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``, each point on its own.
        prior: Over its trainable parameters; a precision of one for each layer if None.
        augmentation: Makes of points, ``(N, *event)``, what the network is given; for an
            :class:`~gpclml.curvature.AveragedNetwork` S versions of each, ``(N, S, *event)``.
            Its parameters are hyperparameters.

    Examples:
        >>> model = LinearizedNetwork(network, GaussianWeightPrior(network, "layer"))
        >>> mll = LaplaceMarginalLogLikelihood(likelihood, model, num_data=len(train_x))
        >>> loss = -mll(model(batch_x), batch_y)
    """

    @checked
    def __init__(
        self,
        network: torch.nn.Module,
        prior: GaussianWeightPrior | None = None,
        augmentation: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.augmentation = augmentation
        self.network = network
        self.prior = GaussianWeightPrior(network) if prior is None else prior

    @checked(late=True, passes_on="x", x="(N, *event)")
    def forward(self, x: Tensor) -> Linearization:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The network's outputs at points, which the curvature is to be taken at.

        Args:
            x: Points, ``(N, *event)``.

        Raises:
            ShapeError: The network's outputs are not ``(N, C)``.
            NonFiniteError: They are not finite.
        """
        points = self.points(x)
        mean = self.network(points)
        if mean.ndim != 2 or len(mean) != len(x):
            expected = f"({len(x)}, C), a row for each point"
            raise ShapeError("network", f"outputs {tuple(mean.shape)}", expected)
        check_finite_output(mean)
        return Linearization(points, mean)

    def points(self, x: Tensor) -> Tensor:
        """What the network is given at points: themselves, or what the augmentation makes of them.

        Args:
            x: Points, ``(N, *event)``.
        """
        return x if self.augmentation is None else self.augmentation(x)

    def __call__(self, x: Tensor) -> Linearization:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See :meth:`forward`."""
        return torch.nn.Module.__call__(self, x)
