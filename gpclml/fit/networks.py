"""Training networks only as far as held-out data support it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils.arguments import check_counts, check_positive, checked, seeded
from gpclml._utils.environment import progress_bar
from gpclml._utils.resuming import copied_state
from gpclml.conditioning import KFold, NearestNeighbors
from gpclml.errors import NonFiniteError, UnsupportedError
from gpclml.fit.deep_kernel import deep_kernels, start_second_part, warm_start_fresh_models
from gpclml.fit.result import FitResult
from gpclml.fit.search import objective
from gpclml.fit.train import Training, falling, set_gradients
from gpclml.inference.observations import training_observations
from gpclml.mlls.fixed_loss import fresh_loss
from gpclml.models import GPRegression, find_networks

_CHECKPOINTS = 4  # at which folds are scored, evenly over the steps, after the one at the start
_ENOUGH = 1000  # held-out points to judge by: with as many, further folds are not used
_MARGIN = 1.5  # standard errors that a gain must exceed
# Standard errors below no gain at which training is given up: at its start, from which steps may
# still gain, and after steps.
_WORSE_START, _WORSE = 2.0, 1.0
_SUBSET = 400  # rows of a step: its cost does not grow with n
_START_ROWS = 1000  # at most
# Rows from which on folds start from parameters that were fitted to all rows, and a few iterations
# on their own rows, without which gains on the others mean little: a fifth of the time less.
_ONE_START = 500
# Of the learning rate: of the network of the kernel "deep", and of what is in no network.
_NETWORK_RATE, _OTHER_RATE = 0.1, 2.0
_WARM_UP = 50  # steps
_FOLDS = 4
_NO_VARIANCE = 1e-12  # next to which rounding is more


@dataclass(frozen=True, kw_only=True)
class NetworksFitResult(FitResult):
    """What :func:`fit_networks` did, and what held-out folds chose and why.

    ``objective`` is the final one, with fixed held-out points and all data; ``history`` has the
    objective of the random rows at each step on all data, and is empty if no training was chosen.

    Attributes:
        chosen: Index of the chosen checkpoint; 0 keeps the model as it was.
        steps: Number of steps taken at each checkpoint. The first is the untrained model, the
            second the start of the training, which differs for the kernel ``"deep"``. Fewer
            checkpoints mean that training ended early.
        gains: Mean gain in held-out log density over the untrained model, nats per point.
        standard_errors: Of the gains, over points.
    """

    chosen: int
    steps: list[int]
    gains: list[float]
    standard_errors: list[float]


@checked
def fit_networks(
    mll: MarginalLogLikelihood,
    *,
    steps: int = 300,
    lr: float = 0.01,
    seed: int = 0,
    progress: bool | None = None,
) -> NetworksFitResult:
    r"""Trains the networks of a model, with as many steps as held-out folds support.

    The kernel ``"deep"`` starts as the fitted ARD GP (:func:`gpclml.fit.warm_start`). Then the
    linear map and the hyperparameters of its second part are fitted by two line searches on the log
    marginal likelihood of up to 1000 rows, one from a shorter lengthscale and one from an indicator
    of one column's values; the better result is kept. Then everything is trained by Adam on the
    objective of 400 random rows in each step, so that the cost of a step does not grow with n. In
    any other model Adam trains networks and hyperparameters together from their current values.

    The number of steps is chosen by cross-validation on four folds, or fewer that hold 1000 points
    together. For each fold a copy is trained on the other folds and scored on the fold's points by
    :math:`\log p(y_i \mid y_{\ne i})` at five checkpoints; from 500 rows on, line searches on all
    rows come first, and each copy takes a few iterations on its own rows. Of the checkpoints with
    no larger squared error than the untrained model and a mean gain of more than 1.5 standard
    errors, the one with the largest mean gain is chosen, and training on all data takes as many
    steps. If there is none, the model is not changed, and ``"deep"`` becomes the ARD GP alone: the
    GP that :func:`~gpclml.fit.fit_mll` fits with the kernel ``"rbf"`` under the LML. Training on
    the folds ends early if the gain is a standard error below zero (two at the start) or no longer
    grows.

    Args:
        mll: An objective of a :class:`~gpclml.models.GPRegression` with a network in its kernel or
            mean, e.g. ``kernel="deep"``. Its held-out points must be drawn at random or be all
            points.
        steps: Most steps.
        lr: Learning rate of Adam for networks, with a warm-up and a cosine decay. Everything else
            has twice this rate, and the network of the kernel ``"deep"`` a tenth of it.
        seed: Seed of the folds and subsets.
        progress: Whether to show progress bars; None shows them on terminals and in notebooks.

    Returns:
        The checkpoint chosen and why. The objective and its model are left in eval mode.

    Raises:
        UnsupportedError: If the model is no GPRegression, batched, or has no network, or points are
            given neighbours.
        ArgumentError: If ``steps`` or ``lr`` is out of range.

    Note:
        At most one training for each fold used, and one on all data. Each score is a factor of all
        rows, O(n^3): of more than some thousand take ``fit_mll(mll, "adam")``.

    Examples:
        >>> import torch
        >>> from gpclml import ConditionalMarginalLogLikelihood, GPRegression, fit_networks
        >>> x = torch.rand(60, 3, dtype=torch.float64)
        >>> model = GPRegression(x, (9 * x.prod(-1)).sin(), kernel="deep")
        >>> mll = ConditionalMarginalLogLikelihood(model.likelihood, model)
        >>> result = fit_networks(mll, steps=20)
    """
    start, model = time.perf_counter(), mll.model
    if not isinstance(model, GPRegression) or not find_networks(model):
        raise UnsupportedError(
            "mll.model", type(model).__name__, "a GPRegression with a network", "Use fit_mll."
        )
    if cast(Tensor, model.train_targets).ndim > 1:
        raise UnsupportedError("mll.model", "a batch of models", "a single one", "Use fit_mll.")
    if isinstance(getattr(mll, "conditioning", None), NearestNeighbors):
        fix, expected = 'Use fit_mll(mll, "adam"), whose steps see all neighbours.', "another one"
        raise UnsupportedError("mll.conditioning", "NearestNeighbors", expected, fix)
    check_counts(steps=steps)
    check_positive(lr=lr)
    # Fewer than four where steps are few.
    checkpoints = sorted({round(steps * k / _CHECKPOINTS) for k in range(_CHECKPOINTS + 1)})
    folds = _folds(model, seed)
    warm_start_fresh_models(mll)
    rows, deep = _observed(model), deep_kernels(model)
    first = None
    if len(rows) >= _ONE_START and deep is not None:
        started = _SubsetTraining(copy.deepcopy(mll), rows, checkpoints, lr, seed)
        with suppress(NanError, NotPSDError):  # a fold may do without the rows that it fails with
            started.start()
            first = copied_state(started.mll)
    gains = _held_out_gains(mll, first, folds, checkpoints, lr, seed, progress)
    clear = [
        index
        for index, gain in enumerate(gains)
        if gain.mean > _MARGIN * gain.standard_error and gain.error >= 0
    ]
    # Without a clear gain the model stays as it is.
    chosen, message = max(clear, key=lambda index: gains[index].mean, default=0), ""
    history: list[float] = []
    if chosen:
        training = _SubsetTraining(mll, rows, checkpoints, lr, seed)
        before = copied_state(mll)
        try:
            if first is None:
                training.start()
            else:
                mll.load_state_dict(first)
            training.train(checkpoints[chosen - 1], progress)
        except (NanError, NotPSDError) as error:
            mll.load_state_dict(before)
            chosen, message = 0, str(error)
        history = training.course.history
    if chosen == 0 and deep is not None:
        with torch.no_grad():
            deep.residual.outputscale = _NO_VARIANCE
    mll.train()
    with _conditioned_on(model, rows):
        reached = objective(mll)
    mll.eval()
    return NetworksFitResult(
        objective=reached, history=history, seconds=time.perf_counter() - start, message=message,
        problem="stopped" if message else "", chosen=chosen,
        steps=[0, *checkpoints][: len(gains)], gains=[gain.mean for gain in gains],
        standard_errors=[gain.standard_error for gain in gains],
    )  # fmt: skip


def _observed(model: GPRegression) -> Tensor:
    return (~cast(Tensor, model.train_targets).isnan()).nonzero()[:, 0]


def _folds(model: GPRegression, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Rows to train on and rows held out, of as many folds as hold enough points together."""
    rows, missing = _observed(model), cast(Tensor, model.train_targets).isnan().cpu()
    groups = KFold(_FOLDS, seed).held_out(len(missing), observed=~missing)
    blocks = [block for group in groups for block in group.to(rows.device)]
    used = [k for k in range(len(blocks)) if sum(map(len, blocks[:k])) < _ENOUGH]
    return [(rows[~torch.isin(rows, blocks[k])], blocks[k]) for k in used]


class _Gain(NamedTuple):
    """What a training has gained at a checkpoint: log density, and a decrease in squared error."""

    mean: float
    standard_error: float
    error: float


def _held_out_gains(
    mll: MarginalLogLikelihood,
    first: dict[str, Any] | None,
    folds: Sequence[tuple[Tensor, Tensor]],
    checkpoints: Sequence[int],
    lr: float,
    seed: int,
    progress: bool | None,
) -> list[_Gain]:
    """Trains a copy for each fold, all to one checkpoint before any to the next.

    Returns the gain of the untrained model (zero), at the start of the training, and after each
    number of steps. If a fold cannot be trained on, or training ends early, the last gain is of
    fewer folds.
    """
    pairs = [
        (_SubsetTraining(copy.deepcopy(mll), kept, checkpoints, lr, seed), block)
        for kept, block in folds
    ]
    gains: list[_Gain] = []
    try:
        before = [training.score(block) for training, block in pairs]
        gains.append(_gain(before, before))
        total = len(folds) * len(checkpoints)
        with progress_bar(total=total, desc="folds", progress=progress) as bar:
            for steps in checkpoints:
                worse = _WORSE if steps else _WORSE_START
                scores: list[Tensor] = []
                gains.append(gains[0])
                for training, block in pairs:
                    # All folds to one checkpoint first: most trainings end early.
                    training.train(steps) if steps else training.start(first)
                    scores.append(training.score(block))
                    bar.update()
                    gains[-1] = _gain(scores, before)
                    if gains[-1].mean < -worse * gains[-1].standard_error:
                        return gains
                if steps and gains[-1].mean <= max(gain.mean for gain in gains[:-1]):
                    return gains
    except (NanError, NotPSDError):
        return gains[:-1] or [_Gain(0.0, 0.0, 0.0)]  # the last was not of all folds
    return gains


def _gain(scores: list[Tensor], before: list[Tensor]) -> _Gain:
    """Over the folds scored by now, which are the first ones."""
    pairs = zip(scores, before, strict=False)
    densities, errors = torch.cat([now - then for now, then in pairs], dim=-1)
    count = len(densities)
    error = float(densities.std()) / math.sqrt(count) if count > 1 else math.inf
    return _Gain(float(densities.mean()), error, -float(errors.mean()))


class _SubsetTraining:
    """Training of an objective on some rows of its model's data, which the model keeps.

    The learning rate of Adam rises, and falls by a half cosine up to the last of the checkpoints.
    """

    def __init__(
        self, mll: MarginalLogLikelihood, rows: Tensor, checkpoints: Sequence[int], lr: float,
        seed: int,
    ) -> None:  # fmt: skip
        self.mll = mll
        self.model = cast(GPRegression, mll.model)
        self.rows = rows
        self.course = Training()
        self.generator = seeded(seed)
        self.optimizer = torch.optim.Adam(self._groups(lr), lr=lr)
        decay = falling(1.0, 0.0, checkpoints[-1] + 1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP) * decay(step)
        )

    def start(self, state: dict[str, Any] | None = None) -> None:
        """Brings the kernel ``"deep"`` to where training starts, from a state if there is one."""
        if state is not None:
            self.mll.load_state_dict(state)
        if deep_kernels(self.model):
            start_second_part(self.model, self._subset(_START_ROWS), state is not None)

    def train(self, steps: int, progress: bool | None = False) -> None:
        """Goes on until there are so many steps in all, each on a fresh subset of the rows.

        A NonFiniteError or NotPSDError says that one could not be taken, or led nowhere.
        """
        self.mll.train()
        self.course.run(self._step, steps, desc="all rows", progress=progress)
        self.optimizer.zero_grad()
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise _not_finite("parameters")

    def _step(self, number: int) -> float:
        with _conditioned_on(self.model, self._subset(_SUBSET)):
            loss = set_gradients(self.optimizer, fresh_loss(self.mll), self.mll)
        self.optimizer.step()
        self.schedule.step()
        return -loss

    @torch.no_grad()
    def score(self, held_out: Tensor) -> Tensor:
        """Log densities and squared errors, ``(2, b)``, of other rows, each given all but itself.

        Conditioning on the other held-out rows too, as a prediction from all data will, judges the
        hyperparameters at the full number of rows. A NonFiniteError says that one is not finite.
        """
        with _conditioned_on(self.model, torch.cat([self.rows, held_out])):
            data = training_observations(self.model)
            last = torch.arange(len(self.rows), data.num_rows)
            mean, variance = data.covariance.leave_one_out(data.residual, last)
        error = data.residual[last] - mean
        if not bool((torch.isfinite(error) & torch.isfinite(variance)).all()):
            raise _not_finite("held-out densities")
        return torch.stack([Normal(0.0, variance.sqrt()).log_prob(error), error.square()])

    def _groups(self, lr: float) -> list[dict]:
        networks, rate = find_networks(self.model), 1.0
        if deep_kernels(self.model):  # its linear map is fitted already, unlike its network
            networks = [getattr(network, "network", network) for network in networks]
            rate = _NETWORK_RATE
        weights = [p for network in networks for p in network.parameters() if p.requires_grad]
        known = {id(p) for p in weights}
        others = [p for p in self.mll.parameters() if id(p) not in known and p.requires_grad]
        return [{"params": weights, "lr": rate * lr}, {"params": others, "lr": _OTHER_RATE * lr}]

    def _subset(self, size: int) -> Tensor:
        order = torch.randperm(len(self.rows), generator=self.generator)[:size]
        return self.rows[order.to(self.rows.device)]


@contextmanager
def _conditioned_on(model: GPRegression, rows: Tensor) -> Iterator[None]:
    """Within the block these rows are the model's training data."""
    assert model.train_inputs is not None
    x, y = model.train_inputs[0], cast(Tensor, model.train_targets)
    model.set_train_data(x[rows], y[rows], strict=False)
    try:
        yield
    finally:
        model.set_train_data(x, y, strict=False)


def _not_finite(what: str) -> NonFiniteError:
    suggestion = "Lower the learning rate, or look for duplicated rows."
    return NonFiniteError(what, "NaN or infinite values", "finite ones", suggestion)
