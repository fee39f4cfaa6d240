"""Kernels and means on what a network computes: deep and tangent kernels, network means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from linear_operator import LinearOperator
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import check_positive, checked
from gpclml.curvature import GaussianWeightPrior, sample_gradients
from gpclml.curvature.structure import call_with
from gpclml.errors import ShapeError, UnsupportedError
from gpclml.gram import Gram, Reason, closed_form
from gpclml.gram.kernels import CosineSimilarityGram, FeaturesGram
from gpclml.kernels.features import JointKernel, once_if_equal
from gpclml.kernels.networks import MLP, apply_network


class DeepKernel(JointKernel):
    r"""Deep kernel: a base kernel applied to the features of a network.

    With ``residual=True`` the base kernel is given the inputs beside the features,

    .. math::
        k(x, x') = k_\text{base}\big([x, g(x)], [x', g(x')]\big),

    so that a network whose output is zero gives the base kernel on ``x``; other outputs can only
    reduce the correlations of a stationary base kernel. Start the network *near* zero and not at
    zero: the kernel depends on squared differences of features, whose gradient at a constant output
    is zero, so the network would never learn. Give the base kernel ``ard_num_dims=d + q`` for a
    lengthscale of each input and each feature. ``residual=False`` gives the plain deep kernel
    :math:`k_\text{base}(g(x), g(x'))` (Wilson et al. 2016, Eq. 5).

    Features are not rescaled: network and lengthscales learn their scale. In a batch the network is
    shared; the base kernel may have a ``batch_shape``. The network runs once if both arguments are
    the same points.

    Args:
        feature_extractor: Maps ``(*batch, n, d)`` to ``(*batch, n, q)``.
        base_kernel: Kernel on the features.
        residual: Whether the base kernel is given the inputs too.
        active_dims: Columns of the inputs to use; all if None.

    Raises:
        UnsupportedError: The base kernel models derivatives, which would be with respect to the
            features, not the inputs.

    Examples:
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from gpclml import MLP, DeepKernel
        >>> network = MLP([3, 50, 50, 2], output_scale=1e-3)
        >>> kernel = ScaleKernel(DeepKernel(network, RBFKernel(ard_num_dims=3 + 2)))
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
        # A kernel of derivatives has as many more rows as there are columns.
        columns = torch.zeros(1, 1), torch.zeros(1, 2)
        if len({base_kernel.num_outputs_per_input(x, x) for x in columns}) > 1:
            suggestion = "It would differentiate by the features: use a kernel without derivatives."
            expected = "a kernel with as many outputs for any number of columns"
            raise UnsupportedError("base_kernel", type(base_kernel).__name__, expected, suggestion)
        self.feature_extractor = feature_extractor
        self.base_kernel = base_kernel
        self.residual = residual

    def features(self, x: Tensor) -> Tensor:
        """The base kernel's inputs: ``[x, network(x)]`` if residual, else ``network(x)``.

        Args:
            x: Points, ``(*batch, n, d)``, or ``(n,)`` for one column.

        Raises:
            NonFiniteError: The network's output holds NaN or infinite values.
            ShapeError: The network does not keep one row for each point.
        """
        x = x.unsqueeze(-1) if x.ndim == 1 else x
        output = apply_network(self.feature_extractor, x)
        return torch.cat([x, output], dim=-1) if self.residual else output

    @override
    def _covariances(
        self, x1: Tensor, x2: Tensor, diag: bool, **params: Any
    ) -> Tensor | LinearOperator:
        return self.base_kernel(*once_if_equal(self.features, x1, x2), diag=diag, **params)

    def _closed_form(self) -> Gram | Reason:
        """For :func:`gpclml.gram.closed_form`."""
        base = closed_form(self.base_kernel, select=True)
        return base if isinstance(base, Reason) else FeaturesGram(base, self.features)

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """Rows of the covariance for each point, those of the base kernel."""
        return self.base_kernel.num_outputs_per_input(x1, x2)

    @override
    def prediction_strategy(self, *args: Any, **kwargs: Any) -> Any:
        """The prediction strategy of the base kernel."""
        return self.base_kernel.prediction_strategy(*args, **kwargs)


class SkipFeatures(torch.nn.Module):
    r"""A linear map of the inputs beside the outputs of a network.

    .. math:: g(x) = \big[\operatorname{diag}(e^{s}) x + M x,\ \operatorname{MLP}(x)\big]

    With the full matrix a stationary kernel on the features measures distances along sums of
    inputs, which a lengthscale for each input cannot. The diagonal is a logarithm, so that a line
    search can reach scales that separate single values. All features start near zero.

    Args:
        sizes: Widths of the network, input and output included.
        start: Approximate size of the features at the start.
        generator: Source of the start; seed 0 if None.

    Raises:
        ArgumentError: Fewer than two sizes, a size that is not a positive integer, or a start
            that is not positive.

    Examples:
        >>> import torch
        >>> from gpclml.kernels import SkipFeatures
        >>> SkipFeatures([3, 50, 50, 2])(torch.randn(10, 3)).shape
        torch.Size([10, 5])
    """

    @checked
    def __init__(
        self, sizes: Sequence[int], start: float = 1e-3, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        check_positive(start=start)
        self.start = start
        self.network: MLP = MLP(sizes, torch.nn.SiLU, output_scale=start, generator=generator)
        self.sizes: tuple[int, ...] = self.network.sizes
        d = self.sizes[0]
        self.log_scale: torch.nn.Parameter = torch.nn.Parameter(torch.full((d,), math.log(start)))
        # It may start at zero, where a network would not learn: the map is linear in it.
        self.mixing: torch.nn.Parameter = torch.nn.Parameter(torch.zeros(d, d))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the network again and resets the linear map, in place.

        Args:
            generator: Source of the draws; seed 0 if None.
        """
        self.network.reset_parameters(generator)
        self.log_scale.fill_(math.log(self.start))
        self.mixing.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Features of points, ``(*batch, n, d)`` to ``(*batch, n, d + q)``."""
        return torch.cat([x * self.log_scale.exp() + x @ self.mixing, self.network(x)], dim=-1)


class NetworkMean(Mean):
    r"""Mean function given by a network, :math:`m(x) = g(x)`.

    In a batch the network is shared.

    Args:
        network: Maps ``(*batch, n, d)`` to ``(*batch, n, 1)``.

    Examples:
        >>> import torch
        >>> from gpclml import MLP, NetworkMean
        >>> NetworkMean(MLP([3, 50, 50, 1]))(torch.randn(10, 3)).shape
        torch.Size([10])
    """

    @checked
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The mean at points, ``(*batch, n, d)`` to ``(*batch, n)``.

        Raises:
            ShapeError: The network does not give one number for each point.
            NonFiniteError: The network's output holds NaN or infinite values.
        """
        output = apply_network(self.network, x)
        if output.shape[-1] != 1:
            suggestion = "End the network with one output, e.g. MLP([d, 50, 50, 1])."
            expected = str((*x.shape[:-1], 1))
            raise ShapeError("network output", tuple(output.shape), expected, suggestion)
        return output.squeeze(-1)


class CosineSimilarityKernel(JointKernel):
    r"""The cosine of the angle between two points: a linear kernel on the unit sphere.

    .. math:: k(x, x') = \frac{x^\top x'}{\lVert x \rVert \, \lVert x' \rVert}

    It has no parameters; wrap it in a ``ScaleKernel`` for a variance. Its rank is at most the
    number of columns. The zero vector has covariance zero with every point, itself included.

    Examples:
        >>> from gpytorch.kernels import ScaleKernel
        >>> from gpclml.kernels import CosineSimilarityKernel
        >>> kernel = ScaleKernel(CosineSimilarityKernel())
    """

    @override
    def _covariances(self, x1: Tensor, x2: Tensor, diag: bool, **params: Any) -> Tensor:
        x1, x2 = once_if_equal(partial(torch.nn.functional.normalize, dim=-1), x1, x2)
        return (x1 * x2).sum(-1) if diag else x1 @ x2.mT

    def _closed_form(self) -> Gram:
        """For :func:`gpclml.gram.closed_form`."""
        return CosineSimilarityGram()


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
        >>> from gpclml import MLP, GaussianWeightPrior
        >>> from gpclml.kernels import NeuralTangentKernel
        >>> network = MLP([3, 50, 1])
        >>> kernel = NeuralTangentKernel(network, GaussianWeightPrior(network))
    """

    @checked
    def __init__(self, network: torch.nn.Module, prior: GaussianWeightPrior) -> None:
        super().__init__()
        self.network = network
        self.prior = prior

    @override
    def _covariances(self, x1: Tensor, x2: Tensor, diag: bool, **params: Any) -> Tensor:
        first, second = once_if_equal(self._scaled_gradients, x1, x2)
        return (first * second).sum(-1) if diag else first @ second.mT

    def _scaled_gradients(self, x: Tensor) -> Tensor:
        """Gradients divided by the roots of the prior precisions, ``(n, P)``."""
        if x.ndim != 2:
            raise UnsupportedError("x", f"shape {tuple(x.shape)}", "points (n, d), no batch")
        gradients, precisions = _gradients(self.network, x), self.prior.precisions()
        scaled = [gradients[name] * value.rsqrt() for name, value in precisions.items()]
        return torch.cat(scaled, dim=-1)


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
        # By the gradients that the kernel is made of: not every module has forward-mode
        # derivatives, which also go through what stops a gradient.
        gradients = _gradients(self.network, x)
        linear = sum(gradients[name] @ weight.flatten() for name, weight in weights.items())
        return call_with(self.network, weights, x).squeeze(-1) - linear


def _gradients(network: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients ``(n, size)`` of a network's only output with respect to each parameter."""

    def ones(outputs: Tensor) -> Tensor:
        if outputs.shape[-1] != 1:
            expected = "one: a GP for each output is independent of the others only with one"
            raise ShapeError("network", f"{outputs.shape[-1]} outputs", expected)
        return torch.ones_like(outputs).unsqueeze(1)

    gradients = sample_gradients(network, x, ones)
    return {name: gradient[:, 0].reshape(len(x), -1) for name, gradient in gradients.items()}
