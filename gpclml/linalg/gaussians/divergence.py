"""How far one Gaussian over weights is from another."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError
from gpclml.linalg.gaussians.diagonal import DiagonalGaussian
from gpclml.linalg.gaussians.distribution import WeightDistribution

__all__ = ["gaussian_kl"]


@checked(late=True, p="float (R,)")
def gaussian_kl(q: WeightDistribution, p: WeightDistribution | Tensor) -> Tensor:
    r"""The Kullback-Leibler divergence of q from p, in nats.

    .. math:: \tfrac12 \left( tr(\Sigma_p^{-1} \Sigma_q)
        + (\mu_p - \mu_q)^\top \Sigma_p^{-1} (\mu_p - \mu_q) - R
        + \log |\Sigma_p| - \log |\Sigma_q| \right)

    Args:
        q: Of any form.
        p: Of any form; or variances ``(R,)`` of independent weights around zero, a prior.

    Returns:
        A number, not negative.

    Raises:
        ShapeError: They are over different numbers of weights.

    Note:
        Linear in R but for full covariances.
    """
    if isinstance(p, Tensor):
        p = DiagonalGaussian(torch.zeros_like(p), p)
    R = len(q.mean)
    if len(p.mean) != R:
        raise ShapeError("p", f"{len(p.mean)} weights", f"{R}, as q")
    shift = (p.mean - q.mean).unsqueeze(-1)
    quadratic = (shift * p.precision_times(shift)).sum()
    if isinstance(p, DiagonalGaussian):
        trace = (q.variance() / p.variances).sum()
    else:
        diagonal, factor, sign = q.parts()
        trace = q.mean.new_zeros(())
        if diagonal is not None:
            trace = trace + (diagonal * p.precision_diagonal()).sum()
        if factor is not None:
            trace = trace + sign * (factor * p.precision_times(factor)).sum()
    return 0.5 * (trace + quadratic - R + p.log_det() - q.log_det())
