"""The evidence lower bound of a linear model, in closed form, as a GPyTorch objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.inference.observations import missing_targets
from gpclml.linalg.gaussians import DiagonalFamily, GaussianFamily, WeightDistribution, gaussian_kl
from gpclml.mlls._terms import check_train_mode, plus_priors
from gpclml.models.linear import BayesianLinearModel

# A checker that does not read upstream's source knows this base.
assert issubclass(MarginalLogLikelihood, torch.nn.Module)


@dataclass(frozen=True)
class LinearData:
    """What a linear model knows of its observed points.

    Attributes:
        features: ``(n, R)``.
        residual: Targets less the prior mean, ``(n,)``.
        prior_variance: Of the weights, ``(R,)``.
        noise: The noise variance, a number.
    """

    features: Tensor
    residual: Tensor
    prior_variance: Tensor
    noise: Tensor

    def expected_square(self, q: WeightDistribution) -> Tensor:
        r"""Sum over points of :math:`E_q (r_i - w^\top \phi_i)^2`."""
        errors = self.residual - self.features @ q.mean
        return (errors.square() + q.predictive_variance(self.features)).sum()

    def expected_log_likelihood(self, q: WeightDistribution) -> Tensor:
        r""":math:`E_q \log p(y \mid w)`, in nats."""
        n = len(self.residual)
        logs = n * (2 * math.pi * self.noise).log()
        return -0.5 * (logs + self.expected_square(q) / self.noise)


class LinearEvidenceLowerBound(MarginalLogLikelihood):
    r"""A lower bound of a linear model's log evidence, in nats per point.

    .. math:: \frac1n \Big[ E_q \log p(y \mid w) - T \, KL(q \| p) \Big]
        + \frac1n \log p(\theta), \qquad q = N(\mu, \Sigma)

    in closed form, for :math:`\Sigma` diagonal, of low rank plus :math:`\varepsilon I`, or full
    (Harvey and Hughes 2026, Sections 2 and 3, Appendix C). q is the best member of the family at
    each call, so that this is a function of the hyperparameters alone; its gradient at
    that q is the whole gradient. With the full family and T = 1 the bound is the log evidence.

    A temperature T below one makes the posterior narrower than the data support, one above one
    makes it wider. The value is then no bound of the evidence; :meth:`at_temperature` gives the
    bound of the same q.

    Args:
        likelihood: The model's own, ``model.likelihood``.
        model: A linear model in train mode.
        family: Form of the covariance; diagonal if None.
        temperature: T, a positive number.

    Raises:
        UnsupportedError: The model is not linear, or the likelihood is not the model's.
        ArgumentError: The temperature is not positive.

    Note:
        n² R + n³ operations for the best q and n R for the bound. An R x R array is formed only
        where there are fewer features than points.

    Examples:
        >>> import torch
        >>> from gpclml import BayesianLinearModel, LinearEvidenceLowerBound
        >>> from gpclml.linalg.gaussians import LowRankFamily
        >>> x = torch.rand(50, 3)
        >>> model = BayesianLinearModel(x, x.sum(-1))
        >>> mll = LinearEvidenceLowerBound(model.likelihood, model, LowRankFamily(rank=2))
        >>> loss = -mll(model(*model.train_inputs), model.train_targets)
    """

    model: BayesianLinearModel

    @checked
    def __init__(
        self,
        likelihood: Likelihood,
        model: BayesianLinearModel,
        family: GaussianFamily | None = None,
        *,
        temperature: float = 1.0,
    ) -> None:
        if likelihood is not model.likelihood:
            raise UnsupportedError("likelihood", type(likelihood).__name__, "model.likelihood")
        if not 0 < temperature < math.inf:
            raise ArgumentError("temperature", temperature, "a positive number")
        super().__init__(likelihood, model)
        self.temperature = temperature
        self.family: GaussianFamily = DiagonalFamily() if family is None else family

    def forward(
        self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any
    ) -> Tensor:
        """The bound, at the best q.

        Args:
            function_dist: The model's prior at its training inputs, ``model(train_x)``.
            target: Training targets, ``(n,)``; NaN is left out under
                ``observation_nan_policy("mask")``.
            *params: The points, if they are not the model's own training inputs.
            **kwargs: Not used.

        Returns:
            Nats per observed point, a number; larger is better.

        Raises:
            ModelModeError: The model is in eval mode.
            ShapeError: Target and points are not as many.
            NonFiniteError: A target is not finite.
            ArgumentError: A variance is not positive, or memory does not hold what the family
                asks for.
        """
        return self.at_temperature(self.temperature, function_dist, target, *params)

    def at_temperature(
        self, temperature: float, function_dist: MultivariateNormal, target: Tensor, *params: Any
    ) -> Tensor:
        """The bound at another temperature, for the q that is best at the objective's own.

        Args:
            temperature: 1.0 for the bound of the evidence.
            function_dist: As for :meth:`forward`.
            target: As for :meth:`forward`.
            *params: As for :meth:`forward`.

        Returns:
            Nats per observed point, a number.
        """
        data = self.data_at(function_dist, target, *params)
        q, n = self.weights_at(data), len(data.residual)
        divergence = gaussian_kl(q, data.prior_variance)
        bound = data.expected_log_likelihood(q) - temperature * divergence
        return plus_priors(bound / n, self.model, n, params)

    def data_at(
        self, function_dist: MultivariateNormal, target: Tensor, *params: Any
    ) -> LinearData:
        """Features, residuals and variances of the observed points.

        Args:
            function_dist: As for :meth:`forward`.
            target: As for :meth:`forward`.
            *params: As for :meth:`forward`.
        """
        model = self.model
        check_train_mode(model)
        points = params[0] if params else cast(tuple[Tensor, ...], model.train_inputs)[0]
        if target.shape != function_dist.event_shape or len(points) != len(target):
            expected = f"({len(points)},), a target for each point of the model's output"
            raise ShapeError("target", tuple(target.shape), expected)
        residual = target - function_dist.mean
        # The covariance of the output is not evaluated: the bound takes features alone.
        phi = model.covar_module.features_of(points)
        missing = missing_targets(target)
        if missing is not None:
            phi, residual = phi[~missing], residual[~missing]
        return LinearData(phi, residual, model.prior_variance, model.noise.squeeze())

    def weights_at(self, data: LinearData) -> WeightDistribution:
        """The best member of the family, which the bound is of.

        Args:
            data: Of the points.
        """
        with torch.no_grad():
            noise = (self.temperature * data.noise).expand(len(data.residual))
            # Detached as well: a distribution may keep what it is made from.
            given = data.features.detach(), data.residual, data.prior_variance.detach(), noise
            return self.family.best(*given)
