"""Coordinate ascent on the evidence lower bound of a linear model."""

from __future__ import annotations

import math

import torch

from gpclml.errors import NonFiniteError
from gpclml.fit import FitResult
from gpclml.fit.train import Training
from gpclml.linalg.gaussians import gaussian_kl
from gpclml.mlls import LinearEvidenceLowerBound


def fit_linear_bound(
    mll: LinearEvidenceLowerBound, *, steps: int, lr: float, empirical_bayes: bool = False
) -> FitResult:
    r"""Ascends one group of parameters after the other, each but the last in closed form.

    A step takes the best q; then, with q held, the noise
    :math:`\sigma^2 = E_q \|r - \Phi w\|^2 / n` and, by empirical Bayes, the prior variance
    :math:`\tau = E_q \|w\|^2 / R`; then one step of Adam, its learning rate falling by a cosine,
    on what the features depend on (Harvey and Hughes 2026, Appendix C). The hyperparameters of
    the largest bound are kept, also after an interruption. Hyperparameter priors do not weigh in.

    Args:
        mll: The bound; trained in place on the model's own data.
        steps: Number of steps.
        lr: Learning rate of Adam at the start.
        empirical_bayes: Whether the prior variance is fitted, one for all weights.

    Returns:
        The largest bound in nats per point, and the bounds of all steps.

    Raises:
        NonFiniteError: The bound is not finite.
    """
    model = mll.model
    kernel, likelihood = model.covar_module, model.likelihood
    inputs, target = model.train_inputs, model.train_targets
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
            raise NonFiniteError("mll", f"a bound of {bound}", "a finite bound", "Lower lr.")
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
        training.run(step, steps)
    finally:
        training.keep_best()
    return FitResult(
        objective=max(training.history), history=training.history, seconds=training.seconds
    )
