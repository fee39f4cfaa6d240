r"""Gaussian log densities under a covariance of low rank plus a diagonal.

With :math:`K = \Phi \Phi^\top + D` the residual is a linear model of R standard normal weights,
:math:`r = \Phi u + \epsilon`. Its posterior given the points A has precision
:math:`M = I + \Phi_A^\top D_A^{-1} \Phi_A`, and under it the other points are again of that form,
with features :math:`\Phi_B L^{-\top}`, :math:`M = L L^\top`. All costs are linear in points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor
from torch.linalg import solve_triangular

from gpclml.linalg.covariance import ExactCovariance, Predictor, expanded
from gpclml.linalg.dense import DenseCovariance
from gpclml.linalg.matrices import HALF_LOG_2PI, safe_cholesky, take, take_rows


@dataclass(eq=False)
class LowRankPlusDiagonal(ExactCovariance):
    r"""The covariance :math:`\Phi \Phi^\top + D` of observations, as its parts.

    Attributes:
        features: Prior features scaled by the roots of prior variances, ``(*batch, n, R)``.
        noise: Noise variances, ``(*batch, n)``.
    """

    features: Tensor
    noise: Tensor

    def __post_init__(self) -> None:
        n, batches = self.features.shape[-2], (self.features.shape[:-2], self.noise.shape[:-1])
        self.shape = Size((*torch.broadcast_shapes(*batches), n, n))
        self.dtype, self.device = self.features.dtype, self.features.device

    def __getitem__(self, index: int | slice) -> LowRankPlusDiagonal:
        """Members of a batch, along its first dimension."""
        batch = self.shape[:-2]
        features = self.features.expand(*batch, *self.features.shape[-2:])
        return LowRankPlusDiagonal(features[index], self.noise.expand(self.shape[:-1])[index])

    def to_dense(self) -> Tensor:
        """The covariance, ``(*batch, n, n)``."""
        return self.features @ self.features.mT + torch.diag_embed(self.noise)

    def diagonal(self) -> Tensor:
        """Variances of the observations, ``(*batch, n)``."""
        return self.features.square().sum(-1) + self.noise

    def condition_number(self) -> float:
        """The ratio of the eigenvalues' bounds, in float64."""
        features = self.features.double()
        largest = torch.linalg.eigvalsh(features.mT @ features)[-1] + self.noise.max()
        return float(largest / self.noise.min())

    def predictor(self, residual: Tensor, missing: Tensor | None = None) -> Predictor:
        """By one factor of the matrix: Woodbury's identity cancels where the noise is small."""
        return DenseCovariance(self.to_dense()).predictor(residual, missing)

    def masked(self, missing: Tensor) -> LowRankPlusDiagonal:
        """With variance one and no correlation at the points of a mask, ``(*batch, n)``."""
        features = self.features.masked_fill(missing.unsqueeze(-1), 0.0)
        return LowRankPlusDiagonal(features, self.noise.masked_fill(missing, 1.0))

    def take(self, rows: Tensor) -> LowRankPlusDiagonal:
        """The points at these indices, ``(b,)`` or ``(*batch, b)``."""
        features, noise = self.features, self.noise
        if rows.ndim > 1:
            features = features.expand(*rows.shape[:-1], *features.shape[-2:])
            noise = noise.expand(*rows.shape[:-1], noise.shape[-1])
        return LowRankPlusDiagonal(take_rows(features, rows), take(noise, rows))

    def weights(self) -> WeightPosterior:
        """The posterior of the weights given the points, n R² + R³/3 operations."""
        # Float64: the precision has the squared condition number of the features.
        features, noise = self.features.double(), self.noise.double().unsqueeze(-1)
        identity = torch.eye(features.shape[-1], dtype=features.dtype, device=features.device)
        factor = safe_cholesky(identity + (features / noise).mT @ features)
        return WeightPosterior(features, noise, factor)

    def _log_density(self, residual: Tensor) -> Tensor:
        weights = self.weights()
        quadratic = weights.whiten(residual.unsqueeze(-1)).square().sum((-2, -1))
        log_det = 2 * weights.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_det = log_det + weights.noise.log().sum((-2, -1))
        n = residual.shape[-1]
        return (-0.5 * (quadratic + log_det) - n * HALF_LOG_2PI).to(self.dtype)

    def _conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        """Of a block, ``(b,)`` or ``(*batch, b)``, under the posterior of the others."""
        n, b = residual.shape[-1], held_out.shape[-1]
        if b == n:
            return self._log_density(residual)
        held_out = held_out.to(self.device)
        # A mask keeps the others in data order, for each member of a batch.
        kept = torch.ones(*held_out.shape[:-1], n, dtype=torch.bool, device=held_out.device)
        kept.scatter_(-1, held_out, False)
        others = kept.nonzero()[:, -1].reshape(*held_out.shape[:-1], n - b)
        # In float64, as the posterior of the weights is.
        weights, points = self.take(others).weights(), self.take(held_out)
        features = points.features.double()
        mean = features @ weights.mean(take(residual, others).unsqueeze(-1))
        covariance = LowRankPlusDiagonal(weights.conditioned(features), points.noise.double())
        error = take(residual, held_out) - mean.squeeze(-1)
        return covariance._log_density(error).to(self.dtype)

    def block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """One posterior for all blocks of at most R points, one for each larger block.

        Small blocks are taken out of the posterior of all points.
        """
        residual = expanded(residual, self.shape)
        if len(blocks) == 1 and blocks[0].shape[-2] == 1:
            return self._conditional_log_density(residual, blocks[0].squeeze(-2)).unsqueeze(-1)
        weights = self.weights()
        alpha = weights.solve(residual.double().unsqueeze(-1))
        leverage = weights.leverage()
        values = []
        for group in (block.to(self.device, non_blocking=True) for block in blocks):
            b = group.shape[-1]
            if b > self.features.shape[-1]:
                each = [self._conditional_log_density(residual, block) for block in group]
                values.append(torch.stack(each, dim=-1))
                continue
            rows = leverage[..., group, :]  # (*batch, k, b, R)
            noise = weights.noise[..., group, 0]
            # The block's own part of the inverse: D⁻¹ less the leverages of its points.
            factor = safe_cholesky(torch.diag_embed(1 / noise) - rows @ rows.mT)  # of K⁻¹_BB
            z = solve_triangular(factor, alpha[..., group, :], upper=False)
            log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            values.append(log_det - 0.5 * z.square().sum((-2, -1)) - b * HALF_LOG_2PI)
        return torch.cat(values, dim=-1).to(self.dtype)

    def leave_one_out(self, residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """From one posterior of the weights, out of which each point is taken."""
        rows = rows.to(self.device)
        weights = self.weights()
        alpha = weights.solve(residual.double().unsqueeze(-1)).squeeze(-1)
        leverage = weights.leverage().square().sum(-1)
        variance = 1 / (1 / weights.noise.squeeze(-1) - leverage)
        mean = residual - alpha * variance
        return mean[..., rows].to(residual), variance[..., rows].to(residual)

    def predictions(self, residual: Tensor, orders: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r"""By updates of the weights' posterior, for all orders at once: 4 n R² operations each.

        Potter's form keeps its covariance :math:`A A^\top` positive however small the noise: with
        :math:`v = A^\top \phi`, :math:`s = \sigma^2 + v^\top v` and
        :math:`\gamma = 1 / (s + \sigma \sqrt{s})`, :math:`A \leftarrow A - \gamma A v v^\top`
        (Bierman 1977, Section II.3). Batches, and gradients where they are recorded, go by the
        dense covariance.
        """
        single = self.features.ndim == 2 and residual.ndim == 1
        if orders is None or not single or torch.is_grad_enabled():
            return DenseCovariance(self.to_dense()).predictions(residual, orders)
        orders = orders.to(self.device)
        (k, _), R = orders.shape, self.features.shape[-1]
        root = torch.eye(R, dtype=torch.float64, device=self.device).repeat(k, 1, 1)
        mean = root.new_zeros(k, R, 1)
        errors, variances = [], []
        for rows in orders.T:
            phi = self.features[rows].double().unsqueeze(-1)  # (k, R, 1)
            noise, target = (values[rows, None, None].double() for values in (self.noise, residual))
            v = root.mT @ phi
            variance = noise + v.square().sum(-2, keepdim=True)
            error = target - (phi * mean).sum(-2, keepdim=True)
            gain = root @ v
            mean = torch.addcmul(mean, gain, error / variance)
            # Potter's factor gamma, by which the root is downdated and not the covariance.
            root.baddbmm_(gain / (variance + (noise * variance).sqrt()), v.mT, alpha=-1.0)
            errors.append(error)
            variances.append(variance)
        both = torch.cat(errors, -1), torch.cat(variances, -1)  # (k, 1, n) each
        return both[0].squeeze(-2).to(self.dtype), both[1].squeeze(-2).to(self.dtype)


@dataclass(frozen=True)
class WeightPosterior:
    r"""Solves with :math:`\Phi \Phi^\top + D` by Woodbury's identity, in float64.

    The identity subtracts numbers that nearly agree where the noise is small, so a quadratic form
    is a sum of squares: with the posterior mean :math:`\mu = M^{-1} \Phi^\top D^{-1} r` it is
    :math:`(r - \Phi\mu)^\top D^{-1} (r - \Phi\mu) + \mu^\top \mu`. ``factor`` is that of Cholesky
    of the posterior's precision M, ``(*batch, R, R)``.
    """

    features: Tensor
    noise: Tensor
    factor: Tensor

    def mean(self, right: Tensor) -> Tensor:
        """The mean given residuals as columns, ``(*batch, n, k)`` to ``(*batch, R, k)``."""
        return torch.cholesky_solve(self.features.mT @ (right.double() / self.noise), self.factor)

    def solve(self, right: Tensor) -> Tensor:
        """The solution for columns ``(*batch, n, k)``, in their type."""
        remainder = right.double() - self.features @ self.mean(right)
        return (remainder / self.noise).to(right.dtype)

    def whiten(self, right: Tensor) -> Tensor:
        r"""X with :math:`X^\top X = B^\top (\Phi \Phi^\top + D)^{-1} B`, ``(*batch, n + R, k)``."""
        mean = self.mean(right)
        remainder = (right.double() - self.features @ mean) / self.noise.sqrt()
        return torch.cat([remainder, mean], dim=-2)

    def conditioned(self, features: Tensor) -> Tensor:
        """Features of any points under this posterior, Φ L⁻ᵀ."""
        return solve_triangular(self.factor, features.mT, upper=False).mT

    def leverage(self) -> Tensor:
        """Q with (Φ Φᵀ + D)⁻¹ = D⁻¹ - Q Qᵀ, ``(*batch, n, R)``."""
        return self.conditioned(self.features) / self.noise
