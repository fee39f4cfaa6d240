"""Densities and predictions of points given their nearest neighbours.

Each point is a small Gaussian of its own, and all of a batch are evaluated together: covariances
``(b, k + 1, k + 1)`` of the neighbours and the point, in double precision.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator, LinearOperator
from torch import Tensor

from gpclml._utils import environment
from gpclml._utils.arguments import all_finite, check_counts, reads_are_free
from gpclml._utils.resuming import digest
from gpclml.conditioning import NearestNeighbors, Split
from gpclml.conditioning.neighbours import NeighborIndex, find_copies
from gpclml.errors import UnsupportedError
from gpclml.gram import Gram
from gpclml.inference.observations import (
    POINTS_AT_ONCE,
    Observations,
    Road,
    closed_form_of,
    metric_points,
    training_observations,
)
from gpclml.inference.posterior import JointPrior, exact_posterior, posterior_settings
from gpclml.inference.units import PosteriorNormal, above_rounding
from gpclml.linalg import DenseCovariance, GramCovariance

__all__ = [
    "conditional_log_densities",
    "count_neighbors",
    "joint_posterior_given_neighbors",
    "mean_log_density",
    "neighbors_road",
    "posterior_given_neighbors",
]

_ENTRIES_AT_ONCE = {"cpu": 1 << 23, "other": 1 << 28}  # of covariances of neighbours


def mean_log_density(
    data: Observations, split: Split, factor_dtype: torch.dtype | None = None
) -> Tensor:
    """The mean log density of held-out targets given their neighbours, ``()``."""
    checked = reads_are_free(data.residual.device)
    value = conditional_log_densities(data, split, factor_dtype, checked=checked).mean()
    if not all_finite(value):
        if not checked:  # again, with every factorization checked
            value = conditional_log_densities(data, split, factor_dtype).mean()
        data.check_density(value)
    return value


def conditional_log_densities(
    data: Observations,
    split: Split,
    factor_dtype: torch.dtype | None = None,
    *,
    checked: bool = True,
) -> Tensor:
    """Log densities of held-out targets, each given the rows that a split names for it, ``(b,)``.

    Args:
        data: Of one model, with one target for each row.
        split: Held-out rows ``(b, 1)`` and the rows that each is conditioned on, ``(b, k)``; -1 is
            no row.
        factor_dtype: See :func:`gpclml.linalg.factorization_dtype`.
        checked: See :func:`gpclml.linalg.safe_cholesky`.
    """
    given = cast(Tensor, split.conditioned_on)
    device, index = data.residual.device, torch.cat([given, split.held_out[0]], -1)
    absent = index < 0
    index = index.clamp_min(0)
    # Indices are on the CPU, where a GPU is not waited for.
    is_complete = data.missing is None and not bool(absent.any())
    absent = absent.to(device)
    if data.missing is not None:
        absent = absent | data.missing[index.to(device)]
    covariance = _covariance(data, index, None if is_complete else absent)
    covariance = covariance.factored_in(factor_dtype, checked=checked)
    residual = data.residual[index.to(device)].masked_fill(absent, 0.0)
    last = torch.tensor([[index.shape[-1] - 1]])
    return covariance.held_out_log_density(residual, [last])


def _covariance(data: Observations, index: Tensor, absent: Tensor | None) -> DenseCovariance:
    """Of the targets at each row of an index, ``(b, k, k)``; absent ones are standard normals."""
    lazy = _lazy_kernel(data.latent)
    gram, x = closed_form_of(lazy, dense=True), cast(Tensor, lazy.x1)
    noise = _noise_at(data, index.to(x.device))
    if isinstance(gram, Gram):
        if gram.has_features:  # a network sees each point once, however many are its neighbours
            rows, index = index.unique(return_inverse=True)
            gram, x = gram.on_features(x.index_select(-2, rows.to(x.device)))
        shape = torch.Size((*index.shape, index.shape[-1]))
        covariance = GramCovariance(gram, x[index.to(x.device)], noise, shape)
        if absent is None:
            return covariance
        matrix = covariance.matrix
    else:
        variances = noise if isinstance(noise, Tensor) else cast(Any, noise).noise
        points = x[index.to(x.device)]
        matrix = _matrix(lazy, points, points)
        identity = torch.eye(index.shape[-1], dtype=matrix.dtype, device=matrix.device)
        matrix = torch.addcmul(matrix, variances.unsqueeze(-1), identity)
        if absent is None:
            return DenseCovariance(matrix)
    matrix = matrix.masked_fill(absent.unsqueeze(-1) | absent.unsqueeze(-2), 0.0)
    return DenseCovariance(matrix + torch.diag_embed(absent.to(matrix)))


def neighbors_road(data: Observations, split: Split) -> Road:
    """How densities given neighbours are computed, and why not by a faster way."""
    gram = closed_form_of(_lazy_kernel(data.latent), dense=True)
    size = cast(Tensor, split.conditioned_on).shape[-1] + 1
    how = f"Cholesky factors of {size} points each"
    if isinstance(gram, Gram):
        return Road(f"closed form, {how}")
    return Road(f"GPyTorch's kernel, {how}", gram.text)


def _lazy_kernel(latent: LinearOperator) -> LazyEvaluatedKernelTensor:
    if isinstance(latent, LazyEvaluatedKernelTensor):
        return latent
    got, expected = type(latent).__name__, "a model with one kernel of all of its points"
    raise UnsupportedError("conditioning", f"NearestNeighbors for {got}", expected)


def _noise_at(data: Observations, index: Tensor) -> Tensor | torch.nn.Module:
    """Variances of the noise at each row of an index, or the module that has one for all."""
    noise = data.independent_noise
    if noise is None or data.num_tasks > 1:
        expected = "a model with one target for each row and independent noise"
        raise UnsupportedError("conditioning", "NearestNeighbors", expected)
    return noise.expand(data.residual.shape)[index] if isinstance(noise, Tensor) else noise


def _matrix(lazy: LazyEvaluatedKernelTensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The matrix of points by GPyTorch's kernel."""
    with torch.set_grad_enabled(lazy._is_grad_enabled and torch.is_grad_enabled()):
        kernel = LazyEvaluatedKernelTensor(
            rows, columns, kernel=lazy.kernel, last_dim_is_batch=lazy.last_dim_is_batch,
            **lazy.params,
        )  # fmt: skip
        return kernel.to_dense()


@posterior_settings()
@torch.no_grad()
def posterior_given_neighbors(
    model: ExactGP, x: Tensor, neighbors: int, progress: bool | None = None
) -> PosteriorNormal:
    """The latent marginals at new points, each given its nearest training points.

    Memory is linear in the number of training points, and the time of a point is ``neighbors³``.

    Args:
        model: A model in eval mode, with training data.
        x: New points, ``(m, d)``.
        neighbors: Number of training points that each is conditioned on.
        progress: Whether to show a bar.

    Returns:
        In training units, with a diagonal covariance.
    """
    prior = JointPrior(model, x)
    data, n = prior.training_data(model), prior.num_train
    lazy = _lazy_kernel(prior.operator)
    gram, points = closed_form_of(lazy, dense=True), cast(Tensor, lazy.x1)
    if isinstance(gram, Gram):
        inside = [gram.on_features(chunk) for chunk in points.split(POINTS_AT_ONCE, -2)]
        gram, points = inside[0][0], torch.cat([chunk for _, chunk in inside], -2)
    metric = gram.metric(points) if isinstance(gram, Gram) else metric_points(lazy)
    seen = points.new_ones(n, dtype=torch.bool) if data.missing is None else ~data.missing
    rows = seen.nonzero().squeeze(-1)
    noise = _noise_at(data, rows)
    noise = cast(Any, noise).noise if isinstance(noise, torch.nn.Module) else noise
    noise, residual = noise.expand(len(rows)).double(), data.residual[rows].double()
    sites = find_copies(points[rows], neighbors)
    if sites is not None:  # all that copies of a point say is their mean
        sites = sites.to(x.device)
        total = noise.new_zeros(int(sites.max()) + 1)
        precision = total.index_add(0, sites, 1 / noise)
        residual = total.index_add(0, sites, residual / noise) / precision
        rows, noise = total.long().index_copy(0, sites, rows), 1 / precision
    index = NeighborIndex(metric[rows])
    neighbors = min(neighbors, index.num_rows)
    size = max(1, _ENTRIES_AT_ONCE["cpu" if x.is_cpu else "other"] // neighbors**2)
    identity = torch.eye(neighbors, dtype=torch.float64, device=x.device)

    def kernel(rows: Tensor, columns: Tensor | None = None) -> Tensor:
        if isinstance(gram, Gram):
            return gram(rows, columns).value
        return _matrix(lazy, rows, rows if columns is None else columns).double()

    means, variances = [], []
    starts = range(n, len(metric), size)
    for start in environment.progress_bar(starts, progress=progress, desc="predict", leave=False):
        new = slice(start, start + size)
        near = index.nearest(metric[new], neighbors).to(x.device)
        given, asked = points[rows[near]].double(), points[new].double().unsqueeze(-2)
        matrix = torch.addcmul(kernel(given), noise[near].unsqueeze(-1), identity)
        block = DenseCovariance(matrix).predictor(residual[near]).given(kernel(given, asked))
        variance = kernel(asked).flatten()
        means.append(block.shift.flatten())
        variances.append(above_rounding(variance - block.reduction.flatten(), variance))
    mean = prior.mean + torch.cat(means).to(x)
    return PosteriorNormal(mean, DiagLinearOperator(torch.cat(variances).to(x)))


_MOST_TRIED = 512  # neighbours, where predictions take seconds for a thousand points
_JUDGED = 256  # training rows that decide how many neighbours are enough
_LEAST_GAIN = 0.01  # nats
_FLOOR = -5.0  # nats: no row that a model is far too sure of decides
_MOST_JOINT = 32  # points that are predicted together


@dataclass
class _TrainingNeighbors:
    """Where the training points of a model are in its metric, as long as model and data stay."""

    state: tuple[str, int, int]
    data: tuple[Tensor, Tensor]
    points: Tensor
    index: NeighborIndex
    enough: int | None = None


_KEPT: WeakKeyDictionary[ExactGP, _TrainingNeighbors] = WeakKeyDictionary()


def _training_neighbors(model: ExactGP) -> _TrainingNeighbors:
    data = cast(Any, model.train_inputs)[0], cast(Tensor, model.train_targets)
    # By value: GPyTorch sets hyperparameters in ways that a tensor's version does not count.
    values = digest([*model.parameters(), *model.buffers()])
    state = values, data[0]._version, data[1]._version
    kept = _KEPT.get(model)
    same = kept is not None and all(a is b for a, b in zip(kept.data, data, strict=True))
    if kept is None or not same or kept.state != state:
        seen = training_observations(model)
        rows = None if seen.missing is None else (~seen.missing).nonzero().squeeze(-1).cpu()
        points = seen.metric()
        kept = _KEPT[model] = _TrainingNeighbors(state, data, points, NeighborIndex(points, rows))
    return kept


@posterior_settings()
@torch.no_grad()
def count_neighbors(model: ExactGP, neighbors: int | str, seed: int = 0) -> int:
    """The number of neighbours itself, or for ``"auto"`` as many as pay.

    From 32 on the number is doubled, up to 512, as long as the mean log density of 256 training
    rows given their neighbours gains more than 0.01 nats. This costs up to half as much again as
    256 predictions given the largest number tried, once until parameters or data change.

    Args:
        model: A model in eval mode, with training data.
        neighbors: A number, or ``"auto"``.
        seed: Of the rows that are drawn.
    """
    if neighbors != "auto":
        check_counts(neighbors=cast(int, neighbors))
        return cast(int, neighbors)
    kept = _training_neighbors(model)
    if kept.enough is None:
        data, most = training_observations(model), min(_MOST_TRIED, kept.index.num_rows - 1)
        split = data.split(NearestNeighbors(max(1, most), _JUDGED, seed=seed), None)
        chunks = [
            rows.split(16) for rows in (split.held_out[0], cast(Tensor, split.conditioned_on))
        ]
        kept.enough, best = 32, -torch.inf
        for count in (32, 64, 128, 256, 512):
            values = [
                conditional_log_densities(data, Split([held_out], given[:, :count]))
                for held_out, given in zip(*chunks, strict=True)
            ]
            mean = float(torch.cat(values).clamp_min(_FLOOR).mean())
            if mean < best + _LEAST_GAIN:
                break
            kept.enough, best = count, mean
            if count >= most:
                break
    return kept.enough


@torch.no_grad()
def _nearest_rows(model: ExactGP, groups: Tensor, neighbors: int) -> Tensor:
    """Rows of the training points that are nearest to any point of a group, ``(b, k)``."""
    kept, (b, q, d) = _training_neighbors(model), groups.shape
    prior = cast(Any, model.forward(groups.reshape(-1, d)))
    points = metric_points(_lazy_kernel(prior.lazy_covariance_matrix))
    near = kept.index.nearest(points, neighbors).to(groups.device)
    if q == 1:
        return near
    distances = (kept.points[near] - points.unsqueeze(-2)).square().sum(-1).view(b, -1)
    near = near.view(b, -1).gather(-1, distances.argsort(-1))
    rows, rank = near.sort(stable=True, dim=-1)
    rank[:, 1:][rows[:, 1:] == rows[:, :-1]] = rows.shape[-1]  # near to several of the points
    most = min(kept.index.num_rows, max(neighbors, min(q * neighbors, _MOST_TRIED)))
    count = min(most, int((rank < rows.shape[-1]).sum(-1).min()))
    return rows.gather(-1, rank.argsort(-1)[:, :count])


@posterior_settings()
def joint_posterior_given_neighbors(model: ExactGP, x: Tensor, neighbors: int) -> PosteriorNormal:
    """The latent posterior of few points together, given the training points nearest to any.

    It is the exact posterior of a model of these training points alone, and differentiable. More
    than 32 points are predicted one by one: their covariance is diagonal.

    Args:
        model: A model in eval mode, with training data.
        x: Points, ``(*batch, q, d)``, as the training inputs are in eval mode.
        neighbors: Training points for each point; a group has at most 512 or as many as one point.
    """
    if cast(Tensor, model.train_targets).ndim > 1:
        raise UnsupportedError("neighbors", "a batch", "one model of one output")
    q = x.shape[-2] if x.shape[-2] <= _MOST_JOINT else 1
    groups = x.reshape(-1, q, x.shape[-1])
    rows = _nearest_rows(model, groups, neighbors)
    size = max(1, _ENTRIES_AT_ONCE["cpu" if x.is_cpu else "other"] // (rows.shape[-1] + q) ** 2)
    posteriors = [
        exact_posterior(_on_rows(model, near), points, marginal=False)
        for near, points in zip(rows.split(size), groups.split(size), strict=True)
    ]
    mean = torch.cat([posterior.mean for posterior in posteriors]).reshape(x.shape[:-1])
    matrix = torch.cat([posterior.covariance_matrix for posterior in posteriors])
    if q < x.shape[-2]:
        return PosteriorNormal(mean, DiagLinearOperator(matrix.reshape(mean.shape)))
    return PosteriorNormal(mean, matrix.reshape(*mean.shape, q))


def _on_rows(model: ExactGP, rows: Tensor) -> ExactGP:
    """A model of some training rows, ``(b, k)``, which shares its parameters."""
    model = copy.copy(model)
    likelihood, inputs = cast(Any, model.likelihood), cast(Any, model.train_inputs)[0]
    if isinstance(model.likelihood, FixedNoiseGaussianLikelihood):
        model._modules, likelihood = dict(model._modules), copy.copy(likelihood)
        likelihood._modules = dict(likelihood._modules)
        likelihood.noise_covar = copy.copy(likelihood.noise_covar)
        likelihood.noise_covar.noise = likelihood.noise_covar.noise[rows]
        model.likelihood = likelihood
    model.set_train_data(inputs[rows], cast(Tensor, model.train_targets)[rows], strict=False)
    return model
