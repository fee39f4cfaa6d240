"""Models that are linear in their weights: Bayesian linear models, linearized networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import Mean, ZeroMean
from gpytorch.models import GP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml._utils.arrays import checked_training_data
from gpclml.curvature import GaussianWeightPrior
from gpclml.curvature.structure import in_single
from gpclml.errors import ArgumentError, MissingError, ShapeError
from gpclml.inference import PosteriorNormal
from gpclml.inference.posterior import checked_points
from gpclml.kernels import FeatureKernel, LinearizedMean, NeuralTangentKernel
from gpclml.kernels.networks import check_finite_output
from gpclml.linalg.gaussians import DualGaussian, FullGaussian, linear_posterior
from gpclml.models.base import RegressionGP

if TYPE_CHECKING:
    from gpclml._utils.arrays import ArrayLike

_OF_GPS = (
    "likelihood", "models", "num_outputs", "posterior", "train_inputs", "train_targets",
)  # fmt: skip

# A checker that does not read upstream's source knows this base.
assert issubclass(GP, torch.nn.Module)


class BayesianLinearModel(RegressionGP):
    r"""Targets linear in features, :math:`y = m(x) + w^\top \phi(x) + \epsilon`.

    .. math:: w \sim N(0, S), \qquad \epsilon \sim N(0, \sigma^2)

    It is an exact GP: every objective and score of exact GPs works on it, and costs n R² instead of
    n³ if there are fewer features than points. Prior variances, noise, and what the features depend
    on are GPyTorch parameters. Data are not standardized.

    Args:
        train_x: Inputs, ``(n, d)``, or ``(n,)`` for one column. A tensor, an array or a data frame,
            as for :class:`GPRegression`; so are points to predict at.
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
        >>> import torch
        >>> from gpclml import BayesianLinearModel, learning_curve, log_marginal_likelihood
        >>> from gpclml.kernels import FourierFeatures
        >>> x = torch.linspace(0, 1, 40)
        >>> model = BayesianLinearModel(x, x.sin(), FourierFeatures(9), noise=0.01)
        >>> evidence, curves = log_marginal_likelihood(model), learning_curve(model, orderings=100)
        >>> weights = model.weight_posterior().mean
    """

    likelihood: GaussianLikelihood
    covar_module: FeatureKernel

    @checked(prior_variance="float () | (R,)")
    def __init__(
        self,
        train_x: ArrayLike,
        train_y: ArrayLike,
        features: Callable[[Tensor], Tensor] | None = None,
        *,
        prior_variance: float | Tensor = 1.0,
        noise: float = 1.0,
        mean: Mean | None = None,
    ) -> None:
        data = checked_training_data(train_x, train_y)
        train_x, train_y = data.x, data.y
        if train_x.ndim != 2:
            suggestion = "Make one model for each member."
            raise ArgumentError("train_x", f"shape {tuple(train_x.shape)}", "(n, d)", suggestion)
        if not 0 < noise < float("inf"):
            raise ArgumentError("noise", noise, "a positive variance")
        likelihood = GaussianLikelihood(noise_constraint=Positive()).to(train_x)
        likelihood.noise = torch.as_tensor(noise, dtype=train_x.dtype, device=train_x.device)
        super().__init__(train_x, train_y, likelihood)
        self.column_names: list[str] | None = data.columns
        variance = torch.as_tensor(prior_variance, dtype=train_x.dtype, device=train_x.device)
        kernel = FeatureKernel(torch.nn.Identity() if features is None else features, variance)
        self.covar_module = kernel.to(train_x)
        self.mean_module: Any = (ZeroMean() if mean is None else mean).to(train_x)
        with torch.no_grad():
            self.num_features: int = kernel.features_of(train_x[:1]).shape[-1]

    @property
    def prior_variance(self) -> Tensor:
        """Prior variances of the weights, ``(R,)``."""
        return self.covar_module.prior_variance.expand(self.num_features)

    @property
    def noise(self) -> Tensor:
        """The noise variance, ``(1,)``."""
        return self.likelihood.noise

    def features(self, x: ArrayLike) -> Tensor:
        """Features of points ``(n, d)``, or ``(n,)`` for one column: ``(n, R)``."""
        points = checked_points(x, self._training_data()[0], self.column_names)
        return self.covar_module.features_of(points)

    def weight_posterior(self) -> FullGaussian | DualGaussian:
        r"""The posterior of the weights given the observed targets.

        .. math:: \Sigma = (\Phi^\top \Phi / \sigma^2 + S^{-1})^{-1}, \qquad
            \mu = \Sigma \Phi^\top (y - m) / \sigma^2

        Returns:
            A full Gaussian; with more features than points a Gaussian in dual form.

        Raises:
            ArgumentError: Memory does not suffice.

        Note:
            n R² + R³ operations, or n² R + n³/3.
        """
        x, y = self._training_data()
        observed = ~torch.isnan(y)
        # A missing target says nothing of the weights.
        x, y = x[observed], y[observed]
        residual = y - cast(Tensor, self.mean_module(x))
        phi, noise = self.covar_module.features_of(x), self.noise.expand(len(y))
        return linear_posterior(phi, residual, self.prior_variance, noise)

    @checked
    def predict(
        self, x: ArrayLike, observation_noise: bool = True, marginal: bool = False
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
        x = checked_points(x, self._training_data()[0], self.column_names)
        posterior, phi = self.weight_posterior(), self.features(x)
        mean = cast(Tensor, self.mean_module(x)) + phi @ posterior.mean
        noise = self.noise.expand(len(x)) * float(observation_noise)
        if marginal:
            # Rounding may take a variance of nearly nothing below zero.
            variance = posterior.predictive_variance(phi).clamp_min(0.0) + noise
            return PosteriorNormal(mean, DiagLinearOperator(variance))
        covariance = posterior.predictive_covariance(phi) + torch.diag_embed(noise)
        return PosteriorNormal(mean, covariance)


class Linearization(MultivariateNormal):
    """The linearized network at points, for objectives of networks.

    It has no covariance matrix: what GPyTorch asks it for beyond its mean raises a
    :class:`~gpclml.errors.MissingError` that says how to predict. A likelihood that is called with
    it ends there.

    Args:
        points: Inputs of the network, ``(N, *event)``, after the augmentation.
        mean: The network's outputs, ``(N, C)``.
    """

    def __init__(self, points: Tensor, mean: Tensor) -> None:  # of a MultivariateNormal, only these
        self.points = points
        self._mean = mean

    @property
    def mean(self) -> Tensor:
        """The network's outputs, ``(N, C)``."""
        return self._mean

    def __getattr__(self, name: str) -> Any:
        """A MissingError for all else that a normal distribution has."""
        raise MissingError(
            f"model(x).{name}", "the output of a LinearizedNetwork, which has none",
            "the distribution of a Laplace approximation or a GP",
            "Predict with Laplace or LinearizedGP; model(x) is for the objective.",
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mean={tuple(self._mean.shape)})"


class LinearizedNetwork(GP):
    r"""The model :math:`f(x; w_*) + J_{w_*}(x) (w - w_*)` with a Gaussian prior over w.

    The Laplace approximation with the generalized Gauss-Newton matrix is exact for this model
    (Immer et al. 2021, Section 2). It is linear around the current weights of the network, which
    are trained as usual. Its output is for objectives and no distribution: predict with
    :class:`gpclml.Laplace` or :class:`LinearizedGP`.

    Given its training data it can be fitted as a GP, by ``fit_gpytorch_mll(mll)`` of BoTorch: the
    hyperparameters climb the evidence at the weights as they are. In eval mode ``model(x)`` is then
    the posterior of the objective made of it last, and ``likelihood(model(x))`` predicts targets.

    Args:
        network: Maps ``(N, *event)`` to ``(N, C)``, each point on its own.
        prior: Prior over its trainable parameters; if None a precision of one for each layer.
        augmentation: Maps points, ``(N, *event)``, to the inputs of the network; for one that
            averages its outputs over S versions of each point these are ``(N, S, *event)``. Its
            parameters are hyperparameters.
        train_inputs: Training points, ``(N, *event)``; a loader is for ``fit_online``.
        train_targets: Their targets.

    Examples:
        >>> import torch
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpclml import MLP, LaplaceMarginalLogLikelihood, LinearizedNetwork
        >>> x, model = torch.rand(50, 3), LinearizedNetwork(MLP([3, 20, 1]))
        >>> mll = LaplaceMarginalLogLikelihood(GaussianLikelihood(), model, num_data=len(x))
        >>> loss = -mll(model(x[:10]), x[:10].sum(-1))
    """

    @checked
    def __init__(
        self,
        network: torch.nn.Module,
        prior: GaussianWeightPrior | None = None,
        augmentation: torch.nn.Module | None = None,
        *,
        train_inputs: Tensor | None = None,
        train_targets: Tensor | None = None,
    ) -> None:
        super().__init__()
        if (train_inputs is None) != (train_targets is None):
            missing = "train_inputs" if train_inputs is None else "train_targets"
            raise ArgumentError(missing, None, "points and targets, or neither")
        if train_inputs is not None and train_targets is not None:
            if len(train_inputs) != len(train_targets):
                expected = f"{len(train_inputs)} targets, as points"
                raise ShapeError("train_targets", tuple(train_targets.shape), expected)
            self.train_inputs: tuple[Tensor] = (train_inputs,)
            self.train_targets: Tensor = train_targets
        self._posterior: Callable[[Tensor], MultivariateNormal] | None = None
        self.augmentation = augmentation
        self.network = network
        self.prior: GaussianWeightPrior = GaussianWeightPrior(network) if prior is None else prior

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
        return Linearization(points, in_single(mean))

    def points(self, x: Tensor) -> Tensor:
        """What the network is given at points: themselves, or what the augmentation makes of them.

        Args:
            x: Points, ``(N, *event)``.
        """
        return x if self.augmentation is None else self.augmentation(x)

    def __getattr__(self, name: str) -> Any:
        """A MissingError for what optimizers and acquisition functions ask GPs for."""
        if name in _OF_GPS:
            raise MissingError(
                f"model.{name}", "a LinearizedNetwork, which has none",
                "a GP with its training data and likelihood",
                "Give it train_inputs and train_targets, or fit with fit_map, fit_online or "
                "fit_hyperparameters, which take the data or a loader; predict with Laplace.",
            )  # fmt: skip
        return super().__getattr__(name)

    def __call__(self, x: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See :meth:`forward`; in eval mode of a model with data their posterior."""
        if self.training or self._posterior is None:
            return torch.nn.Module.__call__(self, x)
        return self._posterior(x)


class LinearizedGP(RegressionGP):
    r"""A network, linear in its weights around where they are, as a GP over functions.

    Every objective of exact GPs works on it. Its evidence is that of the linear model with the
    weights integrated out exactly, and at least the Laplace evidence at :math:`w_*`:

    .. math:: \text{GP} - \text{Laplace} = \tfrac12 g^\top (H + P_0)^{-1} g

    with g the gradient of the log joint density; the two are equal at the mode. The weights
    :math:`w_*` were trained on all data, so a conditional density is not that of a network trained
    only on the points that are conditioned on.

    Args:
        train_x: Points, ``(n, d)``.
        train_y: Their targets, ``(n,)``.
        likelihood: A Gaussian likelihood.
        network: The network, of one output, and its prior.

    Examples:
        >>> import torch
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpclml import MLP, LinearizedNetwork, log_marginal_likelihood
        >>> from gpclml.models import LinearizedGP
        >>> x, network = torch.rand(50, 3), LinearizedNetwork(MLP([3, 20, 1]))
        >>> model = LinearizedGP(x, x.sum(-1), GaussianLikelihood(), network)
        >>> evidence = log_marginal_likelihood(model)
    """

    @checked(train_x="float (N, *event)", train_y="float (N,)")
    def __init__(
        self, train_x: Tensor, train_y: Tensor, likelihood: Likelihood, network: LinearizedNetwork
    ) -> None:
        super().__init__(train_x, train_y, cast(Any, likelihood))
        self.mean_module: Any = LinearizedMean(network.network)
        self.covar_module: Any = NeuralTangentKernel(network.network, network.prior)
