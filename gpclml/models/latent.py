"""Gaussian processes of classes, counts and targets with outliers, by Laplace's approximation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from gpytorch.means import Mean
from gpytorch.models import ExactGP
from gpytorch.priors import LogNormalPrior, MultivariateNormalPrior, NormalPrior
from torch import Tensor

from gpclml._utils.arguments import check_placement, checked
from gpclml._utils.arrays import checked_training_data, points_as_tensor
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.inference.posterior import exact_posterior, has_constant_caches, new_points, reading
from gpclml.kernels import DeepKernel
from gpclml.likelihoods import (
    LogisticLikelihood,
    LogNegativeBinomialLikelihood,
    LogPoissonLikelihood,
    TargetPrediction,
    target_density,
)
from gpclml.models.base import RegressionGP, StandardizedGP
from gpclml.models.regression import scales_of
from gpclml.models.standardize import Standardizer

if TYPE_CHECKING:
    from gpclml._utils.arrays import ArrayLike

# Of logarithms: a lengthscale around exp(√2) √d with the deviation √3 as BoTorch has it, and scales
# of latent values with the deviation 1.5.
_LOG_LENGTHSCALE, _LENGTHSCALE_DEVIATION = math.sqrt(2), math.sqrt(3)
_SCALE_DEVIATION, _MEAN_DEVIATION = 1.5, 3.0
_SIZE, _SIZE_DEVIATION = 5.0, 2.0  # of the negative binomial: 95 % between .1 and 250


class LatentGP(RegressionGP):
    r"""A Gaussian process whose targets depend on its latent values by any likelihood.

    :math:`f \sim \mathcal{GP}(m, k)`, and each target :math:`y_i` has the density
    :math:`p(y_i \mid f(x_i))` of the likelihood: classes, counts, or numbers with outliers. It is
    subclassed as GPyTorch's ``ExactGP`` is: with a ``mean_module``, a ``covar_module`` and, where
    the prior is another, a ``forward``. In train mode ``model(train_x)`` is the prior of the latent
    values; in eval mode ``model(x)`` is their posterior, by Laplace's approximation or expectation
    propagation (Rasmussen and Williams 2006, Sections 3.4 and 3.6), and ``likelihood(model(x))``
    the distribution of targets.

    It is trained by :class:`~gpclml.mlls.LaplaceMarginalLogLikelihood`, or by
    :class:`~gpclml.mlls.ConditionalMarginalLogLikelihood` with held-out points.

    Args:
        train_inputs: ``(*batch, n, d)``, or ``(n,)`` for one column.
        train_targets: ``(*batch, n)``, such as zeros and ones of ``BernoulliLikelihood``.
        likelihood: See :func:`gpclml.likelihoods.target_density`.

    Attributes:
        train_offset: Numbers that are added to the latent values of the training points, such as
            logarithms of exposures, ``(*batch, n)``; None for none.
        approximation: Of posteriors, scores and
            :class:`~gpclml.mlls.ConditionalMarginalLogLikelihood`: ``"laplace"``, or ``"ep"`` for
            expectation propagation, for likelihoods whose logarithm is concave.
            ``LaplaceMarginalLogLikelihood`` is Laplace's in both cases.

    Raises:
        UnsupportedError: The likelihood is Gaussian, or has not one latent value a target.
        ArgumentError: A target that the likelihood does not take.

    Note:
        An evaluation of Laplace's evidence takes about five Cholesky factors of n x n. Expectation
        propagation takes several times as many, and its evidence is nearly exact, where Laplace's
        is too small for classes by some tenths of a nat a target if the scale of the latent values
        is 100. Of classes without noise the scale grows in a fit until a prior or the approximation
        ends it; the models below have priors. Beyond a few thousand points GPyTorch's variational
        models are the ones to take.

    Examples:
        >>> import torch
        >>> from gpytorch.kernels import MaternKernel, ScaleKernel
        >>> from gpytorch.likelihoods import StudentTLikelihood
        >>> from gpytorch.means import ConstantMean
        >>> from gpclml import LaplaceMarginalLogLikelihood, fit_mll
        >>> from gpclml.models import LatentGP
        >>> class RobustGP(LatentGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, StudentTLikelihood())
        ...         self.mean_module = ConstantMean()
        ...         self.covar_module = ScaleKernel(MaternKernel())
        ...
        >>> x = torch.linspace(0, 1, 30)
        >>> model = RobustGP(x, (6 * x).sin() + 3 * (x > 0.97))
        >>> result = fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
        >>> mean = model.predict(x).mean
    """

    likelihood: Any  # ExactGP has a Gaussian one
    train_offset: Tensor | None = None
    approximation: Literal["laplace", "ep"] = "laplace"

    @checked
    def __init__(
        self,
        train_inputs: Tensor | Iterable[Tensor] | None,
        train_targets: Tensor | None,
        likelihood: Likelihood,
    ) -> None:
        density = target_density(likelihood)
        super(ExactGP, self).__init__()  # whose own constructor takes Gaussian likelihoods alone
        if isinstance(train_inputs, Tensor):
            train_inputs = (train_inputs,)
        if train_inputs is not None:
            train_inputs = tuple(x.unsqueeze(-1) if x.ndim == 1 else x for x in train_inputs)
            target = cast(Tensor, train_targets)
            shape = train_inputs[0].shape[:-1]
            if target.shape[-1:] != shape[-1:]:
                raise ShapeError("train_targets", tuple(target.shape), str(tuple(shape)))
            if train_inputs[0].is_floating_point() and not target.is_floating_point():
                train_targets = target = target.to(train_inputs[0])
            density.check_targets("train_targets", target)
        self.train_inputs: Any = train_inputs
        self.train_targets: Any = train_targets
        self.likelihood = likelihood
        self.prediction_strategy: Any = None

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Any:
        if self.train_offset is not None:
            self.train_offset = fn(self.train_offset)
        return super()._apply(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> MultivariateNormal:
        """The prior in train mode; in eval mode the posterior of latent values at any points."""
        known = self.train_inputs
        if self.training or known is None or settings.prior_mode.on():
            prior = cast(MultivariateNormal, super().__call__(*args, **kwargs))
            is_known = known is not None and (self.training or args[0] is known[0])
            if self.train_offset is None or not is_known:
                return prior
            mean = prior.mean + self.train_offset
            return MultivariateNormal(mean, prior.lazy_covariance_matrix)
        if kwargs or len(args) != 1:
            raise UnsupportedError("model", "several inputs", "one tensor of points in eval mode")
        x = args[0].unsqueeze(-1) if args[0].ndim == 1 else args[0]
        return exact_posterior(self, x, marginal=False, constant=has_constant_caches(self))

    @checked
    def predict(
        self, x: ArrayLike, offset: ArrayLike | None = None, *, progress: bool | None = None
    ) -> TargetPrediction:
        """Predictions of targets at x, by quadrature over the posterior of each latent value.

        Every module keeps its mode, so that it can be called during training.

        Args:
            x: Points, ``(*batch, m, d)``, or ``(m,)`` for one column.
            offset: Numbers that are added to the latent values at x, such as logarithms of
                exposures, ``(*batch, m)``.
            progress: Whether to show a bar where there are many points; None shows it on terminals
                and in notebooks.

        Returns:
            Mean, probabilities, quantiles and densities of the targets.

        Raises:
            ArgumentError, ShapeError, NonFiniteError: The points do not fit the training inputs, or
                the offset does not fit the points.
            NonFiniteError, NotPSDError: The posterior cannot be computed.
        """
        with reading(self):
            points = new_points(self, x)
            latent = exact_posterior(self, points, marginal=True, progress=progress)
        mean = latent.mean if offset is None else latent.mean + _checked_offset(offset, points)
        return TargetPrediction(self.likelihood, mean, latent.variance)


def _checked_offset(offset: ArrayLike, x: Tensor) -> Tensor:
    """Offsets as a tensor like points, one for each."""
    values = points_as_tensor(offset, x, None, "offset")
    check_placement("offset", values, x, "the inputs")
    if values.shape != x.shape[:-1]:
        raise ShapeError("offset", tuple(values.shape), str(tuple(x.shape[:-1])))
    if bad := int((~torch.isfinite(values)).sum()):
        suggestion = "It is the logarithm of the exposure, which has to be positive."
        raise NonFiniteError("offset", f"{bad} non-finite values", "finite numbers", suggestion)
    return values


class _StandardizedLatentGP(StandardizedGP, LatentGP):
    """A latent GP of standardized inputs with a kernel and a mean by name, and weak priors."""

    @checked
    def __init__(
        self,
        train_x: ArrayLike,
        train_y: ArrayLike,
        kernel: str | Kernel,
        mean: str | Mean,
        likelihood: Likelihood,
        *,
        offset: ArrayLike | None,
        start: Callable[[Tensor], Tensor],
        scale: float,
        standardize: bool,
        seed: int,
        **build: Any,
    ) -> None:
        data = checked_training_data(train_x, train_y)
        make = Standardizer.fit if standardize else Standardizer.identity
        units = make(data.x, dim=-2)
        units.check_representable("train_x", power=1)
        likelihood = likelihood.to(data.x)
        constant = start(data.y)  # of the mean, for each member of a batch
        target_density(likelihood).check_targets("train_y", data.y)
        super().__init__(data.x, data.y, likelihood)
        self.input_standardizer: Standardizer = units
        self.column_names: list[str] | None = data.columns
        if offset is not None:
            self.train_offset = _checked_offset(offset, data.x)
        self._make_modules(kernel, mean, data.y, seed, standardize=standardize, **build)
        if mean == "constant":
            self.mean_module.initialize(constant=constant)
            prior = NormalPrior(constant, torch.full_like(constant, _MEAN_DEVIATION))
            self.mean_module.register_prior("constant_prior", prior, "constant")
        if isinstance(kernel, str):
            add_latent_priors(self.covar_module, data.x, scale)

    def _in_original_units(self, path: str, value: Tensor) -> Tensor:
        if path.endswith(("outputscale", "constant")):
            return value
        return super()._in_original_units(path, value)


def add_latent_priors(
    kernel: Kernel, x: Tensor, scale: float = 4.0, spread: float | None = None
) -> None:
    """Gives scales and lengthscales of a kernel of standardized inputs weak priors; scales a start.

    Lengthscales have priors of their own; or with ``spread``, the deviation of their logarithms
    around a common one, the prior is that one's. Kernels by name have theirs already.
    """
    for module in scales_of(kernel):
        if isinstance(module, ScaleKernel):
            module.outputscale = scale
            prior = LogNormalPrior(math.log(scale), _SCALE_DEVIATION).to(x)
            module.register_prior("outputscale_prior", prior, "outputscale")
    if any(isinstance(module, DeepKernel) for module in kernel.modules()):
        return  # distances between features have no scale that is known
    around = _LOG_LENGTHSCALE + 0.5 * math.log(x.shape[-1])
    for module in kernel.modules():
        if not isinstance(module, RBFKernel | MaternKernel | RQKernel):
            continue
        if spread is None:
            prior, parameter = LogNormalPrior(around, _LENGTHSCALE_DEVIATION).to(x), "lengthscale"
        else:
            mean = torch.full_like(x[0], around)
            covariance = _LENGTHSCALE_DEVIATION**2 + spread**2 * torch.eye(len(mean)).to(x)
            prior, parameter = MultivariateNormalPrior(mean, covariance), _log_lengthscale
        module.register_prior("lengthscale_prior", prior, parameter)


def _log_lengthscale(kernel: Kernel) -> Tensor:
    return cast(Tensor, kernel.lengthscale).log().squeeze(-2)


class GPClassification(_StandardizedLatentGP):
    r"""A Gaussian process classifier of two classes, 0 and 1, ready to train.

    :math:`p(y = 1 \mid x) = \Phi(f(x))` with the normal distribution function, or another
    likelihood of classes, and :math:`f \sim \mathcal{GP}(m, k)` of standardized inputs. It is
    trained by Laplace's evidence and predicts by expectation propagation: at the mode of their
    posterior latent values are too near to zero, and probabilities of classes that are told apart
    well too near to 1/2 (Kuss and Rasmussen 2005).

    Kernels by name have weak priors, which count more than the objective does where points are
    few: log-normal ones of the lengthscales (around :math:`e^{\sqrt 2} \sqrt d` with the deviation
    :math:`\sqrt 3` of the logarithm) and the scale (around 4 with 1.5); the mean starts at the
    frequency of class 1.

    Args:
        train_x: Inputs, ``(*batch, n, d)``, or ``(n,)`` for one column: a tensor, an array or a
            data frame of numbers.
        train_y: Classes 0 and 1, ``(*batch, n)``; numbers or booleans. For labels of other kinds
            and for more classes use :class:`gpclml.tables.Classifier`.
        kernel: A name as for :class:`~gpclml.models.GPRegression`, or a GPyTorch kernel, which has
            the priors that it comes with.
        mean: "constant", "zero" or "mlp", or a GPyTorch mean.
        likelihood: GPyTorch's ``BernoulliLikelihood`` if None; or
            :class:`~gpclml.likelihoods.LogisticLikelihood`.
        approximation: Of the posterior; see :class:`LatentGP`.
        standardize: Whether to standardize inputs.
        ard: Whether named kernels have a lengthscale for each column.
        num_features: Outputs of a deep kernel's network.
        hidden: Widths of the hidden layers of networks.
        seed: Seed of networks.

    Raises:
        ArgumentError: A class that is not 0 or 1, or one class alone.
        ShapeError, NonFiniteError, UnknownNameError: As for ``GPRegression``.

    Examples:
        >>> import torch
        >>> from sklearn.datasets import load_breast_cancer
        >>> from gpclml import LaplaceMarginalLogLikelihood, fit_mll
        >>> from gpclml.models import GPClassification
        >>> x, y = load_breast_cancer(return_X_y=True)
        >>> model = GPClassification(x[:60, :5], y[:60])
        >>> result = fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
        >>> probabilities = model.predict(x[60:, :5]).probabilities
    """

    @checked
    def __init__(
        self,
        train_x: ArrayLike,
        train_y: ArrayLike,
        kernel: str | Kernel = "matern",
        mean: str | Mean = "constant",
        likelihood: Likelihood | None = None,
        *,
        approximation: Literal["laplace", "ep"] = "ep",
        standardize: bool = True,
        ard: bool = True,
        num_features: int = 2,
        hidden: Sequence[int] = (50, 50),
        seed: int = 0,
    ) -> None:
        likelihood = BernoulliLikelihood() if likelihood is None else likelihood

        def start(y: Tensor) -> Tensor:
            bad = ~((y == 0) | (y == 1) | y.isnan())
            suggestion = "Use gpclml.tables.Classifier for labels of any kind."
            if bool(bad.any()):
                got = f"{float(y[bad][0]):g} among them"
                raise ArgumentError("train_y", got, "the classes 0 and 1", suggestion)
            for label in (0, 1):
                if bool((y != label).all(-1).any()):
                    got, suggestion = f"no point of class {label}", "Give points of both."
                    raise ArgumentError("train_y", got, "both classes, 0 and 1", suggestion)
            share = y.nanmean(-1).clamp(0.02, 0.98)
            is_logistic = isinstance(likelihood, LogisticLikelihood)
            return share.logit() if is_logistic else torch.special.ndtri(share)

        super().__init__(
            train_x, train_y, kernel, mean, likelihood, offset=None, start=start, scale=4.0,
            standardize=standardize, ard=ard, num_features=num_features, hidden=hidden, seed=seed,
        )  # fmt: skip
        self.approximation = approximation


class GPCounts(_StandardizedLatentGP):
    r"""A Gaussian process of counts: :math:`E[y \mid f] = e^{f(x) + \text{offset}}`.

    Counts are negative binomial, with one size for all points that is learned, or of another
    likelihood of counts. Inputs are standardized, and kernels by name have weak log-normal priors,
    as in :class:`GPClassification`, the scale one around 1; so has the size, around 5. The mean
    starts at that of the counts.

    Args:
        train_x: Inputs, ``(*batch, n, d)``, or ``(n,)`` for one column.
        train_y: Counts, whole numbers from 0 on, ``(*batch, n)``.
        kernel: A name as for :class:`~gpclml.models.GPRegression`, or a GPyTorch kernel.
        mean: "constant", "zero" or "mlp", or a GPyTorch mean.
        likelihood: :class:`~gpclml.likelihoods.LogNegativeBinomialLikelihood` if None.
        offset: Logarithms of exposures, such as years or populations that counts are of,
            ``(*batch, n)``; pass those of new points to :meth:`predict`.
        standardize: Whether to standardize inputs.
        ard: Whether named kernels have a lengthscale for each column.
        num_features: Outputs of a deep kernel's network.
        hidden: Widths of the hidden layers of networks.
        seed: Seed of networks.

    Raises:
        ArgumentError: A count that is negative or not whole.
        NonFiniteError: An offset is not finite, as the logarithm of an exposure of zero.
        ShapeError, UnknownNameError: As for ``GPRegression``.

    Examples:
        >>> import torch
        >>> from gpclml import LaplaceMarginalLogLikelihood, fit_mll
        >>> from gpclml.models import GPCounts
        >>> x = torch.linspace(0, 1, 40, dtype=torch.float64)
        >>> model = GPCounts(x, torch.poisson(3 * x, generator=torch.Generator().manual_seed(0)))
        >>> result = fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
        >>> high = model.predict(x).quantile(0.95)
    """

    @checked
    def __init__(
        self,
        train_x: ArrayLike,
        train_y: ArrayLike,
        kernel: str | Kernel = "matern",
        mean: str | Mean = "constant",
        likelihood: Likelihood | None = None,
        *,
        offset: ArrayLike | None = None,
        standardize: bool = True,
        ard: bool = True,
        num_features: int = 2,
        hidden: Sequence[int] = (50, 50),
        seed: int = 0,
    ) -> None:
        if likelihood is None:
            prior = LogNormalPrior(math.log(_SIZE), _SIZE_DEVIATION)
            likelihood = LogNegativeBinomialLikelihood(size_prior=prior)
            likelihood.size = _SIZE
        has_log_link = isinstance(likelihood, LogPoissonLikelihood | LogNegativeBinomialLikelihood)

        def start(y: Tensor) -> Tensor:
            mean = y.nanmean(-1) + 0.1
            if offset is not None:
                mean = mean / points_as_tensor(offset, y, None, "offset").exp().mean(-1)
            # Else the number of which the softplus is the mean.
            return mean.log() if has_log_link else mean + (-torch.expm1(-mean)).log()

        super().__init__(
            train_x, train_y, kernel, mean, likelihood, offset=offset, start=start, scale=1.0,
            standardize=standardize, ard=ard, num_features=num_features, hidden=hidden, seed=seed,
        )  # fmt: skip
