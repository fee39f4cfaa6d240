"""A spectral mixture whose components are waves in any direction."""

from __future__ import annotations

import math

import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, UnsupportedError

__all__ = ["JointSpectralMixtureKernel"]


class JointSpectralMixtureKernel(Kernel):
    r"""A mixture of Gaussians in the space of frequencies, one for all columns together.

    .. math:: k(x, x') = \sum_q w_q
        \exp\Big(-2 \pi^2 \sum_d \sigma_{qd}^2 \tau_d^2\Big)
        \cos\Big(2 \pi \sum_d \mu_{qd} \tau_d\Big), \qquad \tau = x - x'

    (Wilson and Adams 2013, Eq. 12, the cosine of the whole frequency vector). GPyTorch's
    ``SpectralMixtureKernel`` is a product over columns of such sums, of variance
    :math:`(\sum_q w_q)^d`: right for few columns, out of range for the features of a network.
    Here the variance is :math:`\sum_q w_q`, whatever d.

    It starts with equal weights that sum to one, lengthscales
    :math:`1 / 2 \pi \sigma_{qd} = \sqrt d`, one component of frequency zero and the others in
    random directions, a wave at a distance of about :math:`2 \pi \sqrt d`.

    Args:
        num_mixtures: Number Q of components.
        ard_num_dims: Number d of columns.
        generator: Source of the frequencies' start; seed 0 if None.

    Raises:
        ArgumentError: A number is below 1.

    Note:
        Q products of n x d by d x n, and Q arrays of n x n.
    """

    mixture_means: torch.nn.Parameter
    raw_mixture_weights: torch.nn.Parameter
    raw_mixture_scales: torch.nn.Parameter
    raw_mixture_weights_constraint: Positive
    raw_mixture_scales_constraint: Positive

    @checked
    def __init__(
        self, num_mixtures: int, ard_num_dims: int, generator: torch.Generator | None = None
    ) -> None:
        for name, number in (("num_mixtures", num_mixtures), ("ard_num_dims", ard_num_dims)):
            if number < 1:
                raise ArgumentError(name, number, "at least 1")
        super().__init__(ard_num_dims=ard_num_dims)
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        shape = (num_mixtures, ard_num_dims)
        unit = 0.5 / math.pi / math.sqrt(ard_num_dims)
        means = unit * torch.randn(shape, generator=generator)
        means[0] = 0.0
        self.register_parameter("mixture_means", torch.nn.Parameter(means))
        self.register_parameter(
            "raw_mixture_weights", torch.nn.Parameter(torch.zeros(num_mixtures))
        )
        self.register_parameter("raw_mixture_scales", torch.nn.Parameter(torch.zeros(shape)))
        self.register_constraint("raw_mixture_weights", Positive())
        self.register_constraint("raw_mixture_scales", Positive())
        self.initialize(
            raw_mixture_weights=self._raw("weights", 1 / num_mixtures),
            raw_mixture_scales=self._raw("scales", unit),
        )

    @property
    def is_stationary(self) -> bool:
        """It depends on differences alone."""
        return True

    @property
    def mixture_weights(self) -> Tensor:
        """Variance of each component, ``(Q,)``."""
        return self.raw_mixture_weights_constraint.transform(self.raw_mixture_weights)

    @property
    def mixture_scales(self) -> Tensor:
        """Standard deviations of frequencies, ``(Q, d)``."""
        return self.raw_mixture_scales_constraint.transform(self.raw_mixture_scales)

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: object,
    ) -> Tensor:
        """Covariances of points.

        Args:
            x1: Points. Shape ``(*batch, n, d)``.
            x2: Points. Shape ``(*batch, m, d)``.
            diag: Only those of corresponding points.
            last_dim_is_batch: Not supported.
            **params: Not used.

        Returns:
            Shape ``(*batch, n, m)``; ``(*batch, n)`` with ``diag``.

        Raises:
            UnsupportedError: ``last_dim_is_batch`` is set.
        """
        if last_dim_is_batch:
            mend = "Frequencies are of all columns together; sum kernels of single columns instead."
            raise UnsupportedError("last_dim_is_batch", True, "False", mend)
        scales = (2 * math.pi * self.mixture_scales).unsqueeze(-2)  # (Q, 1, d)
        scaled1, scaled2 = x1.unsqueeze(-3) * scales, x2.unsqueeze(-3) * scales
        distance = self.covar_dist(scaled1, scaled2, diag=diag, square_dist=True)
        frequencies = 2 * math.pi * self.mixture_means
        phase1, phase2 = x1 @ frequencies.mT, x2 @ frequencies.mT  # (*batch, n, Q)
        if diag:
            wave = (phase1 - phase2).cos().mT
            return (self.mixture_weights.unsqueeze(-1) * (-0.5 * distance).exp() * wave).sum(-2)
        wave = (phase1.mT.unsqueeze(-1) - phase2.mT.unsqueeze(-2)).cos()  # (*batch, Q, n, m)
        terms = (-0.5 * distance).exp() * wave
        return (self.mixture_weights[:, None, None] * terms).sum(-3)

    def _raw(self, name: str, value: float) -> Tensor:
        parameter = getattr(self, f"raw_mixture_{name}")
        constraint = getattr(self, f"raw_mixture_{name}_constraint")
        return constraint.inverse_transform(torch.full_like(parameter, value))
