"""What points say of the weights of a linear model."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml._utils.memory import check_memory
from gpclml.linalg import LowRankPlusDiagonal, safe_cholesky
from gpclml.linalg.gaussians._products import scaled_product
from gpclml.linalg.gaussians.distribution import check_positive
from gpclml.linalg.gaussians.dual import DualGaussian
from gpclml.linalg.gaussians.full import FullGaussian

__all__ = ["linear_posterior"]


@checked(
    features="float (n, R)",
    residual="float (n,)",
    prior_variance="float (R,)",
    noise="float (n,)",
)
def linear_posterior(
    features: Tensor, residual: Tensor, prior_variance: Tensor, noise: Tensor
) -> FullGaussian | DualGaussian:
    r"""The posterior of weights :math:`w \sim N(0, S)` given :math:`r = \Phi w + \epsilon`.

    Args:
        features: ``(n, R)``.
        residual: Targets less the prior mean, ``(n,)``.
        prior_variance: S, ``(R,)``.
        noise: Noise variances, ``(n,)``.

    Returns:
        A full Gaussian for at most n weights, else one in dual form.

    Raises:
        ArgumentError: Memory does not hold it, or a variance is not positive.

    Note:
        n R² + R³ operations, or n² R + n³/3.
    """
    check_positive("prior_variance", prior_variance)
    check_positive("noise", noise)
    n, R = features.shape
    mend = "Use fewer points at a time, or fewer features."
    check_memory("features", (n, R), min(n, R) ** 2 * 3, features.dtype, features.device, mend)
    if n >= R:
        scale = prior_variance.sqrt()
        L, mean = LowRankPlusDiagonal(features * scale, noise).posterior(residual)
        one = torch.eye(R, dtype=L.dtype, device=L.device)
        root = torch.linalg.solve_triangular(L.mT, one, upper=True).to(features)
        return FullGaussian(scale * mean.to(features), scale.unsqueeze(-1) * root)
    K = scaled_product(features, features, prior_variance) + torch.diag_embed(noise)
    factor = safe_cholesky(K).to(features)
    solved = torch.cholesky_solve(residual.unsqueeze(-1), factor).squeeze(-1)
    mean = prior_variance * (solved @ features)
    return DualGaussian(mean, prior_variance, features, noise, factor)
