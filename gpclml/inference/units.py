"""Units of the targets, and a normal distribution that does not depend on them."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ExactGP
from linear_operator import to_linear_operator
from linear_operator.operators import DiagLinearOperator, LinearOperator
from torch import Tensor

from gpclml.errors import UnsupportedError
from gpclml.inference.observations import MISSING_TERM, Observations

__all__ = ["PosteriorNormal", "Units"]

Units = Literal["training", "original"]


def units_of_targets(
    model: ExactGP, units: Units = "original", multitask: bool = False
) -> tuple[Tensor, Tensor]:
    """Scale and shift that take targets in training units to the given units, in float64.

    Of a model of gpclml (``target_standardizer``), of BoTorch (``outcome_transform``) or one that
    does not transform targets. They are on the device of the targets and broadcast to these,
    ``(*batch, n)``, or ``(*batch, n, t)`` if multitask. An UnsupportedError says that the outcome
    transform is not affine.
    """
    standardizer = getattr(model, "target_standardizer", None)
    transform = getattr(model, "outcome_transform", None)
    if units == "training" or (standardizer is None and transform is None):
        zero = cast(Tensor, model.train_targets).new_zeros((), dtype=torch.float64)
        return zero + 1, zero
    if standardizer is not None:
        return standardizer.scale.double(), standardizer.offset.double()
    if not hasattr(transform, "stdvs"):
        raise UnsupportedError(
            "model.outcome_transform", type(transform).__name__, "botorch's Standardize, or none",
            "Other transforms have a Jacobian of their own: score with units='training'.",
        )  # fmt: skip
    # BoTorch standardizes each output by itself.
    scale, shift = cast(Any, transform).stdvs.double(), cast(Any, transform).means.double()
    if multitask:  # (*batch, 1, outputs)
        return scale, shift
    if scale.shape[-1] == 1:
        return scale.squeeze(-1), shift.squeeze(-1)
    return scale.mT, shift.mT  # multi-output models have their outputs as last batch dimension


def to_training_units(model: ExactGP, target: Tensor, multitask: bool = False) -> Tensor:
    """Targets in original units, transformed as the model transformed its training targets."""
    scale, shift = units_of_targets(model, "original", multitask)
    return (target - shift.to(target)) / scale.to(target)


def term_offset(model: ExactGP, data: Observations, units: Units) -> Tensor:
    """The amount by which the log density of each target is too large, in nats, ``(*batch, N)``.

    It is the change of units, the logarithm of the scale, or for a missing target its constant.
    """
    scale, _ = units_of_targets(model, units, multitask=data.num_tasks > 1)
    event = (data.num_rows, data.num_tasks)[: 1 + (data.num_tasks > 1)]
    log_scale = scale.to(data.residual).log()
    offset = data.flatten(log_scale.expand(*data.residual.shape[:-1], *event))
    return offset if data.missing is None else offset.masked_fill(data.missing, MISSING_TERM)


_ONE_DRAW = torch.Size()


class PosteriorNormal(MultivariateNormal):
    r"""A GPyTorch normal that does not depend on units: it has no absolute lower bounds.

    GPyTorch raises variances to at least ``gpytorch.settings.min_variance`` (1e-6 in single
    precision) and adds a jitter of 1e-8 or more to a covariance that it cannot factorize, whatever
    the units. For targets of the size of 1e-9 both are far larger than the variances themselves.
    Here variances are the covariance's diagonal, and densities, draws and entropies are computed in
    units of the distribution, :math:`\log p(y) = \log p_z((y - m) / s) - n \log s`, with s the
    power of two nearest to the largest standard deviation, so that dividing by s is exact.

    It can be used wherever a ``gpytorch.distributions.MultivariateNormal`` can: in likelihoods,
    ``gpytorch.metrics`` and BoTorch's posteriors. Indexing and arithmetic give this class again.

    Args:
        mean: ``(*batch, n)``.
        covariance_matrix: ``(*batch, n, n)``, a tensor or a linear operator.
        validate_args: As for GPyTorch's.

    Examples:
        >>> import torch
        >>> from gpclml.inference import PosteriorNormal
        >>> PosteriorNormal(torch.zeros(2), 1e-20 * torch.eye(2)).stddev
        tensor([1.0000e-10, 1.0000e-10])
    """

    def __init__(
        self, mean: Tensor, covariance_matrix: Tensor | LinearOperator, validate_args: bool = False
    ) -> None:
        super().__init__(mean, to_linear_operator(covariance_matrix), validate_args)

    @property
    def variance(self) -> Tensor:
        """The covariance's diagonal, ``(*batch, n)``.

        Values that rounding made zero or negative are replaced by the smallest positive normal
        number of the type, so that a root has a gradient.
        """
        diagonal = self.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
        variance = diagonal.expand(self.batch_shape + self.event_shape)
        return variance.clamp_min(torch.finfo(variance.dtype).tiny)

    def in_units(self, scale: Tensor, shift: Tensor, marginal: bool) -> PosteriorNormal:
        """The distribution of scale times value plus shift.

        Args:
            scale: Positive, ``(*batch, 1)``.
            shift: ``(*batch, 1)``.
            marginal: Whether the covariance is diagonal.
        """
        mean = (self.mean * scale + shift).to(self.mean)
        if marginal:
            variance = self.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
            spread = DiagLinearOperator((variance * scale.square()).to(mean))
        else:
            spread = (self.covariance_matrix * scale.square().unsqueeze(-1)).to(mean)
        return PosteriorNormal(mean, spread)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log density in the units of the mean.

        Args:
            value: ``(*sample, *batch, n)``.

        Returns:
            ``(*sample, *batch)``.
        """
        # The change of units has the Jacobian s in each dimension.
        density = self._in_own_units.log_prob((value - self.mean) / self._unit)
        return density - self.event_shape.numel() * self._unit.squeeze(-1).log()

    def rsample(
        self, sample_shape: torch.Size = _ONE_DRAW, base_samples: Tensor | None = None
    ) -> Tensor:
        """Draws through which gradients flow to mean and covariance.

        Args:
            sample_shape: How many, in any shape.
            base_samples: Standard normal numbers to make them of, ``(*sample, *batch, n)``; drawn
                from PyTorch's generator if None.

        Returns:
            ``(*sample, *batch, n)``.
        """
        deviation = self._in_own_units.rsample(torch.Size(sample_shape), base_samples)
        return self.mean + self._unit * deviation

    @property
    def _unbroadcasted_scale_tril(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A triangular root of the covariance, as PyTorch's entropy and divergences ask for it."""
        return self._in_own_units._unbroadcasted_scale_tril * self._unit.unsqueeze(-1)

    @cached_property
    def _unit(self) -> Tensor:
        """The unit s, ``(*batch, 1)``."""
        diagonal = self.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2).detach()
        largest = diagonal.amax(-1, keepdim=True)
        # A variance of zero or NaN has no unit: numbers then stay as they are.
        usable = torch.isfinite(largest) & (largest > 0)
        return torch.where(usable, largest, 1.0).log2().div(2).round().exp2()

    @cached_property
    def _in_own_units(self) -> MultivariateNormal:
        """The same distribution about zero in units s; its factorizations are kept with it."""
        inverse = self._unit.reciprocal()  # twice: the square of a small unit may vanish
        covariance = self.lazy_covariance_matrix
        if isinstance(covariance, DiagLinearOperator):
            diagonal = covariance.diagonal(dim1=-1, dim2=-2)
            scaled: LinearOperator = DiagLinearOperator(diagonal * inverse * inverse)
        else:  # evaluated: a factor times an operator would be factorized without the factor
            inverse = inverse.unsqueeze(-1)
            scaled = to_linear_operator(self.covariance_matrix * inverse * inverse)
        return MultivariateNormal(torch.zeros_like(self.mean), scaled)


def above_rounding(variance: Tensor, prior_variance: Tensor) -> Tensor:
    """Posterior variances, at least the rounding of the prior variances they are differences of."""
    rounding = torch.finfo(prior_variance.dtype).eps * prior_variance
    return torch.maximum(variance, rounding.to(variance))
