"""Feature maps, and the kernel of a model that is linear in features."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

import gpytorch
import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel
from linear_operator.operators import (
    LinearOperator,
    LowRankRootLinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
)
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import check_counts, check_positive, checked, seeded
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError


def positive(name: str) -> Any:
    """A property of modules: the positive parameter of that name, stored as ``raw_`` and the name.

    GPyTorch's constraint maps it from any number, as for the parameters of its own kernels.
    """

    def value(module: gpytorch.Module) -> Tensor:
        constraint = getattr(module, f"raw_{name}_constraint")
        return constraint.transform(getattr(module, f"raw_{name}"))

    def set_value(module: gpytorch.Module, value: float | Tensor) -> None:
        raw = cast(Tensor, getattr(module, f"raw_{name}"))
        wanted = torch.as_tensor(value, dtype=raw.dtype, device=raw.device)
        if wanted.shape not in ((), (1,), raw.shape):
            raise ShapeError(name, tuple(wanted.shape), f"a number or {tuple(raw.shape)}")
        check_positive(**{name: wanted})
        constraint = getattr(module, f"raw_{name}_constraint")
        module.initialize(**{f"raw_{name}": constraint.inverse_transform(wanted.expand_as(raw))})

    return property(value, set_value)


def register_positive(module: gpytorch.Module, **starts: Tensor) -> None:
    """Gives a module the parameters of its :func:`positive` properties, of their starts' shapes."""
    for name, start in starts.items():
        module.register_parameter(f"raw_{name}", torch.nn.Parameter(torch.zeros_like(start)))
        module.register_constraint(f"raw_{name}", Positive())
        setattr(module, name, start)


class JointKernel(Kernel):
    """Base class of kernels on all columns together, which refuse ``last_dim_is_batch``."""

    @override
    @checked(late=True, x1="float (*batch, n, d)", x2="float (*batch, m, d)")
    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor | LinearOperator:
        """Covariances ``(*batch, n, m)`` of points, or ``(*batch, n)`` of corresponding ones.

        An UnsupportedError says that ``last_dim_is_batch`` is not for kernels of all columns.
        """
        if last_dim_is_batch:
            suggestion = "This kernel uses all columns together: combine kernels of single ones."
            raise UnsupportedError("last_dim_is_batch", True, "False", suggestion)
        return self._covariances(x1, x2, diag, **params)

    @abstractmethod
    def _covariances(
        self, x1: Tensor, x2: Tensor, diag: bool, **params: Any
    ) -> Tensor | LinearOperator:
        """Covariances ``(*batch, n, m)``, or ``(*batch, n)`` of corresponding points."""


def once_if_equal(
    function: Callable[[Tensor], Tensor], x1: Tensor, x2: Tensor
) -> tuple[Tensor, Tensor]:
    """The values of a function at two sets of points, one tensor where these are the same."""
    first = function(x1)
    # GPyTorch passes two selections of the same points as two tensors.
    return first, first if x1 is x2 or torch.equal(x1, x2) else function(x2)


class FeatureKernel(JointKernel):
    r"""Kernel of a linear model: inner products of features under its prior variances.

    .. math:: k(x, x') = \phi(x)^\top S \, \phi(x'), \qquad w \sim N(0, S), \; f(x) = w^\top \phi(x)

    With fewer features than points the covariance is an operator of low rank, and every exact
    objective and score costs n R² instead of n³. The kernel is differentiable in S and in the
    parameters of the features. Features of a wrong shape raise a
    :class:`~gpclml.errors.ShapeError`.

    Args:
        features: Maps ``(*batch, n, d)`` to ``(*batch, n, R)``: a module, whose parameters are
            the kernel's, or a function.
        prior_variance: S, one number for all weights or one each, ``(R,)``.

    Raises:
        ArgumentError: A prior variance is not positive.

    Examples:
        >>> from gpclml.kernels import FeatureKernel, PolynomialFeatures
        >>> kernel = FeatureKernel(PolynomialFeatures(3))
    """

    has_lengthscale = False

    prior_variance = positive("prior_variance")
    """Prior variances of the weights, ``(1,)`` or ``(R,)``."""

    @checked(prior_variance="float () | (R,)")
    def __init__(
        self, features: Callable[[Tensor], Tensor], prior_variance: float | Tensor = 1.0
    ) -> None:
        super().__init__()
        self.features = features
        start = torch.as_tensor(prior_variance).detach().reshape(-1)
        start = start if start.is_floating_point() else start.to(torch.get_default_dtype())
        register_positive(self, prior_variance=start)

    def features_of(self, x: Tensor) -> Tensor:
        """Features of points, ``(*batch, n, d)`` to ``(*batch, n, R)``.

        Raises:
            ShapeError: The features have another shape, or their number is not that of the prior
                variances.
        """
        phi = self.features(x)
        if phi.shape[:-1] != x.shape[:-1] or phi.shape[-1] == 0:
            expected = f"{(*x.shape[:-1],)} and R features"
            raise ShapeError("features", f"{tuple(phi.shape)} of {tuple(x.shape)}", expected)
        count = self.prior_variance.shape[-1]
        if count not in (1, phi.shape[-1]):
            expected = f"one number, or {phi.shape[-1]}, one for each feature"
            raise ShapeError("prior_variance", f"{count} numbers", expected)
        return phi

    @override
    def _covariances(
        self, x1: Tensor, x2: Tensor, diag: bool, **params: Any
    ) -> Tensor | LinearOperator:
        scale = self.prior_variance.sqrt()
        first, second = once_if_equal(lambda x: self.features_of(x) * scale, x1, x2)
        if diag:
            return (first * second).sum(-1)
        # An operator and not a matrix: what reads it sees its rank.
        if first is not second:
            return MatmulLinearOperator(first, second.mT)
        low_rank = first.shape[-1] < first.shape[-2]
        return LowRankRootLinearOperator(first) if low_rank else RootLinearOperator(first)


class PolynomialFeatures(torch.nn.Module):
    r"""All products of at most p columns, the empty product 1 included.

    They are ordered by degree; of one column they are :math:`1, x, x^2, \ldots`; of degree 1 the
    inputs behind an intercept. There are :math:`\binom{d + p}{p}` of them. Scale the inputs to
    [-1, 1] for high degrees.

    Args:
        degree: Largest number of factors p.

    Raises:
        ArgumentError: The degree is negative.
    """

    @checked
    def __init__(self, degree: int) -> None:
        super().__init__()
        check_counts(0, degree=degree)
        self.degree = degree

    @checked(late=True, x="float (*batch, n, d)")
    def forward(self, x: Tensor) -> Tensor:
        """Features of points, ``(*batch, n, d)`` to ``(*batch, n, R)``."""
        degrees = [torch.ones_like(x[..., :1])]
        for degree in range(1, self.degree + 1):
            factors = itertools.combinations_with_replacement(range(x.shape[-1]), degree)
            degrees.append(x[..., torch.tensor([*factors], device=x.device)].prod(-1))
        return torch.cat(degrees, dim=-1)


class FourierFeatures(torch.nn.Module):
    r"""Sines and cosines of integer frequencies, :math:`\sin(dx), \cos(dx)`, d = 1 .. D.

    The Fourier models of Lotfi et al. (2022, Section 6 and Figure 4): all sines, then all
    cosines.

    Args:
        num_frequencies: Number D of frequencies.

    Raises:
        ArgumentError: D is below one.
    """

    @checked
    def __init__(self, num_frequencies: int) -> None:
        super().__init__()
        check_counts(num_frequencies=num_frequencies)
        self.num_frequencies = num_frequencies

    @checked(late=True, x="float (*batch, n, 1)")
    def forward(self, x: Tensor) -> Tensor:
        """Features of points in one column, ``(*batch, n, 1)`` to ``(*batch, n, 2 D)``.

        Raises:
            ShapeError: There are several columns.
        """
        if x.shape[-1] != 1:
            raise ShapeError("x", tuple(x.shape), "(*batch, n, 1)", "Use RandomFourierFeatures.")
        angles = x * torch.arange(1, self.num_frequencies + 1, dtype=x.dtype, device=x.device)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class RandomFourierFeatures(gpytorch.Module):
    r"""Cosines at random frequencies, whose inner products approximate an RBF kernel.

    .. math:: \phi(x) = \sigma_k \sqrt{2 / R} \, \cos(W x / \ell + b), \qquad
        W_{rj} \sim N(0, 1), \; b_r \sim U[0, 2\pi]

    (Rahimi and Recht 2007; Harvey and Hughes 2026, Section 2). Lengthscale and amplitude are
    GPyTorch parameters; frequencies and phases are fixed.

    Args:
        num_inputs: Number d of columns.
        num_features: Number R of features.
        lengthscale: Start of the lengthscale.
        amplitude: Start of :math:`\sigma_k`, whose square is the variance of the kernel.
        ard: Whether each column has a lengthscale of its own.
        seed: Seed of frequencies and phases.
        weight: Frequencies W instead of random ones, ``(R, d)``.
        bias: Phases b to go with them, ``(R,)``.

    Raises:
        ArgumentError: A number is below one, lengthscale or amplitude not positive, or one of
            weight and bias is missing.
        ShapeError: Weight and bias are not of these shapes.

    Examples:
        >>> import torch
        >>> from gpclml import BayesianLinearModel
        >>> from gpclml.kernels import RandomFourierFeatures
        >>> x, features = torch.rand(40, 3), RandomFourierFeatures(num_inputs=3, num_features=50)
        >>> model = BayesianLinearModel(x, x.sum(-1), features)
    """

    weight: Tensor
    bias: Tensor

    lengthscale = positive("lengthscale")
    """Lengthscale, one for all columns or one for each, ``(1,)`` or ``(d,)``."""

    amplitude = positive("amplitude")
    """Standard deviation of the approximated process, ``(1,)``."""

    @checked(weight="float (R, d)", bias="float (R,)")
    def __init__(
        self,
        num_inputs: int,
        num_features: int,
        *,
        lengthscale: float = 1.0,
        amplitude: float = 1.0,
        ard: bool = False,
        seed: int = 0,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_counts(num_inputs=num_inputs, num_features=num_features)
        if (weight is None) != (bias is None):
            raise ArgumentError("bias", bias, "weight and bias together, or neither")
        if weight is None or bias is None:
            generator = seeded(seed)
            shape = num_features, num_inputs
            # In float64 and then cast, so that one seed gives the same features in every dtype.
            weight = torch.randn(shape, dtype=torch.float64, generator=generator)
            bias = 2 * math.pi * torch.rand(num_features, dtype=torch.float64, generator=generator)
            weight, bias = (draws.to(torch.get_default_dtype()) for draws in (weight, bias))
        elif weight.shape != (num_features, num_inputs) or bias.shape != (num_features,):
            got = f"{tuple(weight.shape)} and {tuple(bias.shape)}"
            expected = f"({num_features}, {num_inputs}) and ({num_features},)"
            raise ShapeError("weight, bias", got, expected)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        register_positive(
            self,
            lengthscale=weight.new_full((num_inputs if ard else 1,), lengthscale),
            amplitude=weight.new_full((1,), amplitude),
        )

    @checked(late=True, x="float (*batch, n, d)")
    def forward(self, x: Tensor) -> Tensor:
        """Features of points, ``(*batch, n, d)`` to ``(*batch, n, R)``.

        Raises:
            ShapeError: The points have another number of columns.
        """
        R, d = self.weight.shape
        if x.shape[-1] != d:
            raise ShapeError("x", tuple(x.shape), f"(*batch, n, {d})")
        angles = torch.nn.functional.linear(x / self.lengthscale, self.weight, self.bias)
        return self.amplitude * math.sqrt(2 / R) * angles.cos()
