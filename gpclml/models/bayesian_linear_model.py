"""Linear models of features, with everything in closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import Mean, ZeroMean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError
from gpclml.inference import PosteriorNormal
from gpclml.kernels import FeatureKernel, IdentityFeatures
from gpclml.linalg.gaussians import DualGaussian, FullGaussian, linear_posterior
from gpclml.models._checks import checked_points, checked_training_data

__all__ = ["BayesianLinearModel"]


class BayesianLinearModel(ExactGP):
    r"""Targets linear in features, :math:`y = m(x) + w^\top \phi(x) + \epsilon`.

    .. math:: w \sim N(0, S), \qquad \epsilon \sim N(0, \sigma^2)

    An exact GP: every objective and score of exact GPs takes it, and with fewer features than
    points costs n R² instead of n³. Prior variances, noise, and what the features depend on are
    GPyTorch parameters. Data stay in their own units; nothing is standardized.

    Args:
        train_x: Inputs, ``(n, d)``, or ``(n,)`` for one column.
        train_y: Targets, ``(n,)``; NaN where missing.
        features: Maps ``(n, d)`` to ``(n, R)``: a map of :mod:`gpclml.kernels`, any module or
            function; the columns themselves if None.
        prior_variance: S: a number for all weights, or one for each, ``(R,)``.
        noise: Noise variance :math:`\sigma^2`.
        mean: A GPyTorch mean; zero if None.

    Raises:
        ShapeError: Inputs and targets do not match, come in a batch, or the features do not fit.
        NonFiniteError: An input is not finite, or a target infinite.
        ArgumentError: A variance is not positive, or a dtype cannot be factored.

    Examples:
        >>> model = BayesianLinearModel(x, y, FourierFeatures(9), noise=0.01)
        >>> log_marginal_likelihood(model), learning_curve(model, orderings=100)
        >>> model.weight_posterior().mean
    """

    likelihood: GaussianLikelihood
    covar_module: FeatureKernel

    @checked(prior_variance="float () | (R,)")
    def __init__(
        self,
        train_x: Tensor,
        train_y: Tensor,
        features: Callable[[Tensor], Tensor] | None = None,
        *,
        prior_variance: float | Tensor = 1.0,
        noise: float = 1.0,
        mean: Mean | None = None,
    ) -> None:
        train_x, train_y = checked_training_data(train_x, train_y)
        if train_x.ndim != 2:
            mend = "Make one model for each member."
            raise ArgumentError("train_x", f"shape {tuple(train_x.shape)}", "(n, d)", mend)
        if not 0 < noise < float("inf"):
            raise ArgumentError("noise", noise, "a positive variance")
        likelihood = GaussianLikelihood(noise_constraint=Positive()).to(train_x)
        likelihood.noise = torch.as_tensor(noise, dtype=train_x.dtype, device=train_x.device)
        super().__init__(train_x, train_y, likelihood)
        variance = torch.as_tensor(prior_variance, dtype=train_x.dtype, device=train_x.device)
        kernel = FeatureKernel(IdentityFeatures() if features is None else features, variance)
        self.covar_module = kernel.to(train_x)
        self.mean_module = (ZeroMean() if mean is None else mean).to(train_x)
        with torch.no_grad():
            self.num_features = kernel.features_of(train_x[:1]).shape[-1]

    @property
    def prior_variance(self) -> Tensor:
        """Prior variances of the weights, ``(R,)``."""
        return self.covar_module.prior_variance.expand(self.num_features)

    @property
    def noise(self) -> Tensor:
        """The noise variance, ``(1,)``."""
        return self.likelihood.noise

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at points.

        Args:
            x: ``(n, d)``.
        """
        return MultivariateNormal(cast(Tensor, self.mean_module(x)), self.covar_module(x))

    def compute_custom_loss(self, mll: MarginalLogLikelihood, **kwargs: Any) -> Tensor:
        """The loss BoTorch minimizes under an objective that brings none of its own.

        Args:
            mll: The objective.
            **kwargs: Passed on to it.

        Returns:
            Minus the objective, a number.
        """
        x, y = self._training_data()
        return -cast(Tensor, mll(self(x), y, x, **kwargs))

    def features(self, x: Tensor) -> Tensor:
        """Features of points.

        Args:
            x: ``(n, d)``, or ``(n,)`` for one column.

        Returns:
            ``(n, R)``.

        Raises:
            ShapeError, NonFiniteError, ArgumentError: The points do not fit the training inputs.
        """
        return self.covar_module.features_of(checked_points(x, self._training_data()[0]))

    def weight_posterior(self) -> FullGaussian | DualGaussian:
        r"""The posterior of the weights given the observed targets.

        .. math:: \Sigma = (\Phi^\top \Phi / \sigma^2 + S^{-1})^{-1}, \qquad
            \mu = \Sigma \Phi^\top (y - m) / \sigma^2

        Returns:
            A full Gaussian, which :meth:`~gpclml.linalg.gaussians.FullGaussian.updated` by further
            points at 4 R² operations each; with more features than points one in dual form.

        Raises:
            ArgumentError: Memory does not hold it.

        Note:
            n R² + R³ operations, or n² R + n³/3.
        """
        x, y = self._training_data()
        observed = ~torch.isnan(y)
        x, y = x[observed], y[observed]
        residual = y - cast(Tensor, self.mean_module(x))
        noise = self.noise.expand(len(y))
        return linear_posterior(
            self.covar_module.features_of(x), residual, self.prior_variance, noise
        )

    @checked
    def predict(
        self, x: Tensor, observation_noise: bool = True, marginal: bool = False
    ) -> PosteriorNormal:
        """The posterior predictive at points, from the posterior of the weights.

        Args:
            x: ``(m, d)``, or ``(m,)`` for one column.
            observation_noise: Predict new observations, the default as everywhere in gpclml, or
                the noise-free function.
            marginal: Give a diagonal covariance: O(m) memory in place of O(m²).

        Returns:
            A normal with mean ``(m,)`` and covariance ``(m, m)``, diagonal with ``marginal``.

        Raises:
            ShapeError, NonFiniteError, ArgumentError: The points do not fit the training inputs.
        """
        x = checked_points(x, self._training_data()[0])
        posterior, phi = self.weight_posterior(), self.features(x)
        mean = cast(Tensor, self.mean_module(x)) + phi @ posterior.mean
        noise = self.noise.expand(len(x)) * float(observation_noise)
        if marginal:
            variance = posterior.predictive_variance(phi).clamp_min(0.0) + noise
            return PosteriorNormal(mean, DiagLinearOperator(variance))
        covariance = posterior.predictive_covariance(phi) + torch.diag_embed(noise)
        return PosteriorNormal(mean, covariance)

    def _training_data(self) -> tuple[Tensor, Tensor]:
        assert self.train_inputs is not None
        return self.train_inputs[0], cast(Any, self.train_targets)
