r"""Training speed as evidence, of exact GPs and of any training loop (Lyle et al. 2020).

A model that predicts each new point well from the points before it trains fast, and has a high
marginal likelihood: :math:`\log p(D) = \sum_i \log E[p(D_i \mid \theta)]`,
:math:`\theta \sim p(\theta \mid D_{<i})`. Under Gaussian noise the parameters enter through the
function at the next point alone, so that nothing but its mean and variance is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import check_counts, checked, seeded
from gpclml._utils.arrays import ArrayLike, takes_arrays
from gpclml.conditioning import as_orders
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.evidence.sampling import Estimate, mean_estimate
from gpclml.inference.observations import Observations, training_observations
from gpclml.inference.units import Units, term_offset
from gpclml.linalg import ExactCovariance

__all__ = ["SumOfTrainingLosses", "TrainingSpeed", "training_speed"]


@dataclass(frozen=True)
class TrainingSpeed:
    r"""The log marginal likelihood and its estimates from training speed, in total nats.

    Each sum runs over the points in their order; means are over orderings.

    Attributes:
        log_marginal_likelihood: :math:`\log p(D)`, exact and the same in every order.
        expected: :math:`L(D) = \sum_i E[\log p(D_i \mid \theta)]`,
            :math:`\theta \sim p(\theta \mid D_{<i})`, in closed form: a lower bound (Lyle et al.
            2020, Eq. 4). Its error is over orderings.
        lower: L(D) estimated by draws.
        multi_sample: :math:`L_k(D)`, the log of the mean density over k draws: a lower bound
            in expectation, tighter than :math:`L(D)`.
        gaussian: :math:`L_S(D)`, the density under the Gaussian with mean and variance of k
            draws: no bound; its bias falls with the number of draws.

    The standard errors of ``lower``, ``multi_sample`` and ``gaussian`` are over draws alone, given
    the orderings.
    """

    log_marginal_likelihood: float
    expected: Estimate
    lower: Estimate
    multi_sample: Estimate
    gaussian: Estimate


@torch.no_grad()
@takes_arrays()
@checked(orderings="index (k, n)")
def training_speed(
    model: ExactGP,
    num_samples: int = 10,
    *,
    orderings: int | ArrayLike = 1,
    repeats: int = 10,
    units: Units = "original",
    seed: int = 0,
) -> TrainingSpeed:
    r"""Lower bounds and estimates of the log marginal likelihood by draws of each next point.

    With e the error of the prediction of point i from those before it, v the variance of the
    function there and s the noise,

    .. math:: \log p(D) = \sum_i \log N(e_i; 0, v_i + s_i), \qquad
        L(D) = \sum_i \Big[\log N(e_i; 0, s_i) - \frac{v_i}{2 s_i}\Big],

    and with draws :math:`f_{ij} \sim N(\mu_i, v_i)`, their mean :math:`\bar f_i` and their
    variance :math:`\hat v_i` (of divisor k - 1),

    .. math:: L_k(D) = \sum_i \log \frac1k \sum_{j \le k} N(y_i; f_{ij}, s_i), \qquad
        L_S(D) = \sum_i \log N(y_i; \bar f_i, \hat v_i + s_i)

    (Lyle et al. 2020, Section 3). In expectation :math:`L \le L_k \le \log p(D)`, and L_k grows
    with k. All but the log marginal likelihood depend on the order of the points.

    Args:
        model: An exact GP with training data, one target for each row and independent noise.
        num_samples: Draws k of each function value, at least 2.
        orderings: Number of random orderings, or the orderings, ``(k, n)``.
        repeats: How often the draws are repeated in each ordering; values are means.
        units: Units of the targets; see :mod:`gpclml.evaluation`.
        seed: Seed of orderings and draws.

    Returns:
        Total nats over the observed targets.

    Raises:
        ArgumentError: A number is out of range, an ordering no permutation, or the model a
            batch of models or a multitask one.
        ShapeError: Orderings are not ``(k, n)``.
        UnsupportedError: The noise is correlated.

    Note:
        n³/3 floating-point operations for each ordering; n k ``repeats`` draws at a time.
    """
    check_counts(2, "A variance needs two draws.", num_samples=num_samples)
    check_counts(repeats=repeats)
    generator = seeded(seed)
    data, noise = single_target_data(model)
    orders = as_orders(orderings, data.num_rows, generator)
    prefixes = predict_prefixes(data.covariance, data.residual, noise, orders)
    offset = float(term_offset(model, data, units).double().sum())
    values, variances = [], []  # of the three estimators, for each ordering
    shape = repeats, num_samples, prefixes.errors.shape[-1]
    for e, v, s in zip(prefixes.errors, prefixes.variances, prefixes.noise, strict=True):
        # Deviations of draws from the target: the mean of the predictions is in the errors.
        normal = torch.randn(shape, generator=generator, dtype=torch.float64).to(e)
        terms = torch.stack(sampled_terms(e - v.sqrt() * normal, s))
        values.append(terms.mean(1).sum(-1))
        # Draws at different points are independent, so that the variance of a sum is that of its
        # terms, which a few repeats tell well.
        variances.append(terms.var(1, correction=min(1, repeats - 1)).sum(-1))
    values, variances = torch.stack(values), torch.stack(variances)
    errors = (variances.sum(0) / repeats).sqrt() / len(values)
    lower, multi_sample, gaussian = (
        Estimate(value - offset, error if repeats > 1 else math.inf)
        for value, error in zip(values.mean(0).tolist(), errors.tolist(), strict=True)
    )
    return TrainingSpeed(
        log_marginal_likelihood=float(marginal_terms(prefixes).sum(-1).mean()) - offset,
        expected=mean_estimate(expected_terms(prefixes).sum(-1) - offset),
        lower=lower,
        multi_sample=multi_sample,
        gaussian=gaussian,
    )


@dataclass(frozen=True)
class Prefixes:
    """Predictions of each point given the points before it, in k orders, ``(k, n)`` in float64.

    Errors are targets less predicted means; variances are of the latent function, without noise.
    """

    errors: Tensor
    variances: Tensor
    noise: Tensor


def predict_prefixes(
    covariance: ExactCovariance, residual: Tensor, noise: Tensor, orders: Tensor
) -> Prefixes:
    """The predictions in each order: point ``orders[j, i]`` is the i-th in order j.

    The covariance of the observations has the noise on its diagonal, the residuals are targets less
    their prior mean; it costs as much as :meth:`gpclml.linalg.ExactCovariance.predictions`.
    """
    with torch.no_grad():
        errors, variances = covariance.predictions(residual, orders)
    ordered = noise.double()[orders.to(noise.device)]
    # Rounding may leave a variance below the noise where the function is known.
    latent = (variances.double() - ordered).clamp_min(0.0)
    return Prefixes(errors.double(), latent, ordered)


def single_target_data(model: ExactGP) -> tuple[Observations, Tensor]:
    """Training data of one model with one target a row, and variances of its noise, ``(n,)``."""
    data = training_observations(model)
    if data.num_tasks > 1:
        raise ArgumentError(
            "model", f"{data.num_tasks} targets for each row", "one", "Use a long-format model."
        )
    if data.residual.ndim > 1:
        got = f"a batch of shape {tuple(data.residual.shape[:-1])}"
        raise ArgumentError("model", got, "one model", "Pass the models of the batch one by one.")
    noise = data.noise
    if noise is None:
        raise UnsupportedError(
            "model.likelihood",
            f"{type(model.likelihood).__name__} with correlated noise",
            "independent noise of the observations",
            "Use a likelihood whose noise is independent between points.",
        )
    # A missing target has variance one and no correlation.
    return data, noise if data.missing is None else noise.masked_fill(data.missing, 1.0)


def log_density(errors: Tensor, variances: Tensor) -> Tensor:
    """Log density N(error; 0, variance), in nats."""
    return -0.5 * ((2 * math.pi * variances).log() + errors.square() / variances)


def marginal_terms(prefixes: Prefixes) -> Tensor:
    """Log densities log p(y_i | y_<i), ``(k, n)``; the log evidence is the sum of a row."""
    return log_density(prefixes.errors, prefixes.variances + prefixes.noise)


def expected_terms(prefixes: Prefixes) -> Tensor:
    """Expected log densities E[log p(y_i | f_i)], f_i as predicted from y_<i, ``(k, n)``."""
    return log_density(prefixes.errors, prefixes.noise) - 0.5 * prefixes.variances / prefixes.noise


def sampled_terms(deviations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Terms of the three estimators, ``(*batch, n)``, from targets less draws, ``(*batch, S, n)``.

    They are the mean log density, the log mean density, and the log density of the Gaussian with
    the draws' mean and variance.
    """
    densities = log_density(deviations, noise)
    mixture = densities.logsumexp(-2) - math.log(deviations.shape[-2])
    variance, mean = torch.var_mean(deviations, dim=-2)
    return densities.mean(-2), mixture, log_density(mean, variance + noise)


class SumOfTrainingLosses:
    r"""Training speed as the area under the curve of training losses.

    Call :meth:`update` after each batch and :meth:`end_epoch` after each epoch. A network whose
    sum is small trained fast, which stands in for a high marginal likelihood (Lyle et al. 2020,
    Section 4.2): with a negative log density for loss, each point seen once and predicted
    before it is trained on, :meth:`total` is an estimate of :math:`-L(D)`.

    Losses that are tensors stay on their device until the end of an epoch, or until a sum is asked
    for, so that a step does not wait for an accelerator.

    Examples:
        >>> import torch
        >>> from gpclml.evidence.training_speed import SumOfTrainingLosses
        >>> x, speed = torch.rand(20, 1), SumOfTrainingLosses()
        >>> network = torch.nn.Linear(1, 1)
        >>> for batch in x.split(5):
        ...     loss = (network(batch) - batch.sin()).square().mean()
        ...     speed.update(loss, len(batch))  # and a step of an optimizer
        ...
        >>> speed.end_epoch()
        >>> total = speed.sum()
    """

    def __init__(self) -> None:
        # Loss and number of points of each batch; the last epoch has not ended.
        self._epochs: list[list[tuple[Tensor | float, int]]] = [[]]

    def update(self, loss: Tensor | float, num_points: int) -> None:
        """Adds the loss of one batch, computed before the step that trains on it.

        Args:
            loss: Mean over the points of the batch, one number; a graph is not kept.
            num_points: Number of points in the batch.

        Raises:
            ShapeError: If the loss is not one number.
            ArgumentError: If there is no point.
        """
        check_counts(num_points=num_points)
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                expected = "one number, the mean over the batch"
                raise ShapeError("loss", tuple(loss.shape), expected, "Take loss.mean().")
            # A copy: a loop may write its next loss into the same memory.
            loss = loss.detach().clone()
        self._epochs[-1].append((loss, num_points))

    def end_epoch(self) -> None:
        """Ends an epoch and reads its losses.

        Raises:
            ArgumentError: If there was no batch since the last epoch.
            NonFiniteError: If one of its losses is not finite.
        """
        if not self._epochs[-1]:
            suggestion = "Call update() at each batch first."
            raise ArgumentError("epoch", "no batches", "at least one", suggestion)
        self._read()
        self._epochs.append([])

    def sum(self) -> float:
        r"""The sum over all iterations of the batch losses (Lyle et al. 2020, Section 4.2).

        Each batch counts once, whatever its size: :math:`\sum_t \ell_t`, in units of the loss.

        Raises:
            NonFiniteError: If one of them is not finite.
        """
        return sum(loss for epoch in self._read() for loss, _ in epoch)

    def total(self) -> float:
        r"""The sum over all points seen of their losses, :math:`\sum_t b_t \ell_t`.

        Total nats, if the loss is a mean negative log density.

        Raises:
            NonFiniteError: If a loss is not finite.
        """
        return sum(loss * points for epoch in self._read() for loss, points in epoch)

    def epoch_means(self) -> list[float]:
        """The mean loss a point of each ended epoch.

        Ru et al. (2021) add up those of the last epochs, since the initial weights decide the
        first ones: ``sum(speed.epoch_means()[-E:])``.
        """
        return [
            sum(loss * points for loss, points in epoch) / sum(points for _, points in epoch)
            for epoch in self._read()[:-1]
        ]

    def _read(self) -> list[list[tuple[float, int]]]:
        """Losses as numbers, each of which is read from its device once, and points, by epoch."""
        epochs, step = [], 0
        for number, epoch in enumerate(self._epochs, start=1):
            epochs.append([(float(loss), points) for loss, points in epoch])
            for loss, _ in epochs[-1]:
                step += 1
                if not math.isfinite(loss):
                    got = f"{loss} at step {step} (epoch {number})"
                    suggestion = "Lower the learning rate, or look for NaN in the data."
                    raise NonFiniteError("loss", got, "a finite number", suggestion)
            epoch[:] = epochs[-1]
        return epochs
