"""The one interface that densities, scores and predictions have to a covariance of observations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Size, Tensor

from gpclml.gram import Evaluated


class Covariance(ABC):
    r"""The covariance K of n observations, noise included, ``(*batch, n, n)``.

    A kind of covariance is a subclass that implements what it can: dense with a Cholesky factor
    (:class:`~gpclml.linalg.DenseCovariance`), of low rank plus a diagonal
    (:class:`~gpclml.linalg.LowRankPlusDiagonal`), or known by its products with vectors
    (:class:`~gpclml.linalg.IterativeCovariance`).

    Residuals r are observations minus their prior mean, ``(*batch, n)``; their batches broadcast
    with those of the covariance. Log densities are in nats. Shapes and indices are not checked.

    Attributes:
        shape: ``(*batch, n, n)``.
        dtype: Floating-point type of the entries, and of what is computed from them.
        device: Where the entries are.
        reports: How well each block of the last density was solved for; empty where that is exact.
    """

    shape: Size
    dtype: torch.dtype
    device: torch.device
    reports: tuple[Any, ...] = ()

    def log_density(self, residual: Tensor) -> Tensor:
        """The joint log density of all residuals, ``(*batch,)``."""
        return self.conditional_log_density(residual, torch.arange(self.shape[-1]))

    def conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        r"""The joint log density of held-out points given all others, ``(*batch,)``.

        .. math:: \log p(r_B \mid r_A) = \sum_{i \in B} \left(-\tfrac12 z_i^2 - \log L_{ii}
            - \tfrac12 \log 2\pi\right)

        with the points ordered so that B is last, :math:`K = L L^\top` and :math:`z = L^{-1} r`
        (Lotfi et al. 2022, Eq. 5 and Section 4.3). With every point held out this is the log
        marginal likelihood.

        Args:
            residual: ``(*batch, n)``.
            held_out: Indices of the points that are scored, ``(b,)``, or ``(*batch, b)`` for points
                of its own in each batch member.
        """
        return self.held_out_log_density(residual, [held_out.unsqueeze(-2)])

    @abstractmethod
    def block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        r"""The joint log density of each block given all points outside it, in the order given.

        With :math:`Q = K^{-1}`, :math:`\alpha = Q r` and :math:`s = Q_{BB}^{-1} \alpha_B`,

        .. math:: \log p(r_B \mid r_{-B}) = -\tfrac12 \alpha_B^\top s + \tfrac12 \log |Q_{BB}|
            - \tfrac{b}{2} \log 2\pi.

        Blocks of one point are leave-one-out (Rasmussen and Williams 2006, Eqs. 5.10-5.12). One
        block alone costs less, as :meth:`conditional_log_density`.

        Args:
            residual: ``(*batch, n)``.
            blocks: Indices, ``(k_i, b_i)``: blocks of one size are stacked. Blocks may overlap. One
                block may be ``(*batch, 1, b)``, with points of its own in each batch member.

        Returns:
            ``(*batch, k_1 + k_2 + ...)``.
        """

    def held_out_log_density(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """The sum of these log densities, ``(*batch,)``, whose gradient may cost less than theirs.

        Args:
            residual: ``(*batch, n)``.
            blocks: As for :meth:`block_log_densities`.
        """
        return self.block_log_densities(residual, blocks).sum(-1)

    def density(self, blocks: Sequence[Tensor]) -> Any:
        """Held-out blocks in the form that :meth:`log_density_and_vjp` takes.

        Work that depends only on the blocks is done here, once for all covariances of the same
        points.

        Args:
            blocks: As for :meth:`block_log_densities`.
        """
        return blocks

    def log_density_and_vjp(self, residual: Tensor, density: Any) -> Evaluated:
        """The sum of the log densities of held-out blocks, with its vector-Jacobian product.

        Args:
            residual: ``(*batch, n)``, of the batch of both.
            density: The blocks, as :meth:`density` gives them.

        Returns:
            The sum, ``(*batch,)``. Where a kind of covariance leaves derivatives to autograd, the
            product gives the gradient with respect to the sum itself, to go on from there.
        """
        value = self.held_out_log_density(residual, density)
        tensors = [value] if value.requires_grad else []
        return Evaluated(value.detach(), tensors, lambda grad: [(value, grad)])

    @abstractmethod
    def predictor(self, residual: Tensor, missing: Tensor | None = None) -> Predictor:
        """Solves for the residuals once, to predict other values from them.

        Args:
            residual: ``(*batch, n)``; zero where missing.
            missing: Which observations are missing, ``(*batch, n)``; the covariance has variance
                one and no correlation there. None if none is missing.
        """


class ExactCovariance(Covariance):
    """A covariance with an exact factorization, of which single entries are known as well."""

    @abstractmethod
    def leave_one_out(self, residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        r"""Mean and variance of single points given all others, ``(*batch, b)`` each.

        .. math:: \mu_i = r_i - \frac{[K^{-1} r]_i}{[K^{-1}]_{ii}}, \qquad
            \sigma_i^2 = \frac{1}{[K^{-1}]_{ii}}

        (Rasmussen and Williams 2006, Eq. 5.12).

        Args:
            residual: ``(*batch, n)``.
            rows: Indices of the points to predict, ``(b,)``, each once.
        """

    def sequential(self, residual: Tensor, orders: Tensor | None = None) -> Tensor:
        r"""Learning curves: the log density :math:`\log p(r_i \mid r_{<i})` of each point.

        Arguments are those of :meth:`predictions`, and so is the shape, ``(*batch, k, n)``.
        """
        errors, variances = self.predictions(residual, orders)
        return torch.distributions.Normal(0.0, variances.sqrt(), False).log_prob(errors)

    @abstractmethod
    def predictions(self, residual: Tensor, orders: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r"""Errors :math:`r_i - E[r_i \mid r_{<i}]` and variances :math:`Var[r_i \mid r_{<i}]`.

        Args:
            residual: ``(*batch, n)``.
            orders: Orders in which the points arrive, ``(k, n)``; data order if None.

        Returns:
            Errors and variances, noise included, ``(*batch, k, n)`` each; number i of row j is of
            point ``orders[j, i]``.
        """

    @abstractmethod
    def take(self, rows: Tensor) -> ExactCovariance:
        """The covariance of the points at these indices.

        Args:
            rows: ``(b,)``, or ``(*batch, b)`` for points of its own in each member.
        """

    @abstractmethod
    def __getitem__(self, index: Any) -> ExactCovariance:
        """The members of the batch at an index of the leading dimensions."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Variances of the observations, ``(*batch, n)``."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """The covariance as a matrix, ``(*batch, n, n)``."""

    @abstractmethod
    def condition_number(self) -> float:
        """The condition number, or an estimate of it, of one covariance without a batch."""


def expanded(residual: Tensor, shape: Size) -> Tensor:
    """A residual in the batch shape of itself and a covariance of this shape, ``(*batch, n)``."""
    if shape[:-2] == residual.shape[:-1]:
        return residual
    batch = torch.broadcast_shapes(shape[:-2], residual.shape[:-1])
    return residual.expand(*batch, residual.shape[-1])


@dataclass(frozen=True, eq=False)
class ConditionedBlock:
    """What observations change in the distribution of k other values, ``(*batch, k)`` each.

    Attributes:
        shift: What the mean of each value gains.
        reduction: What the variance of each value loses.
        vectors: What the joint covariance with other blocks takes, if it was to be kept: here the
            whitened covariance with the observations, ``(*batch, n, k)``.
    """

    shift: Tensor
    reduction: Tensor
    vectors: Any

    def joint_reduction(self, other: Any) -> Tensor:
        """What the covariance with values of another block loses, ``(*batch, k, l)``."""
        return self.vectors.mT @ other.vectors


class Predictor(Protocol):
    """Predicts other values from observations, whose linear system was solved once."""

    def given(self, cross: Tensor, keep: bool = False) -> ConditionedBlock:
        """What the observations say of other values.

        Args:
            cross: Covariance of the observations with these values, ``(*batch, n, k)``; batches
                broadcast.
            keep: Whether to keep the vectors that the joint covariance with other blocks takes.
        """
        ...
