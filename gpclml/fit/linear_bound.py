"""Coordinate ascent on the evidence lower bound of a linear model."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_positive, checked
from gpclml.errors import ArgumentError, NonFiniteError, UnsupportedError
from gpclml.fit.result import FitResult
from gpclml.fit.train import Training
from gpclml.linalg.gaussians import gaussian_kl
from gpclml.mlls import LinearEvidenceLowerBound

__all__ = ["fit_linear_bound"]


@checked
def fit_linear_bound(
    mll: LinearEvidenceLowerBound,
    *,
    steps: int = 1000,
    lr: float = 0.01,
    fit_noise: bool = True,
    empirical_bayes: bool = False,
    progress: bool | None = None,
) -> FitResult:
    r"""Ascends one group of parameters after the other, each but the last in closed form.

    A step takes the best q; then, with q held, the noise
    :math:`\sigma^2 = E_q \|r - \Phi w\|^2 / n` and, by empirical Bayes, the prior variance
    :math:`\tau = E_q \|w\|^2 / R`; then one step of Adam, its learning rate falling by a cosine,
    on what the features depend on (Harvey and Hughes 2026, Appendix C). The hyperparameters of
    the largest bound are kept. Hyperparameter priors do not weigh in.

    Args:
        mll: The bound, with the best q of a family; trained in place on the model's own data.
        steps: Number of steps.
        lr: Learning rate of Adam at the start.
        fit_noise: Whether the noise is fitted.
        empirical_bayes: Whether the prior variance is fitted, one for all weights.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        The largest bound in nats per point, whose hyperparameters the model has, and the bounds of
        all steps. After an interruption the model has the best hyperparameters so far.

    Raises:
        UnsupportedError: The objective has a trainable q: use an optimizer for all.
        ArgumentError: A number is out of range, or there is a prior variance for each weight.
        NonFiniteError: The bound is not finite; the model then has the best hyperparameters
            that were met.
    """
    if mll.posterior is not None:
        expected = "a bound with the best q of a family"
        suggestion = "Train all parameters by an optimizer, as of any objective."
        raise UnsupportedError("mll", "a trainable posterior", expected, suggestion)
    check_counts(steps=steps)
    check_positive(lr=lr)
    model = mll.model
    kernel, likelihood = model.covar_module, model.likelihood
    count = len(kernel.prior_variance)
    if empirical_bayes and count != 1:
        raise ArgumentError("empirical_bayes", f"{count} prior variances", "one for all weights")
    inputs, target = cast(tuple, model.train_inputs), cast(Tensor, model.train_targets)
    fixed = {id(likelihood.raw_noise), id(kernel.raw_prior_variance)}
    trained = [p for p in mll.parameters() if p.requires_grad and id(p) not in fixed]
    optimizer = torch.optim.Adam(trained, lr=lr) if trained else None
    schedule = optimizer and torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    training = Training(mll)
    training.note_state()

    def step(number: int) -> float:
        data = mll.data_at(model(*inputs), target)
        q = mll.weights_at(data)
        with torch.no_grad():
            if fit_noise:
                likelihood.noise = data.expected_square(q) / len(data.residual)
            if empirical_bayes:
                second = q.variance().sum() + q.mean.square().sum()
                kernel.prior_variance = second / len(q.mean)
        # Noise and prior variance have changed, and with them all but the features.
        data = mll.data_at(model(*inputs), target)
        kl = gaussian_kl(q, data.prior_variance)
        value = (data.expected_log_likelihood(q) - mll.temperature * kl) / len(data.residual)
        bound = float(value.detach())
        if not math.isfinite(bound):
            suggestion = "Lower the learning rate, or look at the data for huge values."
            raise NonFiniteError("mll", f"a bound of {bound}", "a finite bound", suggestion)
        # Before the step: the bound is that of the hyperparameters as they are.
        if bound > max(training.history, default=-math.inf):
            training.note_state()
        if optimizer is not None and schedule is not None:
            optimizer.zero_grad()
            (-value).backward()
            optimizer.step()
            schedule.step()
        return bound

    try:
        training.run(step, steps, desc="evidence lower bound", progress=progress)
    finally:
        training.keep_best()
    return FitResult(
        objective=max(training.history), history=training.history, seconds=training.seconds
    )
