"""Training the networks of a model on random subsets of its data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor
from torch.distributions import Normal

from gpclml._losses import fresh_loss
from gpclml._optimize import StoppedError
from gpclml.errors import NonFiniteError
from gpclml.fit._deep_start import has_second_part, start_second_part
from gpclml.inference.observations import training_observations
from gpclml.linalg import leave_one_out_moments
from gpclml.models import GPRegression, find_networks

__all__ = ["SubsetTraining"]

_SUBSET = 400  # rows of a step: its cost does not grow with n
_START_ROWS = 1000  # at most
_NETWORK_RATE, _OTHER_RATE = 0.1, 2.0  # of the learning rate, in the kernel "deep"
_WARM_UP = 50  # steps


class SubsetTraining:
    """Training of an objective on some rows of its model's data.

    Of the kernel ``"deep"`` everything is trained, of any other model the networks alone.

    Args:
        mll: The objective. Its model is changed in place, but keeps all its data.
        rows: Indices of the rows to train on, all observed.
        steps: Length of the course of the learning rate: a rise, then a half cosine.
        lr: Learning rate of Adam; in the kernel ``"deep"`` a tenth of it for the network and
            twice it for everything else.
        seed: Seed of the subsets.
    """

    def __init__(
        self, mll: MarginalLogLikelihood, rows: Tensor, steps: int, lr: float, seed: int
    ) -> None:
        self.mll = mll
        self.model = cast(GPRegression, mll.model)
        assert self.model.train_inputs is not None
        self.x, self.y = self.model.train_inputs[0], cast(Tensor, self.model.train_targets)
        self.rows = rows
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.Adam(self._groups(lr), lr=lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: _share_of_rate(step, steps)
        )

    def start(self) -> None:
        """Brings the kernel ``"deep"`` to where its training starts.

        Raises:
            StoppedError: That cannot be evaluated.
        """
        if has_second_part(self.model):
            try:
                start_second_part(self.model, self._subset(_START_ROWS))
            except (NanError, NotPSDError) as error:
                raise StoppedError(error, nothing_done=False) from error

    def train(self, steps: int, progress: bool = False) -> None:
        """Takes that many steps, each on a fresh subset of the rows.

        Args:
            steps: How many.
            progress: Whether to show a progress bar.

        Raises:
            StoppedError: Value or gradient is not finite, or a covariance not definite.
        """
        from tqdm import tqdm

        self.mll.train()
        for _ in tqdm(range(steps), desc="all rows", disable=not progress):
            self.optimizer.zero_grad()
            with self._conditioned_on(self._subset(_SUBSET)):
                try:
                    fresh_loss(self.mll).backward()
                except (NanError, NotPSDError) as error:
                    raise StoppedError(error, nothing_done=False) from error
            self.optimizer.step()
            self.schedule.step()
            finite = torch.stack([torch.isfinite(p).all() for p in self.model.parameters()])
            if not bool(finite.all()):  # one look at the device a step
                raise _not_finite("parameters")
        self.optimizer.zero_grad()

    @torch.no_grad()
    def score(self, held_out: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities and squared errors of other rows, each given all rows but itself.

        Conditioning on the other held-out rows too, as a prediction from all data will, judges
        the hyperparameters at the full number of rows.

        Args:
            held_out: Indices of rows that are not trained on. Shape ``(b,)``.

        Returns:
            Two of shape ``(b,)``: nats, and squared standardized units.

        Raises:
            StoppedError: A value is not finite, or a covariance not definite.
        """
        try:
            with self._conditioned_on(torch.cat([self.rows, held_out])):
                data = training_observations(self.model)
                last = torch.arange(len(self.rows), data.num_rows)
                mean, variance = leave_one_out_moments(data.covariance, data.residual, last)
        except (NanError, NotPSDError) as error:
            raise StoppedError(error, nothing_done=False) from error
        error = data.residual[last] - mean
        if not bool((torch.isfinite(error) & torch.isfinite(variance)).all()):
            raise _not_finite("held-out densities")
        return Normal(0.0, variance.sqrt()).log_prob(error), error.square()

    def _groups(self, lr: float) -> list[dict]:
        networks = [p for network in find_networks(self.model) for p in network.parameters()]
        if not has_second_part(self.model):
            return [{"params": networks, "lr": lr}]
        inside = [
            p
            for network in find_networks(self.model)
            for module in getattr(network, "network", network).modules()
            for p in module.parameters(recurse=False)
        ]
        known = {id(p) for p in inside}
        others = [p for p in self.mll.parameters() if id(p) not in known and p.requires_grad]
        return [
            {"params": inside, "lr": _NETWORK_RATE * lr},
            {"params": others, "lr": _OTHER_RATE * lr},
        ]

    def _subset(self, size: int) -> Tensor:
        order = torch.randperm(len(self.rows), generator=self.generator)[:size]
        return self.rows[order.to(self.rows.device)]

    @contextmanager
    def _conditioned_on(self, rows: Tensor) -> Iterator[None]:
        """Within the block these rows are the model's training data."""
        self.model.set_train_data(self.x[rows], self.y[rows], strict=False)
        try:
            yield
        finally:
            self.model.set_train_data(self.x, self.y, strict=False)


def _not_finite(what: str) -> StoppedError:
    mend = "Lower the learning rate, or look for duplicated rows."
    error = NonFiniteError(what, "NaN or infinite values", "finite ones", mend)
    return StoppedError(error, nothing_done=False)


def _share_of_rate(step: int, steps: int) -> float:
    rise = min(1.0, (step + 1) / _WARM_UP)
    return rise * 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
