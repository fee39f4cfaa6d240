"""Training networks only as far as data they have not seen support it."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import cast

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpclml._losses import fresh_loss
from gpclml.conditioning import KFold
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit import FitResult, fit_mll
from gpclml.models import GPRegression, networks_of

__all__ = ["StoppingResult", "fit_networks"]

_EVERY = 10  # steps between two looks at the held-out folds
_PATIENCE = 8  # looks without a better one


@dataclass(frozen=True)
class StoppingResult:
    """What cross-validation chose and what the fit on all data then did.

    Attributes:
        steps: Number of steps taken on all data; 0 keeps the model as it was.
        gains: Mean gain in held-out log density over the start at each look, nats per point.
        standard_errors: Of the gains, over points.
        fit: The fit on all data; None without steps.
        seconds: Wall time of everything.
    """

    steps: int
    gains: list[float]
    standard_errors: list[float]
    fit: FitResult | None
    seconds: float


def fit_networks(
    mll: MarginalLogLikelihood,
    *,
    steps: int = 300,
    lr: float = 0.01,
    folds: int = 5,
    seed: int = 0,
    progress: bool = True,
) -> StoppingResult:
    r"""Trains the networks of a model, with as many steps as cross-validation supports.

    Kernel hyperparameters, mean and noise stay as they are: a residual deep kernel starts as
    the fitted ARD GP, and its network is to explain what that GP does not, not to lower the
    noise. Each fold trains a copy on the other folds under the objective and scores its own
    points, :math:`\log p(y_i \mid \text{other folds})`, every ten steps; training on all data
    then takes the number of steps whose mean gain over no step at all exceeds its standard
    error the most. Where none does, the model stays the ARD GP.

    Args:
        mll: An objective of a :class:`~gpclml.models.GPRegression` with a network in its
            kernel or mean, e.g. ``kernel="deep"``; one whose held-out points are drawn or all.
        steps: Most steps; held-out folds are looked at every ten, so fewer train nothing.
        lr: Learning rate of Adam.
        folds: Number of folds.
        seed: Seed of the folds.
        progress: Whether to show progress bars on standard error.

    Returns:
        The number of steps chosen and why. The objective and its model are left in eval mode.

    Raises:
        UnsupportedError: If the model is no GPRegression, batched, or has no network.
        ArgumentError: If ``steps`` or ``folds`` is out of range.

    Note:
        At most ``folds + 1`` gradients of the objective a step; it ends early where held-out
        scores stop improving.
    """
    start = time.perf_counter()
    model = _checked_model(mll)
    if steps < 1:
        raise ArgumentError("steps", steps, "at least 1")
    scores = _held_out_scores(mll, model, steps, lr, KFold(folds, seed), progress)
    gains = [score - scores[0] for score in scores]
    means = [float(gain.mean()) for gain in gains]
    errors = [float(gain.std()) / math.sqrt(gain.numel()) for gain in gains]
    supported = [mean - error for mean, error in zip(means, errors, strict=True)]
    best = max(range(len(supported)), key=supported.__getitem__)
    chosen = best * _EVERY
    fit = None
    if chosen:
        frozen = _names_outside_networks(mll)
        fit = fit_mll(mll, "adam", steps=chosen, lr=lr, freeze=frozen, progress=progress)
    mll.eval()
    return StoppingResult(chosen, means, errors, fit, time.perf_counter() - start)


def _checked_model(mll: MarginalLogLikelihood) -> GPRegression:
    model = mll.model
    if not isinstance(model, GPRegression) or not networks_of(model):
        raise UnsupportedError(
            "mll.model", type(model).__name__, "a GPRegression with a network", "Use fit_mll."
        )
    if cast(Tensor, model.train_targets).ndim > 1:
        raise UnsupportedError("mll.model", "a batch of models", "a single one", "Use fit_mll.")
    return model


def _held_out_scores(
    mll: MarginalLogLikelihood,
    model: GPRegression,
    steps: int,
    lr: float,
    folds: KFold,
    progress: bool,
) -> list[Tensor]:
    """Log densities of all observed points, each given the other folds, at each look."""
    from tqdm import tqdm

    targets = cast(Tensor, model.train_targets)
    observed = ~targets.isnan()
    members = [
        _Fold(mll, block, observed, lr)
        for group in folds.held_out(len(targets), observed=observed)
        for block in group.to(targets.device)
    ]
    scores = [torch.cat([member.score() for member in members])]
    best, since = 0.0, 0
    with tqdm(total=steps, desc="folds", disable=not progress) as bar:
        for _ in range(steps // _EVERY):
            for member in members:
                member.train(_EVERY)
            scores.append(torch.cat([member.score() for member in members]))
            bar.update(_EVERY)
            gain = float((scores[-1] - scores[0]).mean())
            best, since = (gain, 0) if gain > best else (best, since + 1)
            if since == _PATIENCE or not math.isfinite(gain):
                break
    return [score for score in scores if bool(torch.isfinite(score).all())]


class _Fold:
    """A copy of the objective on all folds but one, and that one's points."""

    def __init__(
        self, mll: MarginalLogLikelihood, held_out: Tensor, observed: Tensor, lr: float
    ) -> None:
        self.mll = copy.deepcopy(mll)
        self.model = cast(GPRegression, self.mll.model)
        assert self.model.train_inputs is not None
        x, y = self.model.train_inputs[0], cast(Tensor, self.model.train_targets)
        self.held_out = x[held_out], y[held_out]
        kept = observed.clone()
        kept[held_out] = False
        self.model.set_train_data(x[kept], y[kept], strict=False)
        parameters = [p for network in networks_of(self.model) for p in network.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=lr)

    def train(self, steps: int) -> None:
        self.mll.train()
        for _ in range(steps):
            self.optimizer.zero_grad()
            fresh_loss(self.mll).backward()
            self.optimizer.step()

    @torch.no_grad()
    def score(self) -> Tensor:
        x, y = self.held_out
        normal = self.model.predict(x, marginal=True)
        y = self.model.target_standardizer.inverse(y)
        return torch.distributions.Normal(normal.mean, normal.variance.sqrt()).log_prob(y)


def _names_outside_networks(mll: MarginalLogLikelihood) -> list[str]:
    inside = {id(p) for network in networks_of(mll.model) for p in network.parameters()}
    return [name for name, p in mll.named_parameters() if id(p) not in inside]
