"""Spectral mixtures: a kernel over all columns together, and a start taken from the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from gpytorch.kernels import Kernel, SpectralMixtureKernel
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import check_counts, checked, seeded
from gpclml.errors import ArgumentError, ShapeError
from gpclml.kernels.features import JointKernel, positive, register_positive


class JointSpectralMixtureKernel(JointKernel):
    r"""Spectral mixture kernel whose Gaussians are in the space of all columns' frequencies.

    .. math:: k(x, x') = \sum_q w_q
        \exp\Big(-2 \pi^2 \sum_d \sigma_{qd}^2 \tau_d^2\Big)
        \cos\Big(2 \pi \sum_d \mu_{qd} \tau_d\Big), \qquad \tau = x - x'

    (Wilson and Adams 2013, Eq. 12, the cosine of the whole frequency vector). GPyTorch's
    ``SpectralMixtureKernel`` is a product over columns of such sums, of variance
    :math:`(\sum_q w_q)^d`, which suits few columns but overflows or vanishes for the features of a
    network. Here the variance is :math:`\sum_q w_q` for any d.

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

    mixture_weights = positive("mixture_weights")
    """Variance of each component, ``(Q,)``."""

    mixture_scales = positive("mixture_scales")
    """Standard deviations of frequencies, ``(Q, d)``."""

    @checked
    def __init__(
        self, num_mixtures: int, ard_num_dims: int, generator: torch.Generator | None = None
    ) -> None:
        check_counts(num_mixtures=num_mixtures, ard_num_dims=ard_num_dims)
        super().__init__(ard_num_dims=ard_num_dims)
        generator = seeded(0) if generator is None else generator
        shape = (num_mixtures, ard_num_dims)
        unit = 0.5 / math.pi / math.sqrt(ard_num_dims)
        means = unit * torch.randn(shape, generator=generator)
        means[0] = 0.0
        self.register_parameter("mixture_means", torch.nn.Parameter(means))
        weights, scales = torch.full((num_mixtures,), 1 / num_mixtures), torch.full(shape, unit)
        register_positive(self, mixture_weights=weights, mixture_scales=scales)

    @property
    def is_stationary(self) -> bool:
        """True: the kernel depends on differences of points alone."""
        return True

    @override
    def _covariances(self, x1: Tensor, x2: Tensor, diag: bool, **params: Any) -> Tensor:
        # The cosine of the whole sum, by phases of each point: no array of n x m x d is made.
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
        return (self.mixture_weights[..., None, None] * terms).sum(-3)


@torch.no_grad()
@checked(train_x="float (n,) | (*batch, n, d)", train_y="float (*batch, n)")
def initialize_spectral_mixture(
    kernel: Kernel,
    train_x: Tensor,
    train_y: Tensor,
    generator: torch.Generator | None = None,
    spacing: Literal["smallest", "grid"] = "smallest",
) -> Kernel:
    r"""Sets spectral mixture parameters from the spacing, range and spread of the data.

    For each column, with smallest positive gap :math:`\delta` between values and range
    :math:`R`, the start of each of the Q components is (Wilson and Adams 2013, Sec. 4)

    .. math::
        \mu_q \sim U(0, 1 / 2\delta), \quad
        \sigma_q = 1 / |z_q|, \; z_q \sim N(0, R^2), \quad
        w_q = \mathrm{std}(y) / Q.

    Gaps and ranges within rounding of zero are ignored; a constant column gets :math:`\delta = R =
    1`. Scattered points in several columns can be much closer by chance than the scales they
    resolve, and the kernel then starts as white noise and does not train. Use ``spacing="grid"``
    for such points: it sets :math:`\delta = R / (n^{1/d} - 1)`, the gap of a grid of n points in
    the d columns that vary. NaN targets are left out of the spread.

    A kernel without a batch, or with another one than the data, takes the smallest gap, the largest
    range and the mean spread of all of them. Behind a :class:`~gpclml.kernels.DeepKernel` give
    ``deep.base_kernel`` and the inputs ``deep.features(x)``.

    Args:
        kernel: A ``SpectralMixtureKernel``. Changed in place.
        train_x: Inputs of the kernel. Shape ``(*batch, n, d)`` or ``(n,)``.
        train_y: Targets. Shape ``(*batch, n)``.
        generator: Source of the draws; seed 0 if None.
        spacing: ``"smallest"`` gap of each column, as in the paper, or that of a ``"grid"``.

    Returns:
        The same kernel.

    Raises:
        ArgumentError: It is another kernel.
        UnknownNameError: ``spacing`` is not known.
        ShapeError: Its ``ard_num_dims`` is not the number of columns that it is given.
    """
    generator = seeded(0) if generator is None else generator
    if not isinstance(kernel, SpectralMixtureKernel):
        suggestion = "Pass the one inside of scale, sum, product or deep kernels."
        raise ArgumentError("kernel", type(kernel).__name__, "a SpectralMixtureKernel", suggestion)
    x = train_x.unsqueeze(-1) if train_x.ndim == 1 else train_x
    if isinstance(kernel.active_dims, Tensor):
        x = x.index_select(-1, kernel.active_dims)
    if kernel.ard_num_dims != x.shape[-1]:
        expected = f"{kernel.ard_num_dims} columns, the kernel's ard_num_dims"
        suggestion = f"Make the kernel with ard_num_dims={x.shape[-1]}."
        raise ShapeError("train_x", tuple(x.shape), expected, suggestion)
    parameter = cast(Tensor, kernel.raw_mixture_means)
    batch_shape = parameter.shape[:-3]  # of (*batch, Q, 1, d)
    gap, extent = _gap_and_range(x, spacing)
    gap = _shared(gap, batch_shape, torch.amin)[..., None, None, :]
    extent = _shared(extent, batch_shape, torch.amax)[..., None, None, :]
    spread = _shared(_spread(train_y).unsqueeze(-1), batch_shape, torch.mean)

    # Drawn in float64, so that one seed gives one start in every dtype.
    draw = torch.empty(parameter.shape, dtype=torch.float64, device=generator.device)
    uniform = draw.uniform_(generator=generator).to(parameter).clamp_min(1e-3)
    # A draw next to zero would give a lengthscale of zero: a tenth of the range is the least.
    normal = draw.normal_(generator=generator).to(parameter).abs().clamp_min(0.1)
    kernel.mixture_means = uniform * 0.5 / gap
    kernel.mixture_scales = 1 / (normal * extent)
    kernel.mixture_weights = (spread / kernel.num_mixtures).expand(parameter.shape[:-2])
    return kernel


def _gap_and_range(x: Tensor, spacing: str) -> tuple[Tensor, Tensor]:
    """Gap beyond rounding, and range, of each column; 1 where it is constant."""
    ordered = x.sort(dim=-2).values
    extent = ordered[..., -1, :] - ordered[..., 0, :]
    # Equal values that were computed in two ways differ by rounding: no gap of the data.
    rounding = 10 * torch.finfo(x.dtype).eps * ordered.abs().amax(dim=-2)
    gaps = ordered.diff(dim=-2)
    gaps = torch.where(gaps > rounding.unsqueeze(-2), gaps, torch.inf)
    gap = torch.cat([gaps, torch.full_like(ordered[..., :1, :], torch.inf)], dim=-2).amin(dim=-2)
    constant = torch.isinf(gap)
    if spacing == "grid":
        varying = (~constant).sum(-1, keepdim=True).clamp_min(1)
        gap = extent / (x.shape[-2] ** (1 / varying) - 1).clamp_min(1)
    return torch.where(constant, 1.0, gap), torch.where(constant, 1.0, extent)


def _spread(y: Tensor) -> Tensor:
    """Standard deviation of the targets that are there; 1 where it is zero or undefined."""
    deviation = y - y.nanmean(-1, keepdim=True)
    count = (~y.isnan()).sum(-1)
    spread = (deviation.square().nansum(-1) / (count - 1).clamp_min(1)).sqrt()
    return torch.where(spread > 0, spread, 1.0)


def _shared(values: Tensor, batch_shape: torch.Size, reduce: Callable[..., Tensor]) -> Tensor:
    """Values ``(*batch, d)`` for a kernel, reduced over the data's batch if it has another one."""
    if values.shape[:-1] != batch_shape:
        values = reduce(values.reshape(-1, values.shape[-1]), dim=0)
    return values.expand(*batch_shape, values.shape[-1])
