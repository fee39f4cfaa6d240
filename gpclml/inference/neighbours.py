"""Densities and predictions of points given their nearest neighbours.

Each point is a small Gaussian of its own, and all of a batch are evaluated together: covariances
``(b, k + 1, k + 1)`` of the neighbours and the point, in double precision. A model is asked for the
rows that take part alone, and in chunks for all rows in the metric of its kernel.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from gpytorch.distributions import MultivariateNormal
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
    kernel_road,
    metric_points,
    missing_targets,
    training_observations,
)
from gpclml.inference.posterior import exact_posterior, posterior_settings
from gpclml.inference.units import PosteriorNormal, above_rounding
from gpclml.linalg import DenseCovariance, GramCovariance

_LOOKED_UP_AT_ONCE = 2048  # new points
_ENTRIES_AT_ONCE = {"cpu": 1 << 19, "other": 1 << 28}  # of covariances of neighbours


def mean_log_density(data: Observations, split: Split) -> Tensor:
    """The mean log density of held-out targets given their neighbours, ``()``."""
    checked, size = reads_are_free(data.residual.device), split.held_out[0].shape[-1]
    value = conditional_log_densities(data, split, checked=checked).mean() / size
    if not all_finite(value):
        if not checked:  # again, with every factorization checked
            value = conditional_log_densities(data, split).mean() / size
        data.check_density(value)
    return value


def conditional_log_densities(data: Observations, split: Split, *, checked: bool = True) -> Tensor:
    """Log densities of held-out blocks, each given the rows that a split names for it, ``(b,)``.

    Of one model with one target for each row. The split has held-out rows ``(b, q)`` and the rows
    that each block is conditioned on, ``(b, k)``; -1 is no row.
    """
    rows, split = split.restricted()
    data = data._select(rows)
    # A network sees each point once, however many are its neighbours.
    kernel, noise, device = _Kernel(data.latent), _noise(data), data.residual.device
    index = torch.cat([cast(Tensor, split.conditioned_on), split.held_out[0]], -1)
    absent, index = (index < 0).to(device), index.clamp_min(0).to(device)
    # Rows are on the CPU, where a GPU is not waited for.
    is_complete = data.missing is None and bool((cast(Tensor, split.conditioned_on) >= 0).all())
    if data.missing is not None:
        absent = absent | data.missing[index]
    noise = noise[index] if isinstance(noise, Tensor) else noise
    covariance = kernel.covariance(kernel.points[index], noise)
    if not is_complete:  # absent ones are standard normals, independent of all others
        matrix = covariance.to_dense()
        matrix = matrix.masked_fill(absent.unsqueeze(-1) | absent.unsqueeze(-2), 0.0)
        covariance = DenseCovariance(matrix + torch.diag_embed(absent.to(matrix)))
    covariance = covariance if checked else covariance.unchecked()
    residual = data.residual[index].masked_fill(absent, 0.0)
    last = torch.arange(index.shape[-1])[-split.held_out[0].shape[-1] :]
    return covariance.held_out_log_density(residual, [last.unsqueeze(0)])


def neighbors_road(latent: LinearOperator, size: int) -> Road:
    """How densities of so many points together are computed, and why not by a faster way."""
    return kernel_road(latent, f"Cholesky factors of {size} points each")


def _noise(data: Observations) -> Tensor | torch.nn.Module:
    """Variances of the noise, ``(n,)``, or the module that has one for all."""
    noise = data.independent_noise
    if noise is None or data.num_tasks > 1:
        expected = "a model with one target for each row and independent noise"
        raise UnsupportedError("conditioning", "NearestNeighbors", expected)
    return noise.expand(data.residual.shape) if isinstance(noise, Tensor) else noise


def _lazy_kernel(latent: LinearOperator) -> LazyEvaluatedKernelTensor:
    if isinstance(latent, LazyEvaluatedKernelTensor):
        return latent
    got, expected = type(latent).__name__, "a model with one kernel of all of its points"
    raise UnsupportedError("conditioning", f"NearestNeighbors for {got}", expected)


class _Kernel:
    """A kernel that was called, in closed form or not; features of its points are computed once.

    Attributes:
        points: What it is called on: inputs, or features and inputs, ``(n, q)``.
    """

    def __init__(self, latent: LinearOperator) -> None:
        self._lazy, self._gram = _lazy_kernel(latent), closed_form_of(latent, dense=True)
        self.points: Tensor = cast(Tensor, self._lazy.x1)
        self.has_features: bool = isinstance(self._gram, Gram) and self._gram.has_features
        if isinstance(self._gram, Gram):
            self._gram, self.points = self._gram.on_features(self.points)

    def metric(self) -> Tensor:
        """Points whose distances say how near the kernel finds them, ``(n, q)``."""
        gram = self._gram
        return gram.metric(self.points) if isinstance(gram, Gram) else metric_points(self._lazy)

    def matrix(self, rows: Tensor, columns: Tensor | None = None) -> Tensor:
        """Its matrix at any points, ``(*batch, n, m)``."""
        if isinstance(self._gram, Gram):
            return self._gram(rows, columns).value
        lazy, columns = self._lazy, rows if columns is None else columns
        with torch.set_grad_enabled(lazy._is_grad_enabled and torch.is_grad_enabled()):
            kernel = LazyEvaluatedKernelTensor(
                rows, columns, kernel=lazy.kernel, last_dim_is_batch=lazy.last_dim_is_batch,
                **lazy.params,
            )  # fmt: skip
            return kernel.to_dense()

    def covariance(self, points: Tensor, noise: Tensor | torch.nn.Module) -> DenseCovariance:
        """That of observations at sets of points, ``(b, k, q)``."""
        if isinstance(self._gram, Gram):
            shape = torch.Size((*points.shape[:-1], points.shape[-2]))
            return GramCovariance(self._gram, points, noise, shape)
        variances = noise if isinstance(noise, Tensor) else cast(Any, noise).noise
        matrix = self.matrix(points)
        identity = torch.eye(points.shape[-2], dtype=matrix.dtype, device=matrix.device)
        return DenseCovariance(torch.addcmul(matrix, variances.unsqueeze(-1), identity))


def _prior(model: ExactGP, x: Tensor) -> tuple[Tensor, _Kernel]:
    """Prior mean and kernel at some points."""
    prior = cast(MultivariateNormal, cast(Any, model).forward(x))
    return prior.mean, _Kernel(cast(LinearOperator, prior.lazy_covariance_matrix))


@torch.no_grad()
def training_metric(model: ExactGP, rows: Tensor | None = None, inside: bool = False) -> Tensor:
    """Training points, of all rows if None, in the metric of the kernel, ``(n, q)``, in chunks.

    With ``inside`` they are what the kernel within features is called on.
    """
    x = cast(tuple[Tensor, ...], model.train_inputs)[0]
    n, result = len(x) if rows is None else len(rows), x
    for start in range(0, n, POINTS_AT_ONCE):
        chunk = slice(start, start + POINTS_AT_ONCE)
        _, kernel = _prior(model, x[chunk] if rows is None else x[rows[chunk].to(x.device)])
        points = kernel.points if inside else kernel.metric()
        result = points.new_empty(n, points.shape[-1]) if start == 0 else result
        result[chunk] = points
    return result


_MOST_TRIED = 512  # neighbours, where predictions take seconds for a thousand points
_JUDGED = 256  # training rows that decide how many neighbours are enough
_LEAST_GAIN = 0.01  # nats
_FLOOR = -5.0  # nats: no row that a model is far too sure of decides
_COPIES = 4  # a point with another like it is one of many copies
_MOST_JOINT = 32  # points that are predicted together


@dataclass
class _TrainingNeighbors:
    """Where the training points of a model are in its metric, as long as model and data stay.

    Attributes:
        points: In the metric, ``(n, q)``; None where the index, of rows with a target, has all.
        inside: What the kernel within features is called on, ``(n, q)``; None without features.
        sites: Where many points have copies, for each row with a target the number of its point.
        alone: Of the first row at each point, ``firsts``; ``index`` where few have copies.
    """

    state: tuple[str, int, int]
    data: tuple[Tensor, Tensor]
    points: Tensor | None
    index: NeighborIndex
    inside: Tensor | None
    sites: Tensor | None
    alone: NeighborIndex
    firsts: Tensor | None
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
        missing = missing_targets(data[1])
        rows = None if missing is None else (~missing).nonzero().squeeze(-1).cpu()
        has_features = _prior(model, data[0][:1])[1].has_features
        inside = training_metric(model, inside=True) if has_features else None
        points = training_metric(model)
        index = alone = NeighborIndex(points, rows)
        observed_points = points if rows is None else points[rows.to(points.device)]
        sites, firsts = find_copies(observed_points, _COPIES), None
        if sites is not None:
            observed = torch.arange(len(points)) if rows is None else rows
            last_first = sites.flip(0), observed.flip(0)  # of equal ones the last is kept
            firsts = observed.new_zeros(int(sites.max()) + 1).index_copy(0, *last_first)
            alone = NeighborIndex(points, firsts)
        points = None if rows is None else points  # the index has all of them
        kept = _TrainingNeighbors(state, data, points, index, inside, sites, alone, firsts)
        _KEPT[model] = kept
    return kept


@posterior_settings()
@torch.no_grad()
def posterior_given_neighbors(
    model: ExactGP, x: Tensor, neighbors: int, progress: bool | None = None
) -> PosteriorNormal:
    """The latent marginals at new points ``(m, d)``, each given its nearest training points.

    In training units, with a diagonal covariance. Memory is linear in the number of training
    points, and the time of a point is ``neighbors³``. Where the training points are in the metric
    is kept until parameters or data change.
    """
    data, train_x = training_observations(model), cast(Any, model.train_inputs)[0]
    noise, residual, missing = _noise(data), data.residual, data.missing
    noise = cast(Any, noise).noise if isinstance(noise, torch.nn.Module) else noise
    noise = noise.expand(residual.shape)
    del data  # and the inputs that the kernel was called on
    kept = _training_neighbors(model)
    if kept.sites is not None and kept.firsts is not None:
        # All that copies of a point say is their mean, which stands in the first of them.
        sites, firsts = kept.sites.to(residual.device), kept.firsts.to(residual.device)
        observed = ... if missing is None else ~missing
        noise, residual = noise.double(), residual.double()
        total = torch.zeros(len(firsts), dtype=torch.float64, device=residual.device)
        precision = total.index_add(0, sites, 1 / noise[observed])
        weighted = total.index_add(0, sites, residual[observed] / noise[observed])
        residual = residual.index_copy(0, firsts, weighted / precision)
        noise = noise.index_copy(0, firsts, 1 / precision)
    neighbors = min(neighbors, kept.alone.num_rows)
    size = max(1, _ENTRIES_AT_ONCE["cpu" if x.is_cpu else "other"] // neighbors**2)
    means, shifts, variances = [], [], []
    chunks = environment.progress_bar(
        x.split(_LOOKED_UP_AT_ONCE), progress=progress, desc="predict", leave=False
    )
    for chunk in chunks:
        mean, kernel = _prior(model, chunk)
        means.append(mean)
        rows = kept.alone.nearest(kernel.metric(), neighbors).to(x.device)
        for near, new in zip(rows.split(size), kernel.points.split(size), strict=True):
            used, inside = near.flatten(), kept.inside
            given = _prior(model, train_x[used])[1].points if inside is None else inside[used]
            given, asked = given.double().unflatten(0, near.shape), new.double().unsqueeze(-2)
            block = kernel.covariance(given, noise[near]).predictor(residual[near].double())
            block = block.given(kernel.matrix(given, asked).double())
            variance = kernel.matrix(asked).double().flatten()
            shifts.append(block.shift.flatten())
            variances.append(above_rounding(variance - block.reduction.flatten(), variance))
    mean = torch.cat(means) + torch.cat(shifts).to(x)
    return PosteriorNormal(mean, DiagLinearOperator(torch.cat(variances).to(x)))


@posterior_settings()
@torch.no_grad()
def count_neighbors(model: ExactGP, neighbors: int | str, seed: int = 0) -> int:
    """The number of neighbours itself, or for ``"auto"`` as many as pay.

    From 32 on the number is doubled, up to 512, as long as the mean log density of 256 training
    rows given their neighbours gains more than 0.01 nats. This costs up to half as much again as
    256 predictions given the largest number tried, once until parameters or data change.
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
    known = kept.index if kept.points is None else kept.points
    distances = (known[near] - points.unsqueeze(-2)).square().sum(-1).view(b, -1)
    near = near.view(b, -1).gather(-1, distances.argsort(-1))
    rows, rank = near.sort(stable=True, dim=-1)
    rank[:, 1:][rows[:, 1:] == rows[:, :-1]] = rows.shape[-1]  # near to several of the points
    most = min(kept.index.num_rows, max(neighbors, min(q * neighbors, _MOST_TRIED)))
    count = min(most, int((rank < rows.shape[-1]).sum(-1).min()))
    return rows.gather(-1, rank.argsort(-1)[:, :count])


@posterior_settings()
def joint_posterior_given_neighbors(model: ExactGP, x: Tensor, neighbors: int) -> PosteriorNormal:
    """The latent posterior of few points together, ``(*batch, q, d)``, given those nearest to any.

    It is the exact posterior of a model of these training points alone, and differentiable. More
    than 32 points are predicted one by one: their covariance is diagonal. A group is given at most
    512 training points, or as many as one point.
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
