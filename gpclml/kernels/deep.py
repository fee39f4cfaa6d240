"""A kernel on the features of a network."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from linear_operator import LinearOperator
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import UnsupportedError
from gpclml.kernels.networks import apply_network

__all__ = ["DeepKernel"]


class DeepKernel(Kernel):
    r"""A base kernel applied to a network's features: deep kernel learning.

    With ``residual=True`` the base kernel sees the inputs beside the features,

    .. math::
        k(x, x') = k_\text{base}\big([x, g(x)], [x', g(x')]\big),

    so a network whose output is zero leaves the base kernel on ``x``, and a stationary base
    kernel can only lose correlation by it. Start the network *near* zero, not at it: the
    kernel depends on squared differences of features, so at a constant output their gradient
    is zero and the network would never learn. Give the base kernel ``ard_num_dims=d + q``
    for a lengthscale to each input and each feature. With ``residual=False`` it is the plain
    deep kernel :math:`k_\text{base}(g(x), g(x'))` (Wilson et al. 2016, Eq. 5).

    Features are not rescaled in any hidden way: their scale is learned by the network and the
    base kernel's lengthscales. In a batch the network is shared; the base kernel may have a
    ``batch_shape``. The network runs once where both arguments hold the same points.

    Args:
        feature_extractor: Maps ``(*batch, n, d)`` to ``(*batch, n, q)``.
        base_kernel: Kernel on the features.
        residual: Whether the base kernel sees the inputs too.
        active_dims: Columns of the inputs to use; all if None.

    Raises:
        UnsupportedError: The base kernel models derivatives, which it would take with
            respect to the features, not the inputs.

    Examples:
        >>> base = gpytorch.kernels.RBFKernel(ard_num_dims=3 + 2)
        >>> network = MLP([3, 50, 50, 2], output_scale=1e-3)
        >>> kernel = gpytorch.kernels.ScaleKernel(DeepKernel(network, base))
    """

    @checked
    def __init__(
        self,
        feature_extractor: torch.nn.Module,
        base_kernel: Kernel,
        residual: bool = True,
        active_dims: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(active_dims=active_dims)
        one, two = torch.zeros(1, 1), torch.zeros(1, 2)
        if base_kernel.num_outputs_per_input(one, one) != base_kernel.num_outputs_per_input(
            two, two
        ):
            mend = "Its derivatives would be with respect to the features; use a kernel of values."
            expected = "a kernel with as many outputs for any number of columns"
            raise UnsupportedError("base_kernel", type(base_kernel).__name__, expected, mend)
        self.feature_extractor = feature_extractor
        self.base_kernel = base_kernel
        self.residual = residual

    def features(self, x: Tensor) -> Tensor:
        """What the base kernel sees: ``[x, network(x)]`` if residual, else ``network(x)``.

        Args:
            x: Points. Shape ``(*batch, n, d)``, or ``(n,)`` for one column.

        Returns:
            Features. Shape ``(*batch, n, d + q)`` or ``(*batch, n, q)``.

        Raises:
            NonFiniteError: The network's output holds NaN or infinite values.
            ShapeError: The network does not keep one row a point.
        """
        x = x.unsqueeze(-1) if x.ndim == 1 else x
        output = apply_network(self.feature_extractor, x)
        return torch.cat([x, output], dim=-1) if self.residual else output

    @checked(late=True, x1="float (*batch, n, d)", x2="float (*batch, m, d)")
    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor | LinearOperator:
        """The base kernel between the features of two sets of points.

        Args:
            x1: Points. Shape ``(*batch, n, d)``.
            x2: Points. Shape ``(*batch, m, d)``.
            diag: Return the diagonal only.
            last_dim_is_batch: Not supported.
            **params: Handed to the base kernel.

        Returns:
            Covariance. Shape ``(*batch, n, m)``, or ``(*batch, n)`` with ``diag``.

        Raises:
            UnsupportedError: ``last_dim_is_batch`` is set.
        """
        if last_dim_is_batch:
            mend = "A network mixes the columns; sum or multiply kernels of single columns instead."
            raise UnsupportedError("last_dim_is_batch", True, "False", mend)
        features1 = self.features(x1)
        same = x1 is x2 or torch.equal(x1, x2)
        features2 = features1 if same else self.features(x2)
        return self.base_kernel(features1, features2, diag=diag, **params)

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """Rows of the covariance for each point, as the base kernel has them."""
        return self.base_kernel.num_outputs_per_input(x1, x2)

    def prediction_strategy(self, train_inputs, train_prior_dist, train_labels, likelihood):
        """The base kernel's way of predicting."""
        return self.base_kernel.prediction_strategy(
            train_inputs, train_prior_dist, train_labels, likelihood
        )
