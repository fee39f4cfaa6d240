"""The exact posterior of a GP, conditioned on the targets that are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.inference.posterior_normal import PosteriorNormal, above_rounding
from gpclml.linalg import safe_cholesky

__all__ = ["evaluating", "exact_posterior"]

_CHUNK = 4096  # points whose covariance with the training points is held at a time


@checked(passes_on="x", x="float (*batch, m, d)")
def exact_posterior(
    model: ExactGP, x: Tensor, marginal: bool, progress: bool = False
) -> PosteriorNormal:
    r"""The latent posterior at x by one dense factorization.

    With :math:`L L^\top = K_{XX} + \Sigma`, :math:`V = L^{-1} K_{X*}` and
    :math:`z = L^{-1} (y - m)`, the mean is :math:`m_* + V^\top z` and the covariance
    :math:`K_{**} - V^\top V` (Rasmussen and Williams 2006, Algorithm 2.1).

    GPyTorch's own prediction counts a NaN target as observed in the covariance; here its row
    is replaced by the identity's and so drops out, in each batch element on its own. A variance is
    at least the rounding of the prior's, which a difference near a training point may fall below.
    O(n^3 + n^2 m) operations; O(n^2 + n m) memory, with ``marginal`` O(n^2 + m) and a chunk.

    Args:
        model: A model in eval mode, with training data.
        x: Points. Shape ``(*batch, m, d)``.
        marginal: Give the variances only.
        progress: Show a bar of the points on standard error, where variances of more than one chunk
            of them are asked for.

    Returns:
        Mean ``(*batch, m)`` and covariance ``(*batch, m, m)``, diagonal with ``marginal``.
    """
    assert model.train_inputs is not None
    assert model.likelihood is not None
    train_x, y = model.train_inputs[0], model.train_targets
    assert isinstance(y, Tensor)
    n = train_x.shape[-2]
    batch_shape = torch.broadcast_shapes(x.shape[:-2], train_x.shape[:-2])
    points = torch.cat(
        [part.expand(*batch_shape, *part.shape[-2:]) for part in (train_x, x)], dim=-2
    )
    with gpytorch.settings.lazily_evaluate_kernels(True), gpytorch.settings.debug(False):
        prior = model.forward(points)
        assert isinstance(prior, MultivariateNormal)
        mean, covariance = prior.mean, prior.lazy_covariance_matrix
        train_prior = MultivariateNormal(mean[..., :n], covariance[..., :n, :n])
        noisy_prior = model.likelihood(train_prior, [train_x])
        assert isinstance(noisy_prior, MultivariateNormal)
        noisy = noisy_prior.covariance_matrix
        residual = y - mean[..., :n]
        missing = torch.isnan(y)
        observed = (~missing).to(noisy.dtype) if bool(missing.any()) else None
        if observed is not None:
            noisy = noisy * observed.unsqueeze(-1) * observed.unsqueeze(-2)
            noisy = noisy + torch.diag_embed(1 - observed)
            residual = residual.masked_fill(missing, 0.0)
        factor = safe_cholesky(noisy).to(noisy.dtype)
        whitened = _solve(factor, residual.unsqueeze(-1))

        def cross(rows: slice) -> Tensor:
            """Whitened covariance of the training points with these; shape (*batch, n, rows)."""
            block = covariance[..., rows, :n].to_dense()
            if observed is not None:
                block = block * observed.unsqueeze(-2)
            return _solve(factor, block.mT)

        if not marginal:
            tests = slice(n, None)
            V = cross(tests)
            shift = (V.mT @ whitened).squeeze(-1)
            prior_spread = covariance[..., tests, tests].to_dense()
            spread = prior_spread - V.mT @ V
            variance = spread.diagonal(dim1=-1, dim2=-2)
            raised = above_rounding(variance, prior_spread.diagonal(dim1=-1, dim2=-2))
            return PosteriorNormal(
                mean[..., n:] + shift, spread + torch.diag_embed(raised - variance)
            )
        shifts, variances = [], []
        from tqdm import trange

        firsts = trange(
            n, points.shape[-2], _CHUNK, desc="predict", unit=f" chunks of {_CHUNK} points",
            leave=False, disable=not progress or points.shape[-2] - n <= _CHUNK,
        )  # fmt: skip
        for first in firsts:
            rows = slice(first, min(first + _CHUNK, points.shape[-2]))
            V = cross(rows)
            shifts.append((V * whitened).sum(-2))
            prior_variance = covariance[..., rows, rows].diagonal(dim1=-1, dim2=-2)
            variances.append(above_rounding(prior_variance - V.square().sum(-2), prior_variance))
        variance = torch.cat(variances, dim=-1)
        mean = mean[..., n:] + torch.cat(shifts, dim=-1)
        return PosteriorNormal(mean, DiagLinearOperator(variance.expand_as(mean)))


def _solve(factor: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, right, upper=False)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within the block the model is in eval mode; after it every module is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    training = model.training
    try:
        model.eval()
        yield
    finally:
        if training:
            model.train()  # also clears what was cached in eval mode
        for module, mode in modes:
            module.training = mode
