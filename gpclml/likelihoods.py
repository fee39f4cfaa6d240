r"""Likelihoods that are not Gaussian, and what Laplace's approximation needs of any.

Each target depends on its own latent value f alone. :func:`target_density` gives the logarithm of
p(y | f) and its first three derivatives with respect to f, for likelihoods of this package and of
GPyTorch, and for a user's own by autograd. :class:`TargetPrediction` is the distribution of targets
whose latent values are normal.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, PoissonLikelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, NegativeBinomial, Normal, Poisson, StudentT
from torch.nn.functional import logsigmoid, softplus

from gpclml._utils.arguments import check_counts, checked, tensor_like
from gpclml._utils.arrays import points_as_tensor
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError

if TYPE_CHECKING:
    from gpclml._utils.arrays import ArrayLike

__all__ = [
    "HeteroscedasticGaussianLikelihood",
    "LogNegativeBinomialLikelihood",
    "LogPoissonLikelihood",
    "LogisticLikelihood",
    "TargetDensity",
    "TargetMixture",
    "TargetPrediction",
    "target_density",
]

# A checker that does not read upstream's source knows this base.
assert issubclass(_OneDimensionalLikelihood, torch.nn.Module)

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_NODES = 400  # of the trapezoidal rule, whose error falls exponentially for smooth functions
_REACH = 8.5  # deviations of a normal beyond which its mass is below 2e-17
_CDF_NODES, _CDF_REACH = 128, 6.0
_SINH_REACH = 6.5  # of nodes that are dense at the mode and reach 300 deviations from it
_POINTS_AT_ONCE = 1 << 13
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


class HeteroscedasticGaussianLikelihood(Likelihood):
    r"""Normal targets whose variance a network predicts too: :math:`y \sim N(f_1, e^{f_2})`.

    The network has two outputs, the mean and the logarithm of the variance (Nix and Weigend 1994).
    :class:`gpclml.Laplace` takes it by its Fisher matrix.

    Examples:
        >>> import torch
        >>> from gpclml.likelihoods import HeteroscedasticGaussianLikelihood
        >>> HeteroscedasticGaussianLikelihood()(torch.zeros(3, 2)).scale
        tensor([1., 1., 1.])
    """

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Normal:
        """The distribution of targets ``(*, N)`` at outputs ``(*, N, 2)``."""
        mean, log_variance = function_samples.unbind(-1)
        return Normal(mean, (0.5 * log_variance).exp())


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
            self.register_prior("size_prior", size_prior, "size")

    @property
    def size(self) -> Tensor:
        """The size r, ``(*batch, 1)``."""
        return self.raw_size_constraint.transform(self.raw_size)

    @size.setter
    def size(self, value: Tensor | float) -> None:
        value = tensor_like(value, self.raw_size)
        self.initialize(raw_size=self.raw_size_constraint.inverse_transform(value))

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> NegativeBinomial:
        """The distribution of targets at latent values."""
        return NegativeBinomial(self.size, logits=function_samples - self.size.log())


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
        return Derivatives(*(t.detach() for t in self._differentiated(f, y, 3)))

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
            terms = zip(weights, self._differentiated(f, y, 2), strict=True)
            total = torch.stack([(weight * term).sum() for weight, term in terms]).sum()
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        pairs = zip(parameters, gradients, strict=True)
        return [(p, g) for p, g in pairs if g is not None]

    @torch.enable_grad()
    def _differentiated(self, f: Tensor, y: Tensor, order: int) -> list[Tensor]:
        """Log density and its derivatives up to an order by autograd, which may go on."""
        f = f.detach().requires_grad_()
        values = [self.log_prob(f, y)]
        for _ in range(order):
            values += torch.autograd.grad(values[-1].sum(), f, create_graph=True)
        return values

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
            got, kind = f"{float(y[bad][0]):g} among them", type(self.likelihood).__name__
            expected = _SUPPORTS.get(type(distribution), f"values of {support}")
            raise ArgumentError(name, got, f"{expected}, which {kind} takes")

    def is_discrete(self, f: Tensor) -> bool:
        """Whether targets of latent values have probabilities, and not densities."""
        return isinstance(self._distribution(f), tuple(_SUPPORTS))

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


class TargetPrediction:
    """Distributions of single targets whose latent values are normal, by quadrature.

    Args:
        likelihood: Of the targets.
        mean: Means of the latent values, ``(*batch, m)``.
        variance: Their variances.

    Attributes:
        latent_mean, latent_variance: Those of the latent values.
    """

    @checked(late=True, mean="float (*batch, m)", variance="float (*batch, m)")
    def __init__(self, likelihood: Likelihood, mean: Tensor, variance: Tensor) -> None:
        self._likelihood: Any = likelihood
        self.latent_mean: Tensor = mean.detach()
        self.latent_variance: Tensor = variance.detach()

    @property
    def probabilities(self) -> Tensor:
        """Probabilities of the class 1, ``(*batch, m)``.

        Raises:
            UnsupportedError: The targets are no classes.
        """
        if type(self._likelihood) is BernoulliLikelihood:
            margin = self.latent_mean / (1 + self.latent_variance).sqrt()
            return torch.special.ndtr(margin)
        if not isinstance(self._at(self.latent_mean), Bernoulli):
            kind = type(self._likelihood).__name__
            raise UnsupportedError("likelihood", kind, "one of the classes 0 and 1", "Use mean.")
        return self.mean

    @property
    def mean(self) -> Tensor:
        """Means of the targets, ``(*batch, m)``; of classes the probability of class 1."""
        if type(self._likelihood) is BernoulliLikelihood:
            return self.probabilities
        if self._has_log_link:
            return (self.latent_mean + 0.5 * self.latent_variance).exp()
        return self._expected(lambda target: target.mean)

    @property
    def variance(self) -> Tensor:
        """Variances of the targets, ``(*batch, m)``."""
        mean = self.mean
        if isinstance(self._at(self.latent_mean), Bernoulli):
            return mean * (1 - mean)
        if not self._has_log_link:
            square = self._expected(lambda target: target.variance + target.mean.square())
            return square - mean.square()
        square = mean.square() * self.latent_variance.exp()
        within = mean
        if isinstance(self._likelihood, LogNegativeBinomialLikelihood):
            within = mean + square / self._likelihood.size.detach()
        return within + square - mean.square()

    def log_prob(self, targets: ArrayLike) -> Tensor:
        """Log predictive probabilities or densities of targets, ``(*batch, m)``."""
        y = points_as_tensor(targets, self.latent_mean, None, "targets")
        density = target_density(self._likelihood)
        density.check_targets("targets", y)
        mean, variance, y = (t.double() for t in (self.latent_mean, self.latent_variance, y))
        if y.shape != mean.shape:
            raise ShapeError("targets", tuple(y.shape), str(tuple(mean.shape)))
        chunks = (v.flatten().split(_POINTS_AT_ONCE) for v in (mean, variance, y))
        values = [tilted_moments(density, *chunk)[0] for chunk in zip(*chunks, strict=True)]
        return torch.cat(values).reshape(mean.shape).to(self.latent_mean)

    def cdf(self, values: ArrayLike) -> Tensor:
        """Probabilities that targets are at most these values, ``(*batch, m)``."""
        y = points_as_tensor(values, self.latent_mean, None, "values").expand_as(self.latent_mean)
        return self._expected(partial(_evaluated, "cdf"), y, nodes=_CDF_NODES, reach=_CDF_REACH)

    def quantile(self, probability: float) -> Tensor:
        """The smallest values that targets are at most with a probability, ``(*batch, m)``.

        Args:
            probability: Between 0 and 1.

        Raises:
            ArgumentError: It is not.
        """
        if not 0 < probability < 1:
            raise ArgumentError("probability", probability, "a number between 0 and 1")
        if isinstance(self._at(self.latent_mean), Bernoulli):
            return (1 - self.probabilities < probability).to(self.latent_mean)
        # Between the quantiles at the least and the greatest latent value that count.
        reach = _CDF_REACH * self.latent_variance.sqrt()
        probabilities = torch.full_like(self.latent_mean, probability, dtype=torch.float64)
        ends = [
            _evaluated("icdf", self._at(f), probabilities).to(self.latent_mean)
            for f in (self.latent_mean - reach, self.latent_mean + reach)
        ]
        low, high = torch.stack(ends).aminmax(dim=0)
        return _searched_quantile(self.cdf, low, high, probability, self._is_whole)

    @property
    def _is_whole(self) -> bool:
        return isinstance(self._at(self.latent_mean), tuple(_SUPPORTS))

    @property
    def _has_log_link(self) -> bool:
        return type(self._likelihood) in (LogPoissonLikelihood, LogNegativeBinomialLikelihood)

    def _at(self, f: Tensor) -> Distribution:
        with torch.no_grad():
            return self._likelihood(f)

    def _expected(
        self,
        function: Callable[..., Tensor],
        *given: Tensor,
        nodes: int = _NODES,
        reach: float = _REACH,
    ) -> Tensor:
        """The mean over latent values of a function of the distribution and of given values."""
        mean, variance = self.latent_mean.double(), self.latent_variance.double()
        z = torch.linspace(-reach, reach, nodes, dtype=mean.dtype, device=mean.device)
        weights = (-0.5 * z.square()).softmax(-1)
        columns = [v.reshape(-1, 1).split(_POINTS_AT_ONCE) for v in (mean, variance.sqrt(), *given)]
        values = [
            function(self._at(centre + deviation * z), *others) @ weights
            for centre, deviation, *others in zip(*columns, strict=True)
        ]
        return torch.cat(values).reshape(mean.shape).to(self.latent_mean)


class TargetMixture:
    """The plain average of several distributions of the same targets, such as of several models.

    Args:
        members: The distributions, one or more.

    Examples:
        >>> import torch
        >>> from gpclml.likelihoods import LogPoissonLikelihood, TargetMixture, TargetPrediction
        >>> latents = torch.zeros(1), torch.ones(1)
        >>> members = [TargetPrediction(LogPoissonLikelihood(), f, 0.1 + 0 * f) for f in latents]
        >>> TargetMixture(members).interval(0.9)
        (tensor([0.]), tensor([5.]))
    """

    @checked
    def __init__(self, members: Sequence[TargetPrediction]) -> None:
        if len(members) == 0:
            raise ArgumentError("members", "none", "at least one distribution")
        self.members: tuple[TargetPrediction, ...] = tuple(members)

    @property
    def mean(self) -> Tensor:
        """Means of the targets, ``(*batch, m)``."""
        return self._averaged(lambda member: member.mean)

    @property
    def variance(self) -> Tensor:
        """Variances of the targets, of the members and between them, ``(*batch, m)``."""
        mean = self.mean
        return self._averaged(lambda member: member.variance + (member.mean - mean).square())

    @property
    def std(self) -> Tensor:
        """Standard deviations of the targets, ``(*batch, m)``."""
        return self.variance.sqrt()

    def log_prob(self, targets: ArrayLike) -> Tensor:
        """Log probabilities or densities of targets, ``(*batch, m)``."""
        logs = torch.stack([member.log_prob(targets) for member in self.members])
        return logs.logsumexp(0) - math.log(len(logs))

    def cdf(self, values: ArrayLike) -> Tensor:
        """Probabilities that targets are at most these values, ``(*batch, m)``."""
        return self._averaged(lambda member: member.cdf(values))

    def quantile(self, probability: float | Sequence[float]) -> Tensor:
        """The smallest values that targets are at most with a probability.

        Args:
            probability: One between 0 and 1, or several.

        Returns:
            ``(*batch, m)`` for one; ``(*batch, m, q)`` for q of them.

        Raises:
            ArgumentError: One is not between 0 and 1.
        """
        if isinstance(probability, Sequence):
            return torch.stack([self.quantile(each) for each in probability], -1)
        each = torch.stack([member.quantile(probability) for member in self.members])
        low, high = each.aminmax(dim=0)
        return _searched_quantile(self.cdf, low, high, probability, self.members[0]._is_whole)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds a target with a probability, or a little more of counts.

        Args:
            level: The probability, between 0 and 1.

        Returns:
            Lower and upper ends, ``(*batch, m)`` each.

        Raises:
            ArgumentError: The level is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ArgumentError("level", level, "a number between 0 and 1")
        tail = 0.5 * (1 - level)
        return self.quantile(tail), self.quantile(1 - tail)

    @checked
    def sample(self, count: int = 1, seed: int = 0) -> Tensor:
        """Draws of targets, each row on its own.

        Args:
            count: Number of draws a row.
            seed: Seed of the draws.

        Returns:
            ``(count, *batch, m)``.
        """
        check_counts(count=count)
        like = self.members[0].latent_mean
        shape = (count, *like.shape)
        # On the CPU, so that a seed gives the same draws everywhere.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            chosen = torch.randint(len(self.members), (1, *shape))
            draws = []
            for member in self.members:
                mean, variance = member.latent_mean.cpu(), member.latent_variance.cpu()
                f = mean + variance.sqrt() * torch.randn(shape, dtype=like.dtype)
                with torch.no_grad():
                    draws.append(copy.deepcopy(member._likelihood).cpu()(f).sample())
        return torch.stack(draws).gather(0, chosen)[0].to(like)

    def _averaged(self, value: Callable[[TargetPrediction], Tensor]) -> Tensor:
        return torch.stack([value(member) for member in self.members]).mean(0)


def _searched_quantile(
    cdf: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, probability: float, is_whole: bool
) -> Tensor:
    """The smallest values between two with that probability below or at them."""
    if not is_whole:
        for _ in range(60):
            middle = 0.5 * (low + high)
            below = cdf(middle) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high
    low = low - 1
    while bool((high - low > 1).any()):
        middle = (0.5 * (low + high)).floor()
        below = cdf(middle) < probability
        inside = high - low > 1
        low = torch.where(inside & below, middle, low)
        high = torch.where(inside & ~below, middle, high)
    return high


@torch.no_grad()
def tilted_moments(
    density: TargetDensity, mean: Tensor, variance: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Logarithm of the mass, mean and variance of :math:`p(y \mid f)\, \mathcal N(f; \mu, v)`.

    By the trapezoidal rule on nodes around the greatest value, dense there and reaching far into
    the tails, so that a likelihood may be far narrower or wider than the normal.

    Args:
        density: Of the targets.
        mean: Means of latent values, ``(*batch, n)``, float64.
        variance: Their variances.
        y: Targets.
    """
    if type(density) is _Probit:  # in closed form (Rasmussen and Williams 2006, Section 3.9)
        root = (1 + variance).sqrt()
        at = density.derivatives(mean / root, y)
        slope = variance / root * at.first
        return at.log_prob, mean + slope, variance * (1 + variance / (1 + variance) * at.second)
    log_mass, mode, away, shares = _tilted_nodes(density, mean, variance, y)
    first = (shares * away).sum(-1)
    second = (shares * (away - first.unsqueeze(-1)).square()).sum(-1)
    return log_mass, mode + first, second


def tilted_parameter_gradients(
    density: TargetDensity, mean: Tensor, variance: Tensor, y: Tensor, weight: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of the weighted sum of the masses' logarithms for the likelihood's parameters."""
    if not density.parameters:
        return []
    _, mode, away, shares = _tilted_nodes(density, mean, variance, y)
    weights = weight.unsqueeze(-1) * shares
    none = torch.zeros_like(weights)
    # Far nodes count nowhere, but derivatives of a density there may be no numbers.
    f = mode.unsqueeze(-1) + torch.where(shares > 1e-20, away, 0.0)
    return density.parameter_gradients(f, y.unsqueeze(-1), (weights, none, none))


def _tilted_nodes(
    density: TargetDensity, mean: Tensor, variance: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mass's logarithm, the mode, and nodes less the mode with their shares of the mass."""
    t = torch.linspace(-_SINH_REACH, _SINH_REACH, _NODES, dtype=mean.dtype, device=mean.device)
    log_step = (2 * _SINH_REACH / (_NODES - 1) * t.cosh()).log()
    mode, width = _tilted_mode(density, mean, variance, y)
    away = width.unsqueeze(-1) * t.sinh()
    f = mode.unsqueeze(-1) + away
    deviation = variance.sqrt().unsqueeze(-1)
    normal = torch.distributions.Normal(mean.unsqueeze(-1), deviation, False).log_prob(f)
    terms = density.log_prob(f, y.unsqueeze(-1)) + normal + log_step
    log_mass = torch.logsumexp(terms, -1)
    return log_mass + width.log(), mode, away, (terms - log_mass.unsqueeze(-1)).exp()


def _tilted_mode(density: Any, mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Where p(y | f) times the normal of f is greatest, and the width there, ``(m,)`` each."""
    precision, f = 1 / variance, mean

    def value_at(f: Tensor) -> tuple[Tensor, Any]:
        at = density.derivatives(f, y)
        return at.log_prob - 0.5 * precision * (f - mean).square(), at

    value, at = value_at(f)
    for _ in range(50):
        curvature = precision + (-at.second).clamp_min(0.0)
        move = (at.first - precision * (f - mean)) / curvature
        new_value, new_at = value_at(f + move)
        for _ in range(40):
            worse = ~(new_value >= value - 1e-10 * value.abs())
            if not bool(worse.any()):
                break
            move = torch.where(worse, 0.5 * move, move)
            new_value, new_at = value_at(f + move)
        f, value, at = f + move, new_value, new_at
        if bool((move.square() * curvature < 1e-6).all()):
            break
    return f, (precision + (-at.second).clamp_min(0.0)).rsqrt()


# Those whose distribution function SciPy has and PyTorch has not.
_IN_SCIPY: dict[type[Distribution], tuple[str, Callable[[Any], tuple[Tensor, ...]]]] = {
    Bernoulli: ("bernoulli", lambda target: (target.probs,)),
    NegativeBinomial: ("nbinom", lambda target: (target.total_count, 1 - target.probs)),
    Poisson: ("poisson", lambda target: (target.rate,)),
    StudentT: ("t", lambda target: (target.df, target.loc, target.scale)),
}


def _evaluated(name: str, target: Distribution, values: Tensor) -> Tensor:
    """The distribution function, ``"cdf"``, or its inverse, ``"icdf"``."""
    from scipy import stats

    for kind, (known, parameters) in _IN_SCIPY.items():
        if isinstance(target, kind):
            arrays = [t.double().cpu().numpy() for t in (values, *parameters(target))]
            function = getattr(getattr(stats, known), {"cdf": "cdf", "icdf": "ppf"}[name])
            return torch.as_tensor(function(*arrays)).to(values.device)
    return getattr(target, name)(values)
