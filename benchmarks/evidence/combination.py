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
from typing import Literal

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.evidence.training_speed import predict_prefixes, single_target_data


@dataclass(frozen=True)
class ModelPredictions:
    """Gaussian predictions of the function at n points by M models, and the targets.

    Attributes:
        means: ``(n, M)``.
        variances: Without noise, ``(n, M)``.
        target: ``(n,)``.
    """

    means: Tensor
    variances: Tensor
    target: Tensor


@torch.no_grad()
def model_predictions(
    models: Sequence[ExactGP], scheme: Literal["prior", "posterior", "concurrent"]
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

    Returns:
        Predictions in the order of the data, without missing targets, in float64.
    """
    target = models[0].train_targets.double()
    order = torch.arange(len(target), device=target.device)
    predicted = []
    for model in models:
        data, noise = single_target_data(model)
        if scheme == "prior":
            errors, variances = data.residual, data.covariance.diagonal() - noise
        elif scheme == "posterior":
            # With Q = K⁻¹ and S the noise: errors S Q r and variances s - s² Q_ii.
            mean, variance = data.covariance.leave_one_out(data.residual, order)
            share = noise / variance
            errors, variances = share * (data.residual - mean), noise * (1 - share)
        else:
            prefixes = predict_prefixes(data.covariance, data.residual, noise, order.unsqueeze(0))
            errors, variances = prefixes.errors[0], prefixes.variances[0]
        predicted.append((errors.double(), variances.double()))
    errors, variances = (torch.stack(columns, -1) for columns in zip(*predicted, strict=True))
    # Missing targets have no prediction error to learn weights from.
    observed = ~target.isnan()
    means = target.unsqueeze(-1) - errors
    return ModelPredictions(means[observed], variances[observed].clamp_min(0.0), target[observed])


def expected_weights(predictions: ModelPredictions, learning_rate: float, passes: int) -> Tensor:
    r"""The mean over draws of the weights that :func:`sampled_weights` learns, ``(M,)``.

    .. math:: E w \leftarrow E w - 2 \eta\,
        \big[(m_i m_i^\top + \mathrm{diag}(v_i))\, E w - y_i m_i\big],

    which is exact, since draws are new at each step.

    Args:
        predictions: Predictions of the models.
        learning_rate: η.
        passes: Number of passes over the points, in their order; weights start at 1 / M.
    """

    def step(w: Tensor, m: Tensor, v: Tensor, y: Tensor) -> Tensor:
        return w - 2 * learning_rate * ((w @ m - y) * m + v * w)

    return _descend(predictions, passes, step, ())


def sampled_weights(
    predictions: ModelPredictions, learning_rate: float, passes: int, *, runs: int = 1, seed: int
) -> Tensor:
    r"""Weights learned by stochastic gradient descent on draws of the models' predictions.

    At each step all models predict the next point, each at a draw of its own, and

    .. math:: w \leftarrow w - 2 \eta\, (w^\top f_i - y_i) f_i

    (Lyle et al. 2020, Section 4.1). The scheme of :func:`model_predictions` decides what is drawn
    from; the concurrent one is :math:`p(\theta_j \mid D_{<i})` in later passes too.

    Args:
        predictions: Predictions of the models.
        learning_rate: η.
        passes: Number of passes over the points, in their order; weights start at 1 / M.
        runs: Number of independent runs.
        seed: Seed of the draws.

    Returns:
        Weights of each run, ``(runs, M)``.
    """
    generator = torch.Generator().manual_seed(seed)

    def step(w: Tensor, m: Tensor, v: Tensor, y: Tensor) -> Tensor:
        normal = torch.randn(w.shape, generator=generator, dtype=torch.float64)
        f = m + v.sqrt() * normal.to(m)
        return w - 2 * learning_rate * ((w * f).sum(-1, keepdim=True) - y) * f

    return _descend(predictions, passes, step, (runs,))


def _descend(
    predictions: ModelPredictions, passes: int, step: Callable[..., Tensor], runs: tuple[int, ...]
) -> Tensor:
    """Weights after steps at each point in turn, by its means, variances and target."""
    columns = predictions.means, predictions.variances, predictions.target
    count = predictions.means.shape[-1]
    weights = predictions.means.new_full((*runs, count), 1 / count)
    for _ in range(passes):
        for point in zip(*columns, strict=True):
            weights = step(weights, *point)
    return weights
