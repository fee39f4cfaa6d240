"""Fits of networks: weights to the mode of their posterior, the rest by the Laplace evidence."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpclml._utils.arguments import (
    callers_level,
    check_counts,
    check_finite,
    check_positive,
    checked,
    seeded,
)
from gpclml._utils.resuming import digest, module_classes
from gpclml.conditioning.batches import Loader, TrainingBatches
from gpclml.curvature import FunctionSpace
from gpclml.curvature.output_likelihoods import check_targets_belong
from gpclml.errors import ArgumentError
from gpclml.fit.evidence import (
    LogNoise,
    gradients_of,
    noise_and_residual,
    start_from_residuals,
    take_ratios,
    told_of_scales,
)
from gpclml.fit.result import FitResult, FitWarning
from gpclml.fit.train import Training, falling
from gpclml.inference import evaluating
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

_LAST = 10  # the part of a fit that is its last tenth
_CLIMBS = 0.1  # nats, of all points, gained by the last tenth of a fit to one curvature
_CLIMBS_ONLINE = 0.003  # nats per point, gained by the last tenth while weights are trained too


@dataclass(frozen=True, kw_only=True)
class OnlineFitResult(FitResult):
    """What :func:`fit_online` did, in all runs where it was resumed.

    ``objective`` is the largest evidence, nats per point, whose weights and hyperparameters the
    model has (NaN if there was none), ``history`` the evidence each time that hyperparameters were
    fitted.

    Attributes:
        log_joints: Log joint density in nats per point at each epoch, the mean over its batches.
        evaluated: Numbers of epochs after which hyperparameters were fitted.
        best: Number of epochs of the largest evidence; that of the last epoch if there was none.
    """

    log_joints: list[float] = field(repr=False)
    evaluated: list[int] = field(repr=False)
    best: int


class _NetworkTraining:
    """Training of a network's weights, an epoch a step, and of hyperparameters between epochs.

    ``rates`` of the weights are the first, the last and the number of epochs; without a rate of
    their own hyperparameters stay as they are.
    """

    def __init__(
        self,
        mll: LaplaceMarginalLogLikelihood,
        x: Tensor | Loader,
        y: Tensor | None,
        batch_size: int | None,
        seed: int,
        *,
        rates: tuple[float, float | None, int] = (1.0, None, 1),
        hyper_lr: float | None = None,
        progress: bool | None = None,
    ) -> None:
        self.mll = mll
        self.model = cast(LinearizedNetwork, mll.model)
        self.generator = seeded(seed)
        parameters = list(self.model.network.parameters())
        self.data = TrainingBatches(
            x, y, mll.num_data, batch_size=batch_size, generator=self.generator,
            device=parameters[0].device,
        )  # fmt: skip
        lr, final_lr, epochs = rates
        self._rate = falling(lr, lr if final_lr is None else final_lr, epochs)
        self.optimizers = [torch.optim.Adam([p for p in parameters if p.requires_grad], lr=lr)]
        self.seen: list[tuple[Tensor, Tensor]] = []  # outputs and targets of the last pass
        self.course = Training(mll)
        self.progress = progress
        if hyper_lr is not None:
            weights = {id(p) for p in parameters}
            hyper = [p for p in mll.parameters() if id(p) not in weights and p.requires_grad]
            if not hyper:
                raise ArgumentError("mll", "no trainable hyperparameter", "at least one")
            # Steps on the noise itself would depend on the units of the targets.
            self.log_noise = noise = LogNoise.of(cast(Likelihood, mll.likelihood))
            hyper = [noise.leaf if noise and p is noise.parameter else p for p in hyper]
            self.optimizers.append(torch.optim.Adam(hyper, lr=hyper_lr))

    def epoch(self, done: int) -> float:
        """Trains on all data once, after so many epochs; the mean log joint density a point."""
        self.optimizers[0].param_groups[0]["lr"] = self._rate(done)
        values, self.seen = [], []
        for x, y in self.data:
            output = self.model(x)
            # Noise far above the first residuals would hide the targets from the weights.
            if len(self.optimizers) > 1 and done == 0 and not values:
                noise, size = noise_and_residual(cast(Any, self.mll.likelihood), output.mean, y)
                if noise is not None and size > 0:
                    noise.write(min(float(noise.leaf.detach()), math.log(size)))
            value = self.mll.log_joint(output, y)
            _step_uphill(self.optimizers[0], value)
            values.append(value.detach())
            self.seen.append((output.mean.detach(), y))
        mean = torch.stack(values).mean()  # the one read of the device in an epoch
        check_finite("log joint density", mean, "Lower lr.")
        return float(mean)

    def problem(self, climbs: bool, suggestion: str) -> dict[str, Any]:
        """Message and problem of the result: unlike sizes, which are warned of, or a climb."""
        seen = [torch.cat(values) for values in zip(*self.seen, strict=True)]
        if told := told_of_scales(cast(Likelihood, self.mll.likelihood), *seen) if seen else "":
            warnings.warn(told, FitWarning, stacklevel=callers_level())
            return {"message": told, "problem": "units"}
        return {"message": suggestion, "problem": "limit"} if climbs else {}

    def train_hyperparameters(self, steps: int, trained: bool = False) -> list[float]:
        """The evidence before each step, or its estimate, in eval mode; the last one is noted.

        With ``trained`` weights, classes that have nothing to do with their points are refused.
        """
        mll = self.mll
        # The evidence of all data is known where it is a sum of curvature that is computed once.
        one_batch = self.data.batch_size >= mll.num_data
        every_output = mll.hessian == "ef" or mll.outputs == "all"
        adds_up = one_batch or not isinstance(mll.curvature, FunctionSpace)
        whole = None
        with evaluating(self.model.network):
            take_ratios(mll.likelihood, self.model.network, self.data)
            if adds_up and every_output and self.model.augmentation is None:
                whole = mll.evidence_of(self.data, progress=self.progress)
                if trained:
                    check_targets_belong("train_y", *whole.seen)

            def step(number: int) -> float:
                evidence = whole or mll.evidence_of(*self.data.drawn())
                value = evidence()
                before = value.detach()
                # The first fit of all begins where the evidence is largest of three starts.
                if number == 0 and not self.course.looks:
                    start_from_residuals(evidence)
                    value = evidence()
                _step_uphill(self.optimizers[1], value, self.log_noise)
                return float(before)

            history = [step(number) for number in range(steps)]
            with torch.no_grad():
                if whole is not None:
                    value = whole()
                else:
                    values = [mll.evidence_of(x, y)() * len(x) for x, y in self.data]
                    value = torch.stack(values).sum() / mll.num_data
        check_finite("evidence", value, "Lower hyper_lr.")
        self.course.note(float(value))
        self.seen = [] if whole is None else [whole.seen]
        return history


def _step_uphill(
    optimizer: torch.optim.Optimizer, value: Tensor, log_noise: LogNoise | None = None
) -> None:
    """A step uphill, by gradients of these parameters alone."""
    leaves = optimizer.param_groups[0]["params"]
    for leaf, gradient in zip(leaves, gradients_of(-value, leaves, log_noise), strict=True):
        leaf.grad = gradient
    if log_noise is not None:
        log_noise.read()
    optimizer.step()
    if log_noise is not None:
        log_noise.write()


def _climbs(values: list[float], num_data: int, exact: bool) -> bool:
    """Whether the last tenth of the steps gained; of estimates, beyond twice their error."""
    last = max(1, len(values) // _LAST)
    if exact:
        return (values[-1] - values[-1 - last]) * num_data > _CLIMBS
    if last < 2:
        return False
    before, after = torch.tensor(values[-2 * last :], dtype=torch.float64).split(last)
    gain = float(after.mean() - before.mean())
    error = math.sqrt(float(before.var() + after.var()) / last)
    return gain * num_data > _CLIMBS and gain > 2 * error


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def fit_map(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor | Loader,
    train_y: Tensor | None = None,
    *,
    epochs: int = 100,
    batch_size: int | None = None,
    lr: float = 1e-3,
    final_lr: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> FitResult:
    """Trains the weights alone, by Adam, to the mode of their posterior.

    They maximize :meth:`~gpclml.mlls.LaplaceMarginalLogLikelihood.log_joint`, in the network's own
    mode and with fixed hyperparameters.

    Args:
        mll: The objective; ``num_data`` is the number of training points. Trained in place.
        train_x: Points, ``(N, *event)``; or a ``DataLoader`` of pairs of points and targets,
            whose batches are read as they are needed.
        train_y: Their targets; None with a loader.
        epochs: Number of passes over the data.
        batch_size: Points of a batch of tensors; all if None.
        lr: Learning rate of the first epoch.
        final_lr: Learning rate of the last epoch, reached by half a cosine; constant if None.
        seed: Seed of the order of the points.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        The log joint density in nats per point at each epoch, the mean over its batches before
        their steps; ``objective`` is that of the last.

    Raises:
        ArgumentError: A number is out of range, ``num_data`` is another, or a loader gives
            nothing or no pairs.
        ShapeError: Points and targets are not as many, or the network does not take the points.
        NonFiniteError: Data or a log joint density are not finite.

    Warns:
        FitWarning: Outputs are of another size than targets, as with targets in raw units.

    Examples:
        >>> import torch
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpclml import MLP, LaplaceMarginalLogLikelihood, LinearizedNetwork, fit_map
        >>> x = torch.linspace(-1, 1, 100).unsqueeze(-1)
        >>> model = LinearizedNetwork(MLP([1, 20, 1]))
        >>> mll = LaplaceMarginalLogLikelihood(GaussianLikelihood(), model, num_data=100)
        >>> result = fit_map(mll, x, (3 * x[:, 0]).sin(), epochs=50, lr=0.01, final_lr=1e-4)
        >>> evidence = mll(model(x), (3 * x[:, 0]).sin())
    """
    check_counts(epochs=epochs, batch_size=batch_size)
    check_positive(lr=lr, final_lr=final_lr)
    rates = lr, final_lr, epochs
    training = _NetworkTraining(mll, train_x, train_y, batch_size, seed, rates=rates)
    course = training.course
    course.run(training.epoch, epochs, desc="epochs", progress=progress)
    return FitResult(
        objective=course.history[-1], history=course.history, seconds=course.seconds,
        **training.problem(False, ""),
    )  # fmt: skip


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def fit_online(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor | Loader,
    train_y: Tensor | None = None,
    *,
    epochs: int = 100,
    batch_size: int | None = None,
    lr: float = 1e-3,
    final_lr: float | None = None,
    hyper_lr: float = 0.1,
    hyper_steps: int = 10,
    burn_in: int = 10,
    every: int = 1,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> OnlineFitResult:
    """Alternates Adam steps on the weights and on the hyperparameters (Immer et al. 2021, Alg. 1).

    Weights maximize the log joint density of mini-batches, in the network's own mode. After a
    burn-in, every few epochs, the hyperparameters maximize the evidence in eval mode: prior
    precisions, noise, a temperature that is a parameter, and the ranges of an augmentation. The
    curvature is computed once each time, over all data in batches; ``FunctionSpace``, estimates
    from one output and augmentations take a new batch for each step. The weights and
    hyperparameters of the largest evidence are kept. Noise begins at most at the mean squared
    residual of the first batch, and goes on as in :func:`fit_hyperparameters`.

    With a checkpoint the training is saved after every evaluation and, as of the last whole epoch,
    at an interrupt. It resumes from there bit for bit; only layers that draw from PyTorch's global
    generator, such as dropout, draw other numbers. Data and settings must be the same, except
    ``epochs`` if ``final_lr`` is None.

    Args:
        mll: The objective; ``num_data`` is the number of training points. Trained in place.
        train_x: Points, ``(N, *event)``; or a ``DataLoader`` of pairs of points and targets, whose
            batches are read as they are needed. A checkpoint stores neither the loader's data nor
            their order.
        train_y: Their targets; None with a loader.
        epochs: Number of passes over the data.
        batch_size: Points of a batch of tensors; all if None.
        lr: Learning rate of the weights in the first epoch.
        final_lr: Learning rate in the last epoch, reached by half a cosine; constant if None.
        hyper_lr: Learning rate of the hyperparameters.
        hyper_steps: Steps in each fit of the hyperparameters.
        burn_in: Epochs before the first fit of the hyperparameters.
        every: Epochs between fits of the hyperparameters.
        seed: Seed of the order of the points.
        checkpoint: File to save to at every evaluation and at an interrupt, and to resume from.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        The course of the training; ``problem`` is "limit" if the last tenth of the evidences gained
        more than 0.003 nats per point.

    Raises:
        ArgumentError: A number is out of range, ``num_data`` is another, or a loader gives
            nothing or no pairs.
        ShapeError: Points and targets are not as many, or the network does not take the points.
        NonFiniteError: Data, a log joint density or an evidence are not finite.
        UnsupportedError, ModelModeError, NotPSDError: As the objective.
        DataError: The checkpoint cannot be written or read, is damaged, or belongs to another model
            or training; the message says how they differ.

    Warns:
        FitWarning: Outputs are of another size than targets, as with targets in raw units.

    Examples:
        >>> import torch
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> from gpclml import MLP, LaplaceMarginalLogLikelihood, LinearizedNetwork, fit_online
        >>> x = torch.linspace(-1, 1, 100).unsqueeze(-1)
        >>> model = LinearizedNetwork(MLP([1, 20, 1]))
        >>> mll = LaplaceMarginalLogLikelihood(GaussianLikelihood(), model, num_data=100)
        >>> result = fit_online(mll, x, (3 * x[:, 0]).sin(), epochs=20, burn_in=5, lr=0.01)
    """
    check_counts(epochs=epochs, batch_size=batch_size, hyper_steps=hyper_steps, every=every)
    check_positive(lr=lr, final_lr=final_lr, hyper_lr=hyper_lr)
    check_counts(0, burn_in=burn_in)
    training = _NetworkTraining(
        mll, train_x, train_y, batch_size, seed, rates=(lr, final_lr, epochs), hyper_lr=hyper_lr,
        progress=progress,
    )  # fmt: skip
    course, data = training.course, training.data
    if checkpoint is not None:
        kinds = [module_classes(mll), mll.num_data, mll.hessian, mll.outputs, mll.curvature]
        settings = {
            "train_x": digest(data.x if data.batch_size else "a loader"),
            "train_y": digest(data.y), "objective": digest(kinds), "batch_size": batch_size,
            "lr": lr, "final_lr": final_lr, "hyper_lr": hyper_lr, "hyper_steps": hyper_steps,
            "burn_in": burn_in, "every": every, "seed": seed,
            # Where the rate falls, that of an epoch depends on how many there are.
            "epochs": None if final_lr is None else epochs,
        }  # fmt: skip
        course.resume(
            checkpoint, "gpclml.OnlineFit", mll, training.optimizers, settings, training.generator
        )

    def look(epoch: int) -> dict[str, Any] | None:
        if epoch <= burn_in or (epoch - burn_in - 1) % every:
            return None
        training.train_hyperparameters(hyper_steps)
        course.save()
        return {"evidence": f"{course.scores[-1]:.4f}"}

    course.run(training.epoch, epochs, callback=look, desc="epochs", progress=progress)
    course.keep_best()
    scores = course.scores
    earlier = scores[: -max(1, len(scores) // _LAST)]
    climbs = bool(earlier) and max(scores) - max(earlier) > _CLIMBS_ONLINE
    suggestion = "The evidence still climbed at the last epochs. Raise epochs."
    return OnlineFitResult(
        objective=max(scores, default=math.nan), history=scores, seconds=course.seconds,
        log_joints=course.history, evaluated=course.looks, best=course.best,
        **training.problem(climbs, suggestion),
    )  # fmt: skip


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def fit_hyperparameters(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor | Loader,
    train_y: Tensor | None = None,
    *,
    steps: int = 100,
    batch_size: int | None = None,
    lr: float = 0.1,
    seed: int = 0,
    progress: bool | None = None,
) -> FitResult:
    """Fits prior precisions, noise and the like to the evidence at the weights as they are.

    It uses Adam, as :func:`fit_online` does between epochs. Where the curvature is a sum over
    batches it is computed once. With a Gaussian likelihood it starts where the evidence is largest
    of three: the hyperparameters as they are; noise at the mean squared residual; and also the
    precision of each group of weights at its most likely value, the number of weights over the sum
    of their squares. GPyTorch's bound of the noise, 1e-4 in any units, becomes 1e-10 of the
    targets' variance; a bound of your own stays.

    Args:
        mll: The objective; ``num_data`` is the number of training points. Trained in place.
        train_x: Points, ``(N, *event)``; or a ``DataLoader`` of pairs of points and targets.
        train_y: Their targets; None with a loader.
        steps: Steps of Adam.
        batch_size: Number of points whose curvature is computed at a time, if the data are tensors;
            all if None.
        lr: Learning rate.
        seed: Seed of the order of the points.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        The final evidence in nats per point; ``history`` has that before each step, the first one
        of the hyperparameters as they were. ``problem`` is "limit" if the last tenth of the steps
        gained more than 0.1 nats in all.

    Raises:
        ArgumentError: A number is out of range, ``num_data`` is another, no hyperparameter is
            trainable, or classes were shuffled apart from their points.
        ShapeError: Points and targets are not as many.
        NonFiniteError: The evidence is not finite.

    Warns:
        FitWarning: Outputs and targets, or residuals of several outputs, are of different sizes.
    """
    check_counts(steps=steps, batch_size=batch_size)
    check_positive(lr=lr)
    training = _NetworkTraining(
        mll, train_x, train_y, batch_size, seed, hyper_lr=lr, progress=progress
    )
    history = training.train_hyperparameters(steps, trained=True)
    evidence, exact = training.course.scores[-1], bool(training.seen)
    suggestion = "The evidence still climbs at the last steps. Raise steps, or lr."
    return FitResult(
        objective=evidence, history=history, seconds=training.course.seconds,
        **training.problem(_climbs([*history, evidence], mll.num_data, exact), suggestion),
    )  # fmt: skip
