"""A start for spectral mixture kernels taken from the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    ProductKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError, UnknownNameError
from gpclml.kernels.deep import DeepKernel

__all__ = ["initialize_spectral_mixture"]


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

    Gaps and ranges within rounding of zero do not count; a constant column gets
    :math:`\delta = R = 1`. In several columns scattered points have chance gaps far below what
    they resolve, and a start from the smallest is white noise that does not train:
    ``spacing="grid"`` takes :math:`\delta = R / (n^{1/d} - 1)`, the gap of a grid of n points
    in the d columns that vary, instead. NaN targets are left out of the spread. A batch that
    shares one kernel gets its smallest gap, largest range and mean spread.

    Every ``SpectralMixtureKernel`` within scale, sum, product and deep kernels is set; behind
    a :class:`DeepKernel` the network's features stand in for the inputs.

    Args:
        kernel: A spectral mixture kernel, or one that contains it. Changed in place.
        train_x: Inputs as the kernel sees them. Shape ``(*batch, n, d)`` or ``(n,)``.
        train_y: Targets. Shape ``(*batch, n)``.
        generator: Source of the draws; seed 0 if None.
        spacing: ``"smallest"`` gap of each column, as in the paper, or that of a ``"grid"``.

    Returns:
        The same kernel.

    Raises:
        ArgumentError: There is no spectral mixture kernel to set.
        UnknownNameError: ``spacing`` is not known.
        ShapeError: Its ``ard_num_dims`` is not the number of columns it sees.
    """
    if spacing not in ("smallest", "grid"):
        raise UnknownNameError("spacing", spacing, ("smallest", "grid"))
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    train_x = train_x.unsqueeze(-1) if train_x.ndim == 1 else train_x
    found = list(_spectral_mixtures(kernel, train_x))
    if not found:
        mend = "Pass a SpectralMixtureKernel, alone or inside scale, sum, product or deep kernels."
        got = type(kernel).__name__
        raise ArgumentError("kernel", got, "a kernel with a SpectralMixtureKernel in it", mend)
    for mixture, inputs in found:
        _initialize(mixture, inputs, train_y, generator, spacing)
    return kernel


def _spectral_mixtures(
    kernel: Kernel, x: Tensor, called: bool = True
) -> Iterator[tuple[SpectralMixtureKernel, Tensor]]:
    """Each spectral mixture kernel with the inputs that reach it."""
    if called and isinstance(kernel.active_dims, Tensor):
        x = x.index_select(-1, kernel.active_dims)
    if isinstance(kernel, SpectralMixtureKernel):
        yield kernel, x
    elif isinstance(kernel, DeepKernel):
        yield from _spectral_mixtures(kernel.base_kernel, kernel.features(x))
    elif isinstance(kernel, ScaleKernel):
        # ScaleKernel takes over its base kernel's active_dims: columns are selected once.
        yield from _spectral_mixtures(kernel.base_kernel, x, called=False)
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for part in kernel.kernels:
            assert isinstance(part, Kernel)
            yield from _spectral_mixtures(part, x)


def _initialize(
    kernel: SpectralMixtureKernel,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    spacing: str,
) -> None:
    if kernel.ard_num_dims != x.shape[-1]:
        expected = f"{kernel.ard_num_dims} columns, the kernel's ard_num_dims"
        mend = f"Make the kernel with ard_num_dims={x.shape[-1]}."
        raise ShapeError("train_x", tuple(x.shape), expected, mend)
    parameter = kernel.raw_mixture_means
    assert isinstance(parameter, Tensor)
    shape = parameter.shape  # (*kernel batch, Q, 1, d)
    batch_shape = shape[:-3]
    gap, extent = _gap_and_range(x, spacing)
    gap = _reduce_batch(gap, batch_shape, torch.amin)[..., None, None, :]
    extent = _reduce_batch(extent, batch_shape, torch.amax)[..., None, None, :]
    spread = _reduce_batch(_spread(y).unsqueeze(-1), batch_shape, torch.mean)

    # Drawn in float64, so that one seed gives one start in every dtype.
    draw = torch.empty(shape, dtype=torch.float64, device=generator.device)
    uniform = draw.uniform_(generator=generator).to(parameter).clamp_min(1e-3)
    # A draw next to zero would give a lengthscale of zero: a tenth of the range is the least.
    normal = draw.normal_(generator=generator).to(parameter).abs().clamp_min(0.1)
    kernel.mixture_means = uniform * 0.5 / gap
    kernel.mixture_scales = 1 / (normal * extent)
    kernel.mixture_weights = (spread / kernel.num_mixtures).expand(*batch_shape, shape[-3])


def _gap_and_range(x: Tensor, spacing: str) -> tuple[Tensor, Tensor]:
    """Gap beyond rounding, and range, of each column; 1 where it is constant."""
    ordered = x.sort(dim=-2).values
    extent = ordered[..., -1, :] - ordered[..., 0, :]
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
    observed = ~torch.isnan(y)
    count = observed.sum(-1)
    mean = torch.where(observed, y, 0.0).sum(-1) / count.clamp_min(1)
    deviation = torch.where(observed, y - mean.unsqueeze(-1), 0.0)
    spread = (deviation.square().sum(-1) / (count - 1).clamp_min(1)).sqrt()
    return torch.where(spread > 0, spread, 1.0)


def _reduce_batch(values: Tensor, batch_shape: torch.Size, reduce: Callable[..., Tensor]) -> Tensor:
    """Values of shape (*batch, d) reduced where the kernel's batch is smaller."""
    while values.ndim - 1 > len(batch_shape):
        values = reduce(values, dim=0)
    for dim, size in enumerate(batch_shape[::-1], start=2):
        if dim <= values.ndim and size == 1:
            values = reduce(values, dim=-dim, keepdim=True)
    return values.expand(*batch_shape, values.shape[-1])
