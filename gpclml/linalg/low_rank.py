r"""Gaussian log densities under a covariance of low rank plus a diagonal.

With :math:`K = \Phi \Phi^\top + D` the residual is a linear model of R standard normal weights,
:math:`r = \Phi u + \epsilon`. Its posterior given the points A has precision
:math:`M = I + \Phi_A^\top D_A^{-1} \Phi_A`, and under it the other points are again of that form,
with features :math:`\Phi_B L^{-\top}`, :math:`M = L L^\top`. All costs are linear in points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator, LowRankRootLinearOperator
from torch import Size, Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError
from gpclml.linalg.covariance import Covariance, Predictor
from gpclml.linalg.dense import DenseCovariance
from gpclml.linalg.matrices import safe_cholesky, take, take_rows

__all__ = ["LowRankPlusDiagonal"]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_ARRAYS = 12  # of the features' size at the peak of a step
_NUMBERS_AT_ONCE = 2**25  # in the largest array of a loop over orders or blocks


@checked(late=True, features="float (*batch, n, R)", noise="float (*batch, n)")
@dataclass(frozen=True)
class LowRankPlusDiagonal(Covariance):
    r"""The covariance :math:`\Phi \Phi^\top + D` of observations, as its parts.

    Attributes:
        features: Prior features scaled by the roots of prior variances, ``(*batch, n, R)``.
        noise: Noise variances, ``(*batch, n)``.
    """

    features: Tensor
    noise: Tensor

    def __post_init__(self) -> None:
        if self.features.ndim < 2 or 0 in self.features.shape[-2:]:
            raise ShapeError("features", tuple(self.features.shape), "(*batch, n, R), n, R >= 1")
        if self.noise.shape[-1:] != self.features.shape[-2:-1]:
            got, n = tuple(self.noise.shape), self.features.shape[-2]
            raise ShapeError("noise", got, f"(*batch, {n}), one variance for each of the features")
        try:
            torch.broadcast_shapes(self.features.shape[:-2], self.noise.shape[:-1])
        except RuntimeError as error:
            got, batch = tuple(self.noise.shape[:-1]), tuple(self.features.shape[:-2])
            expected = f"one that broadcasts with the features' {batch}"
            raise ShapeError("noise", f"batch shape {got}", expected) from error

    @property
    def shape(self) -> Size:
        """That of the dense covariance."""
        n = self.features.shape[-2]
        batch = torch.broadcast_shapes(self.features.shape[:-2], self.noise.shape[:-1])
        return Size((*batch, n, n))

    @property
    def dtype(self) -> torch.dtype:
        """Of the features."""
        return self.features.dtype

    @property
    def device(self) -> torch.device:
        """Of the features."""
        return self.features.device

    @classmethod
    def memory(cls, shape: Size, block: int) -> int:
        """A dozen arrays of the features' size, and a few of R x R."""
        return _ARRAYS * (shape.numel() + shape[:-2].numel() * shape[-1] ** 2)

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

    def operators(self) -> tuple[LinearOperator, Tensor]:
        """The product of the features as an operator, and the noise."""
        return LowRankRootLinearOperator(to_linear_operator(self.features)), self.noise

    def condition_number(self) -> float:
        """The ratio of the eigenvalues' bounds, in float64."""
        features = self.features.double()
        largest = torch.linalg.eigvalsh(features.mT @ features)[-1] + self.noise.max()
        return float(largest / self.noise.min())

    def predictor(self, residual: Tensor, missing: Tensor | None = None) -> Predictor:
        """By one factor of the matrix: Woodbury's identity cancels where the noise is small."""
        return DenseCovariance(self.to_dense()).predictor(residual, missing)

    def masked(self, missing: Tensor) -> LowRankPlusDiagonal:
        """With points taken out: each has variance one and no correlation.

        Args:
            missing: Which, ``(*batch, n)``.
        """
        features = self.features.masked_fill(missing.unsqueeze(-1), 0.0)
        return LowRankPlusDiagonal(features, self.noise.masked_fill(missing, 1.0))

    def take(self, rows: Tensor) -> LowRankPlusDiagonal:
        """The points at these indices.

        Args:
            rows: ``(b,)``, or ``(*batch, b)`` for points of its own in each member.
        """
        features, noise = self.features, self.noise
        if rows.ndim > 1:
            features = features.expand(*rows.shape[:-1], *features.shape[-2:])
            noise = noise.expand(*rows.shape[:-1], noise.shape[-1])
        return LowRankPlusDiagonal(take_rows(features, rows), take(noise, rows))

    def _log_density(self, residual: Tensor) -> Tensor:
        r"""The joint log density of all residuals, in nats.

        With the posterior mean :math:`\mu = M^{-1} \Phi^\top D^{-1} r` the quadratic form is
        :math:`(r - \Phi\mu)^\top D^{-1} (r - \Phi\mu) + \mu^\top \mu`, a sum of squares.

        Args:
            residual: ``(*batch, n)``.

        Returns:
            ``(*batch,)``, in the type of the features.

        Note:
            n R² + R³/3 floating-point operations.
        """
        data = self._in_double()
        residual = residual.double()
        L, mean = data.posterior(residual)
        rest = residual - _rows_times(data.features, mean)
        quadratic = (rest.square() / data.noise).sum(-1) + mean.square().sum(-1)
        log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1) + data.noise.log().sum(-1)
        n = residual.shape[-1]
        return (-0.5 * (quadratic + log_det) - n * _HALF_LOG_2PI).to(self.dtype)

    def posterior(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Factor L of the posterior precision of the weights u, and their mean, in float64.

        Args:
            residual: ``(*batch, n)``.

        Returns:
            ``(*batch, R, R)`` and ``(*batch, R)``.
        """
        data = self._in_double()
        scaled = data.features / data.noise.unsqueeze(-1)
        one = torch.eye(data.features.shape[-1], dtype=data.dtype, device=data.device)
        L = safe_cholesky(one + scaled.mT @ data.features)
        right = scaled.mT @ residual.double().unsqueeze(-1)
        return L, torch.cholesky_solve(right, L).squeeze(-1)

    def given(
        self, seen: LowRankPlusDiagonal, seen_residual: Tensor, residual: Tensor
    ) -> tuple[LowRankPlusDiagonal, Tensor]:
        """These points under the posterior given others of the same model.

        Args:
            seen: The points conditioned on.
            seen_residual: Theirs.
            residual: Of these points.

        Returns:
            Their covariance given the others, and their residuals from the conditional mean, in
            float64.
        """
        L, mean = seen.posterior(seen_residual)
        data = self._in_double()
        left = residual.double() - _rows_times(data.features, mean)
        return LowRankPlusDiagonal(_under(L, data.features), data.noise), left

    def _conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        held_out = held_out.to(self.device)
        n, b = residual.shape[-1], held_out.shape[-1]
        if b == n:
            return self._log_density(residual)
        data = self._in_double()
        residual = residual.double()
        kept = torch.ones(*held_out.shape[:-1], n, dtype=torch.bool, device=held_out.device)
        kept.scatter_(-1, held_out, False)
        rest = kept.nonzero()[:, -1].reshape(*held_out.shape[:-1], n - b)
        if held_out.ndim > 1:
            residual = residual.expand(*held_out.shape[:-1], n)
        of_held_out, left = data.take(held_out).given(
            data.take(rest), take(residual, rest), take(residual, held_out)
        )
        return of_held_out._log_density(left).to(self.dtype)

    def _block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        # One posterior for all blocks of at most R points, which are taken out of it; one for each
        # larger block.
        data = self._in_double()
        residual = residual.double()
        L, mean = data.posterior(residual)
        alpha = (residual - _rows_times(data.features, mean)) / data.noise
        leverage = _under(L, data.features) / data.noise.unsqueeze(-1)
        values = []
        for group in (block.to(self.device, non_blocking=True) for block in blocks):
            if group.shape[-1] <= self.features.shape[-1]:
                values.append(_taken_out(leverage, alpha, data.noise, group))
            else:
                each = [data._conditional_log_density(residual, block) for block in group]
                values.append(torch.stack(each, dim=-1))
        return torch.cat(values, dim=-1).to(self.dtype)

    def _leave_one_out(self, residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        # From one posterior of the weights, out of which each point is taken.
        data = self._in_double()
        L, mean = data.posterior(residual)
        alpha = (residual.double() - _rows_times(data.features, mean)) / data.noise
        leverage = _under(L, data.features).square().sum(-1)
        variance = 1 / (1 / data.noise - leverage / data.noise.square())
        left_out = residual.double() - alpha * variance
        return left_out[..., rows].to(residual), variance[..., rows].to(residual)

    def _condition(
        self, residual: Tensor, rows: Tensor, others: Tensor
    ) -> tuple[LowRankPlusDiagonal, Tensor]:
        of_rest, left = self.take(others).given(
            self.take(rows), take(residual, rows), take(residual, others)
        )
        return of_rest, left

    def _sequential(self, residual: Tensor, orders: Tensor | None) -> Tensor:
        single = self.features.ndim == 2 and residual.ndim == 1
        if orders is None or not single or torch.is_grad_enabled():
            return DenseCovariance(self.to_dense())._sequential(residual, orders)
        errors, variances = self._predictions(residual, orders)
        return torch.distributions.Normal(torch.zeros_like(errors), variances.sqrt()).log_prob(
            errors
        )

    def _predictions(self, residual: Tensor, orders: Tensor) -> tuple[Tensor, Tensor]:
        # Points are taken in blocks of about R: one posterior a block, and within it the factor of
        # the block's own covariance, for all orders at once: about 4 n R² operations an order.
        data = self._in_double()
        R = self.features.shape[-1]
        at_once = max(1, _NUMBERS_AT_ONCE // (R * max(R, _block_size(R))))
        parts = [data._predicted(residual.double(), part) for part in orders.split(at_once)]
        errors, variances = zip(*parts, strict=True)
        return torch.cat(errors).to(self.dtype), torch.cat(variances).to(self.dtype)

    def _predicted(self, residual: Tensor, orders: Tensor) -> tuple[Tensor, Tensor]:
        k, R = len(orders), self.features.shape[-1]
        precision = torch.eye(R, dtype=self.dtype, device=self.device).repeat(k, 1, 1)
        right = precision.new_zeros(k, R, 1)
        errors, variances = [], []
        for rows in orders.split(_block_size(R), dim=-1):
            features = self.features[rows]  # (k, c, R)
            L = safe_cholesky(precision)
            expected = features @ torch.cholesky_solve(right, L)
            under = _under(L, features)
            block = under @ under.mT + torch.diag_embed(self.noise[rows])
            factor = safe_cholesky(block)
            left = residual[rows].unsqueeze(-1) - expected
            z = torch.linalg.solve_triangular(factor, left, upper=False).squeeze(-1)
            spread = factor.diagonal(dim1=-2, dim2=-1)
            errors.append(z * spread)
            variances.append(spread.square())
            scaled = features / self.noise[rows].unsqueeze(-1)
            precision = torch.baddbmm(precision, scaled.mT, features)
            right = torch.baddbmm(right, scaled.mT, residual[rows].unsqueeze(-1))
        return torch.cat(errors, dim=-1), torch.cat(variances, dim=-1)

    def _in_double(self) -> LowRankPlusDiagonal:
        """In float64: M has the squared condition of the features."""
        return LowRankPlusDiagonal(self.features.double(), self.noise.double())


def _block_size(num_features: int) -> int:
    return min(max(num_features, 16), 256)


def _under(L: Tensor, features: Tensor) -> Tensor:
    """Features of the whitened posterior, Φ L⁻ᵀ."""
    return torch.linalg.solve_triangular(L, features.mT, upper=False).mT


def _rows_times(features: Tensor, mean: Tensor) -> Tensor:
    return (features @ mean.unsqueeze(-1)).squeeze(-1)


def _taken_out(leverage: Tensor, alpha: Tensor, noise: Tensor, blocks: Tensor) -> Tensor:
    """Densities of blocks ``(k, b)`` from the inverse covariance D⁻¹ - leverage leverageᵀ."""
    b = blocks.shape[-1]
    rows = leverage[..., blocks, :]  # (*batch, k, b, R)
    precision = torch.diag_embed(1 / noise[..., blocks]) - rows @ rows.mT
    factor = safe_cholesky(precision)
    z = torch.linalg.solve_triangular(factor, alpha[..., blocks].unsqueeze(-1), upper=False)
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * z.squeeze(-1).square().sum(-1) + log_det - b * _HALF_LOG_2PI
