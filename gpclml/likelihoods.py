r"""Likelihoods that are not Gaussian, and what Laplace's approximation needs of any.

Each target depends on its own latent value f alone. :func:`target_density` gives the logarithm of
p(y | f) and its first three derivatives with respect to f, for likelihoods of this package and of
GPyTorch, and for a user's own by autograd.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, PoissonLikelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, NegativeBinomial, Poisson
from torch.nn.functional import logsigmoid, softplus

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, UnsupportedError

__all__ = [
    "LogNegativeBinomialLikelihood",
    "LogPoissonLikelihood",
    "LogisticLikelihood",
    "TargetDensity",
    "target_density",
]

# A checker that does not read upstream's source knows this base.
assert issubclass(_OneDimensionalLikelihood, torch.nn.Module)

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_LARGE = 1e3  # arguments of the gamma function above which Stirling's series has all digits


class LogisticLikelihood(_OneDimensionalLikelihood):
    r"""Classes 0 and 1 with the logistic function: :math:`p(y = 1 \mid f) = 1 / (1 + e^{-f})`.

    GPyTorch's ``BernoulliLikelihood`` has the normal distribution function in its place.

    Examples:
        >>> import torch
        >>> from gpclml.likelihoods import LogisticLikelihood
        >>> LogisticLikelihood()(torch.zeros(3)).probs
        tensor([0.5000, 0.5000, 0.5000])
    """

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        """The distribution of targets at latent values."""
        return Bernoulli(logits=function_samples)


class LogPoissonLikelihood(_OneDimensionalLikelihood):
    r"""Counts with a Poisson distribution of mean :math:`e^f`.

    GPyTorch's ``PoissonLikelihood`` has the mean :math:`\log(1 + e^f)`.

    Examples:
        >>> import torch
        >>> from gpclml.likelihoods import LogPoissonLikelihood
        >>> LogPoissonLikelihood()(torch.zeros(2)).mean
        tensor([1., 1.])
    """

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Poisson:
        """The distribution of targets at latent values."""
        return Poisson(function_samples.exp())


class LogNegativeBinomialLikelihood(_OneDimensionalLikelihood):
    r"""Counts with mean :math:`\mu = e^f` and variance :math:`\mu + \mu^2 / r`.

    The size r is one hyperparameter for all points; as it grows the distribution becomes Poisson's.
    In GPyTorch's ``NegativeBinomialLikelihood`` the mean is :math:`\log(1 + e^f)` and the variance
    a multiple of it.

    Args:
        batch_shape: Shape of the batch of sizes.
        size_prior: Prior of the size.
        size_constraint: Constraint of the size; positive if None.

    Examples:
        >>> import torch
        >>> from gpclml.likelihoods import LogNegativeBinomialLikelihood
        >>> likelihood = LogNegativeBinomialLikelihood()
        >>> likelihood.size = 2.0
        >>> likelihood(torch.zeros(1)).variance.item()
        1.5
    """

    raw_size: Tensor
    raw_size_constraint: Interval

    def __init__(
        self,
        batch_shape: torch.Size = torch.Size([]),  # noqa: B008 - as GPyTorch's likelihoods
        size_prior: Prior | None = None,
        size_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        self.raw_size = torch.nn.Parameter(torch.zeros(*batch_shape, 1))
        self.register_constraint("raw_size", size_constraint or Positive())
        if size_prior is not None:
            self.register_prior("size_prior", size_prior, lambda m: m.size, _set_size)

    @property
    def size(self) -> Tensor:
        """The size r, ``(*batch, 1)``."""
        return self.raw_size_constraint.transform(self.raw_size)

    @size.setter
    def size(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value).to(self.raw_size)
        self.initialize(raw_size=self.raw_size_constraint.inverse_transform(value))

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> NegativeBinomial:
        """The distribution of targets at latent values."""
        return NegativeBinomial(self.size, logits=function_samples - self.size.log())


def _set_size(likelihood: LogNegativeBinomialLikelihood, value: Tensor) -> None:
    likelihood.size = value


class Derivatives(NamedTuple):
    """Log densities of targets with derivatives by their latent values, ``(*batch, n)`` each.

    Attributes:
        log_prob: Logarithm of p(y | f).
        first, second, third: Its derivatives.
    """

    log_prob: Tensor
    first: Tensor
    second: Tensor
    third: Tensor


class TargetDensity:
    """The density of targets given their latent values, by a likelihood as it is.

    Args:
        likelihood: Gives the distribution of independent targets at latent values.

    Attributes:
        is_log_concave: Whether it is known that no second derivative is positive.
    """

    is_log_concave: bool = False

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood: Any = likelihood

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Logarithm of p(y | f), differentiable three times in f and once in parameters."""
        return self._distribution(f).log_prob(y)

    def derivatives(self, f: Tensor, y: Tensor) -> Derivatives:
        """At latent values ``(*batch, n)``, without a graph; here by autograd."""
        with torch.enable_grad():
            f = f.detach().requires_grad_()
            log_prob = self.log_prob(f, y)
            (first,) = torch.autograd.grad(log_prob.sum(), f, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), f, create_graph=True)
            (third,) = torch.autograd.grad(second.sum(), f)
        return Derivatives(*(t.detach() for t in (log_prob, first, second, third)))

    @property
    def parameters(self) -> list[Tensor]:
        """Hyperparameters of the likelihood that are trained."""
        return [p for p in self.likelihood.parameters() if p.requires_grad]

    def parameter_gradients(
        self, f: Tensor, y: Tensor, weights: tuple[Tensor, Tensor, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Gradients of a weighted sum of log density, first and second derivative at fixed f."""
        parameters = self.parameters
        if not parameters:
            return []
        with torch.enable_grad():
            f = f.detach().requires_grad_()
            log_prob = self.log_prob(f, y)
            (first,) = torch.autograd.grad(log_prob.sum(), f, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), f, create_graph=True)
            terms = zip(weights, (log_prob, first, second), strict=True)
            total = torch.stack([(weight * term).sum() for weight, term in terms]).sum()
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        pairs = zip(parameters, gradients, strict=True)
        return [(p, g) for p, g in pairs if g is not None]

    def check_targets(self, name: str, y: Tensor) -> None:
        """Refuses targets that the likelihood gives no density, such as classes other than 0 and 1.

        Raises:
            ArgumentError: There are some; NaN is taken for missing.
        """
        with torch.no_grad():
            distribution = self._distribution(torch.zeros_like(y))
        support = cast(Any, distribution.support)
        bad = ~support.check(y) & ~y.isnan()
        if bool(bad.any()):
            kind = type(self.likelihood).__name__
            expected = _SUPPORTS.get(type(distribution), f"values of {support}")
            raise ArgumentError(
                name, f"{float(y[bad][0]):g} among them", f"{expected}, which {kind} takes"
            )

    def _distribution(self, f: Tensor) -> Distribution:
        distribution = self.likelihood(f)
        # Values are checked at the door; where a search goes, they need not be finite.
        distribution._validate_args = False
        return distribution


_SUPPORTS = {
    Bernoulli: "zeros and ones",
    Poisson: "whole numbers from 0 on",
    NegativeBinomial: "whole numbers from 0 on",
}


class _Probit(TargetDensity):
    """GPyTorch's ``BernoulliLikelihood``, whose own log density is cut off far from zero."""

    is_log_concave = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.special.log_ndtr((2 * y - 1) * f)

    def derivatives(self, f: Tensor, y: Tensor) -> Derivatives:
        sign = 2 * y - 1
        z = sign * f
        log_prob = torch.special.log_ndtr(z)
        ratio = (-0.5 * z.square() - _HALF_LOG_2PI - log_prob).exp()
        second = (-ratio * (z + ratio)).clamp_max(0.0)
        third = sign * (-second * (z + 2 * ratio) - ratio)
        return Derivatives(log_prob, sign * ratio, second, third)


class _Logistic(TargetDensity):
    is_log_concave = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return logsigmoid((2 * y - 1) * f)

    def derivatives(self, f: Tensor, y: Tensor) -> Derivatives:
        # p and 1 - p each by itself: a difference would lose the digits of the smaller.
        p, q = torch.sigmoid(f), torch.sigmoid(-f)
        second = -p * q
        return Derivatives(self.log_prob(f, y), torch.where(y > 0, q, -p), second, second * (q - p))


class _LogPoisson(TargetDensity):
    is_log_concave = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return y * f - f.exp() - torch.lgamma(y + 1)

    def derivatives(self, f: Tensor, y: Tensor) -> Derivatives:
        mean = f.exp()
        return Derivatives(self.log_prob(f, y), y - mean, -mean, -mean)


class _SoftplusPoisson(TargetDensity):
    """GPyTorch's ``PoissonLikelihood``, whose own log density is lost where its mean underflows."""

    is_log_concave = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean = softplus(f)
        # The logarithm of log(1 + e^f), whose series is f - e^f / 2.
        low = f < -20.0
        log_mean = torch.where(low, f - 0.5 * f.exp(), softplus(f.clamp_min(-20.0)).log())
        return y * log_mean - mean - torch.lgamma(y + 1)


class _LogNegativeBinomial(TargetDensity):
    is_log_concave = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        size = self.likelihood.size.to(f.dtype)
        odds = -logsigmoid(size.log() - f)  # log(1 + mean / size)
        return _log_rising(size, y) - torch.lgamma(y + 1) + y * f - (y + size) * odds

    def derivatives(self, f: Tensor, y: Tensor) -> Derivatives:
        size = self.likelihood.size.detach().to(f.dtype)
        p, q = torch.sigmoid(f - size.log()), torch.sigmoid(size.log() - f)
        with torch.no_grad():
            log_prob = self.log_prob(f, y)
        second = -(y + size) * p * q
        return Derivatives(log_prob, y * q - size * p, second, second * (q - p))


def _log_rising(size: Tensor, y: Tensor) -> Tensor:
    r"""Logarithm of :math:`\Gamma(r + y) / (\Gamma(r) r^y)`, which is near zero for large r.

    There the two logarithms of gamma functions agree in all their digits, and Stirling's series
    gives their difference.
    """
    is_large = size > _LARGE
    r = torch.where(is_large, size, _LARGE)
    series = (r + y - 0.5) * (y / r).log1p() - y + _stirling(r + y) - _stirling(r)
    r = torch.where(is_large, 1.0, size)
    return torch.where(is_large, series, torch.lgamma(r + y) - torch.lgamma(r) - y * r.log())


def _stirling(x: Tensor) -> Tensor:
    return 1 / (12 * x) - 1 / (360 * x**3)


_KNOWN: dict[type, type[TargetDensity]] = {
    BernoulliLikelihood: _Probit,
    LogisticLikelihood: _Logistic,
    LogPoissonLikelihood: _LogPoisson,
    PoissonLikelihood: _SoftplusPoisson,
    LogNegativeBinomialLikelihood: _LogNegativeBinomial,
}


@checked
def target_density(likelihood: Likelihood) -> TargetDensity:
    """The density of independent targets, each given one latent value.

    Args:
        likelihood: One of this module; GPyTorch's ``BernoulliLikelihood`` (a probit, also where it
            saturates), ``PoissonLikelihood``, ``NegativeBinomialLikelihood``,
            ``StudentTLikelihood``; or any ``_OneDimensionalLikelihood`` whose distribution can be
            differentiated three times.

    Raises:
        UnsupportedError: Its targets do not depend on one latent value each.

    Examples:
        >>> import torch
        >>> from gpclml.likelihoods import LogisticLikelihood, target_density
        >>> density = target_density(LogisticLikelihood())
        >>> density.derivatives(torch.zeros(1), torch.ones(1)).second.item()
        -0.25
    """
    if not isinstance(likelihood, _OneDimensionalLikelihood):
        raise UnsupportedError(
            "likelihood", type(likelihood).__name__, "one of a latent value for each target",
            "Classes: BernoulliLikelihood of GPyTorch. Counts: LogNegativeBinomialLikelihood.",
        )  # fmt: skip
    return _KNOWN.get(type(likelihood), TargetDensity)(likelihood)
