r"""Weights of a linear combination of models, learned along their training.

The prediction of point i is :math:`\sum_j w_j f_{ij}` with :math:`f_{ij}` what model j predicts
there at a draw of its parameters. Stochastic gradient descent on its squared error gives more
weight to models that train fast (Lyle et al. 2020, Section 3.3), if draws are concurrent. Draws
of different models and steps are independent, so everything in expectation follows from means
:math:`m_i` and variances :math:`v_i` of the predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import (
    all_finite,
    check_counts,
    check_finite,
    check_positive,
    checked,
    seeded,
)
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evidence.training_speed.estimators import (
    noise_variances,
    predict_prefixes,
    single_target_data,
)
from gpclml.inference.observations import Observations

__all__ = [
    "Combination",
    "ModelPredictions",
    "Scheme",
    "expected_combination",
    "model_predictions",
    "model_weights",
    "optimal_combination",
    "sampled_combination",
]

_STABLE = 0.1  # of a step that is stable in the mean

Scheme = Literal["prior", "posterior", "concurrent"]
"""Where parameters are drawn: before the data, after it, or along it."""


@checked(means="float (n, M)", variances="float (n, M)", target="float (n,)")
@dataclass(frozen=True)
class ModelPredictions:
    """Gaussian predictions of the function at n points by M models, and the targets.

    Attributes:
        means: ``(n, M)``.
        variances: Without noise, ``(n, M)``.
        target: ``(n,)``.

    Raises:
        ShapeError: If they do not fit together.
        NonFiniteError: If a number is not finite.
        ArgumentError: If a variance is negative.
    """

    means: Tensor
    variances: Tensor
    target: Tensor

    def __post_init__(self) -> None:
        for name in ("means", "variances", "target"):
            check_finite(name, getattr(self, name))
        if bool((self.variances < 0).any()):
            raise ArgumentError("variances", float(self.variances.min()), "at least 0")


@torch.no_grad()
@checked(order="integer (n,)")
def model_predictions(
    models: Sequence[ExactGP], scheme: Scheme, order: Tensor | None = None
) -> ModelPredictions:
    r"""Predictions of each training point by several models of the same targets.

    The schemes of Lyle et al. (2020, Sections 3.3 and 4.1). The prediction of point i by model j
    is the function there, with parameters drawn from

    - ``"prior"``: :math:`p(\theta_j)`, given no target;
    - ``"posterior"``: :math:`p(\theta_j \mid D)`, given all targets, the point's own too;
    - ``"concurrent"``: :math:`p(\theta_j \mid D_{<i})`, given the targets before it.

    Args:
        models: Exact GPs on the same training targets, one for each row.
        scheme: One of the three schemes.
        order: Order in which the points arrive, ``(n,)``; data order if None.

    Returns:
        Predictions in order of arrival, without missing targets, in float64.

    Raises:
        UnknownNameError: If the scheme is none of the three.
        ArgumentError: If there is no model, targets differ, or ``order`` is no permutation.
        UnsupportedError: If noise is correlated.

    Note:
        One factorization a model; none for the prior.
    """
    target = _common_target(models)
    order = _as_order(order, len(target)).to(target.device)
    of_scheme = {"prior": _prior, "posterior": _posterior, "concurrent": _concurrent}[scheme]
    predicted = []
    for model in models:
        data = single_target_data(model)
        noise = noise_variances(cast(Likelihood, model.likelihood), data)
        predicted.append(of_scheme(data, noise, order))
    errors, variances = (torch.stack(part, -1).double() for part in zip(*predicted, strict=True))
    target = target[order].double()
    there = ~target.isnan()
    means = target.unsqueeze(-1) - errors
    return ModelPredictions(means[there], variances[there].clamp_min(0.0), target[there])


@checked(log_evidences="(M,)", prior="(M,)")
def model_weights(
    log_evidences: Tensor | Sequence[float], prior: Tensor | Sequence[float] | None = None
) -> Tensor:
    r"""The posterior probability of each model.

    .. math:: p(M_j \mid D) = \frac{p(M_j)\, p(D \mid M_j)}{\sum_l p(M_l)\, p(D \mid M_l)}

    Lyle et al. (2020, Section 3.3) compare these weights of Bayesian model averaging with those
    that :func:`expected_combination` and :func:`sampled_combination` learn.

    Args:
        log_evidences: Log marginal likelihoods of the same targets in the same units, or
            estimates of them, in total nats, ``(M,)``; minus infinity is weight zero.
        prior: Probabilities of the models, ``(M,)``, with sum one; equal ones if None.

    Returns:
        ``(M,)``, with sum one.

    Raises:
        ShapeError: If the two do not fit together.
        NonFiniteError: If an evidence is NaN or plus infinity, or all are minus infinity.
        ArgumentError: If the prior has a negative entry or another sum.
    """
    values = log_evidences
    if not isinstance(values, Tensor) or not values.is_floating_point():
        values = torch.as_tensor(values, dtype=torch.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ShapeError("log_evidences", tuple(values.shape), "(M,), one for each of M models")
    if bool((values.isnan() | values.isposinf()).any()) or bool(values.isneginf().all()):
        expected = "numbers, or minus infinity for some"
        raise NonFiniteError("log_evidences", values.tolist(), expected)
    if prior is None:
        return torch.softmax(values, dim=0)
    probabilities = torch.as_tensor(prior, dtype=values.dtype, device=values.device)
    if probabilities.shape != values.shape:
        expected = f"({len(values)},), as the evidences"
        raise ShapeError("prior", tuple(probabilities.shape), expected)
    total = float(probabilities.sum())
    if not bool((probabilities >= 0).all()) or abs(total - 1) > 1e-6:
        raise ArgumentError(
            "prior",
            f"{probabilities.tolist()} with sum {total:.6g}",
            "probabilities, not negative and with sum 1",
            "Divide them by their sum.",
        )
    return torch.softmax(values + probabilities.log(), dim=0)


@dataclass(frozen=True)
class Combination:
    """Weights of models, learned by stochastic gradient descent.

    Attributes:
        weights: Weights after the last step, ``(M,)``; ``(runs, M)`` if sampled.
        course: Weights at the start and after each of T steps, ``(T + 1, M)``;
            ``(runs, T + 1, M)`` if sampled.
    """

    weights: Tensor
    course: Tensor


@checked
def optimal_combination(predictions: ModelPredictions) -> Tensor:
    r"""The weights of the models with least expected squared error, ``(M,)``.

    .. math:: \arg\min_w \sum_i E (y_i - w^\top f_i)^2
        = \Big[\sum_i m_i m_i^\top + \mathrm{diag}(v_i)\Big]^{-1} \sum_i y_i m_i

    With the matrix a multiple of the identity, and noise of variance one, weights have the
    order of the models' :math:`L(D)` in the concurrent scheme: both then depend on the model
    through :math:`\sum_i y_i m_{ij}` alone (Lyle et al. 2020, Section 3.3). Under a prior of mean
    zero they are zero, since its draws do not depend on the targets.

    Args:
        predictions: Predictions of the models, from :func:`model_predictions` or your own.

    Returns:
        The weights; of least norm where several are best.
    """
    m, v, y = predictions.means, predictions.variances, predictions.target
    # Rows for the variances, so that the matrix is not squared.
    rows = torch.cat([m, torch.diag(v.sum(0).sqrt())])
    right = torch.cat([y, y.new_zeros(m.shape[-1])])
    return torch.linalg.pinv(rows) @ right


@checked(start="float (M,)")
def expected_combination(
    predictions: ModelPredictions,
    *,
    learning_rate: float | None = None,
    passes: int = 1,
    start: Tensor | None = None,
) -> Combination:
    r"""The mean over draws of the weights that :func:`sampled_combination` learns.

    .. math:: E w \leftarrow E w - 2 \eta\,
        \big[(m_i m_i^\top + \mathrm{diag}(v_i))\, E w - y_i m_i\big],

    which is exact, since draws are new at each step.

    Args:
        predictions: Predictions of the models, from :func:`model_predictions` or your own.
        learning_rate: η; if None a tenth of :math:`1 / \max_i E |f_i|^2`.
        passes: Number of passes over the points, in their order.
        start: First weights, ``(M,)``; 1 / M each if None.

    Returns:
        Mean weights and their course.

    Raises:
        ArgumentError: A number is out of range.
        ShapeError: The start does not fit.
        NonFiniteError: The weights diverge.
    """
    rate, weights = _check(predictions, learning_rate, passes, start)

    def step(w: Tensor, m: Tensor, v: Tensor, y: Tensor) -> Tensor:
        return w - 2 * rate * ((w @ m - y) * m + v * w)

    return _descend(predictions, weights, rate, passes, step)


@checked(start="float (M,)")
def sampled_combination(
    predictions: ModelPredictions,
    *,
    learning_rate: float | None = None,
    passes: int = 1,
    start: Tensor | None = None,
    runs: int = 1,
    seed: int = 0,
) -> Combination:
    r"""Weights learned by stochastic gradient descent on draws of the models' predictions.

    At each step all models predict the next point, each at a draw of its own, and

    .. math:: w \leftarrow w - 2 \eta\, (w^\top f_i - y_i) f_i

    (Lyle et al. 2020, Section 4.1). The scheme of :func:`model_predictions` decides what is drawn
    from; the concurrent one is :math:`p(\theta_j \mid D_{<i})` in later passes too.

    Arguments and errors are those of :func:`expected_combination`; ``runs`` is the number of
    independent runs and ``seed`` that of the draws.

    Returns:
        Weights and course of each run.
    """
    check_counts(runs=runs)
    rate, weights = _check(predictions, learning_rate, passes, start)
    generator = seeded(seed)

    def step(w: Tensor, m: Tensor, v: Tensor, y: Tensor) -> Tensor:
        normal = torch.randn(w.shape, generator=generator, dtype=torch.float64)
        f = m + v.sqrt() * normal.to(m)
        error = (w * f).sum(-1, keepdim=True) - y
        return w - 2 * rate * error * f

    return _descend(predictions, weights.expand(runs, -1), rate, passes, step)


def _prior(data: Observations, noise: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    variances = data.covariance.diagonal() - noise
    return data.residual[order], variances[order]


def _posterior(data: Observations, noise: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """With Q = K⁻¹ and S the noise: errors S Q r and variances s - s² Q_ii."""
    mean, variance = data.covariance.leave_one_out(data.residual, order)
    share = noise[order] / variance
    return share * (data.residual[order] - mean), noise[order] * (1 - share)


def _concurrent(data: Observations, noise: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    prefixes = predict_prefixes(data.covariance, data.residual, noise, order.unsqueeze(0))
    return prefixes.errors.squeeze(0), prefixes.variances.squeeze(0)


def _common_target(models: Sequence[ExactGP]) -> Tensor:
    if len(models) == 0:
        raise ArgumentError("models", "none", "at least one model")
    first = models[0].train_targets
    for place, model in enumerate(models):
        target = model.train_targets
        if not isinstance(target, Tensor) or not isinstance(first, Tensor):
            raise ArgumentError("models", f"models[{place}] without data", "training data in each")
        if target.shape != first.shape or not torch.allclose(target, first, equal_nan=True):
            raise ArgumentError(
                "models",
                f"training targets of models[{place}] that are not those of models[0]",
                "the same targets, in the same units and order",
                "Fit all models to one data set, standardized the same way.",
            )
    return cast(Tensor, first)


def _as_order(order: Tensor | None, n: int) -> Tensor:
    every = torch.arange(n)
    if order is None:
        return every
    if not torch.equal(order.cpu().long().sort().values, every):
        got = f"shape {tuple(order.shape)} of {order.dtype}"
        raise ArgumentError("order", got, f"a permutation of the integers from 0 to {n - 1}")
    return order


def _check(
    predictions: ModelPredictions,
    learning_rate: float | None,
    passes: int,
    start: Tensor | None,
) -> tuple[float, Tensor]:
    """The learning rate and the first weights."""
    check_counts(passes=passes)
    m, v = predictions.means, predictions.variances
    if learning_rate is None:
        size = float((m.square() + v).sum(-1).max())
        learning_rate = _STABLE / size if size > 0 else _STABLE
    check_positive(learning_rate=learning_rate)
    count = m.shape[-1]
    if start is None:
        return learning_rate, m.new_full((count,), 1 / count)
    if start.shape != (count,):
        raise ShapeError("start", tuple(start.shape), f"({count},), a weight for each model")
    return learning_rate, start.to(m)


def _descend(
    predictions: ModelPredictions,
    weights: Tensor,
    rate: float,
    passes: int,
    step: Callable[..., Tensor],
) -> Combination:
    """The course of steps at each point in turn, by its means, variances and target."""
    columns = (predictions.means, predictions.variances, predictions.target)
    course = [weights]
    for _ in range(passes):
        for point in zip(*columns, strict=True):
            weights = step(weights, *point)
            course.append(weights)
    if not all_finite(weights):
        got = f"weights that diverge at {rate:.3g}"
        raise NonFiniteError("learning_rate", got, "finite ones", "Lower it.")
    return Combination(course[-1], torch.stack(course, dim=-2))
