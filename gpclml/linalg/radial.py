r"""Covariances that are functions of distance, with their derivatives in closed form.

For :math:`K_{ij} = s\, k(e_{ij}) + \delta_{ij} \sigma_i^2`, :math:`e_{ij} = -|z_i - z_j|^2 / 2`,
and :math:`G = \partial L / \partial K` of a loss L,

.. math:: \partial L / \partial z = M z - \operatorname{diag}(M 1)\, z,
    \qquad M = s\, (G + G^\top) \circ k',

which takes two products of an n x n matrix with the points. The two terms cancel where neighbours
are much closer to each other than to the origin, as on a line: in one dimension, where it takes no
longer, differences of points are summed instead. The gradients by lengthscales, by periods and by
the parameters of a network before the kernel follow by the chain rule from n x d numbers. No n x n
array is made for each hyperparameter or for each dimension of the inputs, where differentiating the
kernel step by step makes several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Size, Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import UnknownNameError
from gpclml.linalg.dense import ClosedForm, ConditionalLogDensity, DenseCovariance
from gpclml.linalg.matrices import (
    DOUBLE_UP_TO,
    common_batch,
    inner_product,
    order_with_last,
    products_by_rows,
    refuse_double_backward,
)

__all__ = ["PROFILES", "RadialCovariance", "radial_covariance"]


_ROWS = 1024  # of double-precision distances that are made at a time


class Profile(NamedTuple):
    """A function k of e, minus half a squared distance.

    Attributes:
        factor: Points are multiplied by it before distances are taken.
        value: ``(e, power) -> (k, *kept)``, with what the derivatives need; may overwrite e.
        slope: ``(k, *kept) -> k'``, the derivative by e.
        power_slope: ``(k, *kept) -> dk / d power``, where there is a power.
    """

    factor: float
    value: Callable[..., tuple[Tensor, ...]]
    slope: Callable[..., Tensor]
    power_slope: Callable[..., Tensor] | None = None


def _rbf(e: Tensor, *_: Any) -> tuple[Tensor]:
    return (e.exp_(),)


def _distance(e: Tensor) -> Tensor:
    return e.mul_(-2.0).sqrt_()


def _matern_12(e: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    t = _distance(e)
    k = t.neg().exp_()
    return k, t


def _matern_32(e: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    t = _distance(e)
    decay = t.neg().exp_()
    return t.add_(1.0).mul_(decay), decay


def _matern_52(e: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    t = _distance(e)
    slope = t.neg().exp_()
    third = (t * t).mul_(slope).div_(3.0)
    slope.mul_(t.add_(1.0))
    return third.add_(slope), slope.div_(3.0)


def _rational_quadratic(e: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    base = torch.div(e, power).neg_().add_(1.0)
    return base.log().mul_(-power).exp_(), base


def _cosine(e: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    t = _distance(e)
    return t.cos(), t


PROFILES = {
    "rbf": Profile(1.0, _rbf, lambda k: k),
    "matern_12": Profile(1.0, _matern_12, lambda k, t: (k / t).masked_fill_(t == 0.0, 0.0)),
    "matern_32": Profile(math.sqrt(3.0), _matern_32, lambda k, decay: decay),
    "matern_52": Profile(math.sqrt(5.0), _matern_52, lambda k, slope: slope),
    "rational_quadratic": Profile(
        1.0, _rational_quadratic, lambda k, base: k / base,
        lambda k, base: (1.0 - base.log()).sub_(base.reciprocal()).mul_(k),
    ),
    "cosine": Profile(math.pi, _cosine, lambda k, t: torch.sinc(t / math.pi)),
}  # fmt: skip
"""The functions of distance by name, each of unit variance at distance zero."""


_SHAPES = {
    "points": "float (*batch, n, d)", "scale": "float (*batch)", "noise": "float (*batch, n)",
    "power": "float (*batch)",
}  # fmt: skip


@checked(late=True, **_SHAPES)
def radial_covariance(
    points: Tensor,  # shape: (*batch, n, d)
    profile: str,
    *,
    scale: Tensor | None = None,  # shape: (*batch,)
    noise: Tensor | None = None,  # shape: (*batch, n)
    power: Tensor | None = None,  # shape: (*batch,)
) -> Tensor:
    r"""The covariance of points by a function of their distances, differentiable in closed form.

    With r the distance of two points:

    - ``"rbf"``: :math:`\exp(-r^2 / 2)`
    - ``"matern_12"``, ``"matern_32"``, ``"matern_52"``: of smoothness 1/2, 3/2, 5/2
    - ``"rational_quadratic"``: :math:`(1 + r^2 / 2\alpha)^{-\alpha}`
    - ``"cosine"``: :math:`\cos \pi r`

    Args:
        points: Inputs divided by their lengthscales, ``(*batch, n, d)``.
        profile: Name of the function.
        scale: Variance that multiplies it, ``(*batch,)``; one if None.
        noise: Variances that are added on the diagonal, ``(*batch, n)``; none if None.
        power: The exponent :math:`\alpha` of ``"rational_quadratic"``, ``(*batch,)``.

    Returns:
        Covariances, ``(*batch, n, n)``, with the batch shape that all arguments broadcast to.

    Raises:
        UnknownNameError: If there is no such function.
        UnsupportedError: On a second derivative.

    Note:
        n² (2 d + 4) multiplications and n² exponentials; the gradient 4 n² d. Two n x n arrays are
        kept for the gradient (one for ``"rbf"``).

    Examples:
        >>> from gpclml.linalg import radial_covariance
        >>> x = torch.rand(5, 2, dtype=torch.float64)
        >>> lengthscale = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
        >>> radial_covariance(x / lengthscale, "matern_52").shape
        torch.Size([5, 5])
    """
    if profile not in PROFILES:
        raise UnknownNameError("profile", profile, tuple(PROFILES))
    covariance = _Matrix.apply(points, scale, noise, power, PROFILES[profile])
    assert isinstance(covariance, Tensor)
    return covariance


@checked(late=True, **_SHAPES)
class RadialCovariance(DenseCovariance):
    """The covariance of observations as a function of the distances of their points.

    Log densities of held-out points are computed together with their gradients, and no n x n array
    is kept. Whatever else is asked for is computed from the matrix, formed when it is needed.

    Args:
        points: As for :func:`radial_covariance`, and so are the next four.
        profile: Name of the function.
        scale: Variance that multiplies it, ``(*batch,)``.
        noise: Variances of the noise, ``(*batch, n)``.
        power: The exponent of ``"rational_quadratic"``, ``(*batch,)``.
        factor_dtype: See :func:`gpclml.linalg.factorization_dtype`.
        checked: See :func:`gpclml.linalg.safe_cholesky`.
    """

    def __init__(
        self,
        points: Tensor,
        profile: str,
        *,
        scale: Tensor | None = None,
        noise: Tensor | None = None,
        power: Tensor | None = None,
        factor_dtype: torch.dtype | None = None,
        checked: bool = True,
    ) -> None:
        own = {"factor_dtype": factor_dtype, "checked": checked, "profile": profile}
        vars(self).update(own, points=points, parameters=(scale, noise, power))  # it is frozen

    points: Tensor
    profile: str
    parameters: tuple[Tensor | None, Tensor | None, Tensor | None]

    @cached_property
    def matrix(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The covariance as a matrix, differentiable."""
        scale, noise, power = self.parameters
        return radial_covariance(self.points, self.profile, scale=scale, noise=noise, power=power)

    @property
    def shape(self) -> Size:
        """``(*batch, n, n)``, without forming the matrix."""
        scale, noise, power = self.parameters
        shapes = [one.shape for one in (scale, power) if one is not None]
        shapes += [] if noise is None else [noise.shape[:-1]]
        n = self.points.shape[-2]
        return Size((*common_batch(self.points.shape[:-2], *shapes), n, n))

    @property
    def dtype(self) -> torch.dtype:
        """Of the points."""
        return self.points.dtype

    @property
    def device(self) -> torch.device:
        """Of the points."""
        return self.points.device

    def factored_in(self, dtype: torch.dtype | None, *, checked: bool = True) -> RadialCovariance:
        """With these settings of the Cholesky factors."""
        scale, noise, power = self.parameters
        return RadialCovariance(
            self.points, self.profile, scale=scale, noise=noise, power=power,
            factor_dtype=dtype, checked=checked,
        )  # fmt: skip

    def _conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        if held_out.ndim > 1 or residual.shape[:-1] != self.shape[:-2]:
            return super()._conditional_log_density(residual, held_out)
        b = held_out.shape[-1]
        density = ConditionalLogDensity(None, b, self.factor_dtype, self.checked)
        order = order_with_last(held_out.cpu(), residual.shape[-1])
        return self._at_once(residual, density, order)

    def _block_log_density(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        if residual.shape[:-1] != self.shape[:-2]:
            return super()._block_log_density(residual, blocks)
        return self._at_once(residual, self._blocks(blocks))

    def _at_once(
        self, residual: Tensor, density: ClosedForm, order: Tensor | None = None
    ) -> Tensor:
        """The sum of the densities, of the points in this order."""
        points, (scale, noise, power) = self.points, self.parameters
        if order is not None:  # of n x d numbers rather than of n x n
            order = order.to(self.device, non_blocking=True)
            points, residual = points.index_select(-2, order), residual.index_select(-1, order)
            noise = None if noise is None else noise.index_select(-1, order)
        value = _LogDensity.apply(
            points, scale, noise, power, residual, PROFILES[self.profile], density
        )
        return cast(Tensor, value)


class _Parts(NamedTuple):
    """What a covariance is made of, as its gradients need it, all in one type."""

    z: Tensor
    scale: Tensor | None
    k: Tensor
    kept: Sequence[Tensor]


def _covariance(
    points: Tensor,
    scale: Tensor | None,
    noise: Tensor | None,
    power: Tensor | None,
    profile: Profile,
) -> tuple[Tensor, _Parts]:
    # Distances are differences of large numbers where points are far apart for their lengthscales:
    # they are computed in double precision, and so is all else where the factor will be.
    n, dtype = points.shape[-2], points.dtype
    z = points.double()
    z = z - z.mean(-2, keepdim=True)
    if profile.factor != 1.0:
        z.mul_(profile.factor)
    half = z.square().sum(-1, keepdim=True).mul_(-0.5)
    one = torch.ones_like(half)
    left, right = torch.cat([z, half, one], -1), torch.cat([z, one, half], -1).mT
    if n <= DOUBLE_UP_TO or dtype == torch.float64:
        dtype, e = torch.float64, left @ right
    else:
        e = torch.empty(*points.shape[:-1], n, dtype=dtype, device=points.device)
        for start in range(0, n, _ROWS):
            e[..., start : start + _ROWS, :] = left[..., start : start + _ROWS, :] @ right
    # Equal points have to be at distance zero exactly, as each is to itself. They have one norm, of
    # which a few roundings are left as their distance.
    floor = (4.0 * torch.finfo(torch.float64).eps * half).to(dtype)
    e.masked_fill_(e > floor, 0.0).diagonal(dim1=-2, dim2=-1).zero_()
    z, (scale, noise, power) = z.to(dtype), [
        None if one is None else one.to(dtype) for one in (scale, noise, power)
    ]  # fmt: skip
    k, *kept = profile.value(e, None if power is None else power[..., None, None])
    parts = _Parts(z, scale, k, kept)
    if scale is None and noise is None:
        return k, parts
    covariance = k.clone() if scale is None else k * scale[..., None, None]
    if noise is not None:
        batch = common_batch(covariance.shape[:-2], noise.shape[:-1])
        if batch != covariance.shape[:-2]:
            covariance = covariance.expand(*batch, *covariance.shape[-2:]).clone()
        covariance.diagonal(dim1=-2, dim2=-1).add_(noise)
    return covariance, parts


def _gradients(
    grad: Tensor,
    parts: _Parts,
    profile: Profile,
    needed: Sequence[bool],
    *,
    symmetric: bool,
) -> list[Tensor | None]:
    """By points, scale, noise and power, with the batch shape of the covariance.

    Args:
        grad: Gradient by the covariance.
        parts: Of the covariance.
        profile: The function of distance.
        needed: Which of the four.
        symmetric: Whether ``grad`` is.
    """
    z, scale, k, kept = parts
    of_points, of_scale, of_noise, of_power = needed
    gradients: list[Tensor | None] = [None] * 4
    if of_noise:
        gradients[2] = grad.diagonal(dim1=-2, dim2=-1).clone()
    if of_scale:
        gradients[1] = inner_product(grad, k)
    if of_power:
        assert profile.power_slope is not None
        by_power = inner_product(grad, profile.power_slope(k, *kept))
        gradients[3] = by_power if scale is None else by_power * scale
    if of_points:
        differences = _differences if z.shape[-1] == 1 else _differences_by_product
        gradient = differences(grad, z, profile.slope(k, *kept), symmetric)
        if profile.factor != 1.0:
            gradient.mul_(profile.factor)
        gradients[0] = gradient if scale is None else gradient * scale[..., None, None]
    return gradients


def _differences(grad: Tensor, z: Tensor, slope: Tensor, symmetric: bool) -> Tensor:
    """Sums over j of ``(M_ij + M_ji) (z_j - z_i)``, ``(*batch, n, 1)``, of points on a line."""
    z = z.squeeze(-1).expand(grad.shape[:-1])
    of_rows, of_columns, terms = torch.empty_like(z), torch.zeros_like(z), None
    for rows, M in products_by_rows(grad, slope):
        terms = torch.empty_like(M) if terms is None else terms[..., : M.shape[-2], :]
        torch.sub(z[..., None, :], z[..., rows, None], out=terms).mul_(M)
        torch.sum(terms, -1, out=of_rows[..., rows])
        if not symmetric:
            of_columns += terms.sum(-2)
    return (of_rows.mul_(2.0) if symmetric else of_rows - of_columns).unsqueeze(-1)


def _differences_by_product(grad: Tensor, z: Tensor, slope: Tensor, symmetric: bool) -> Tensor:
    """The same in any number of dimensions, as ``M z - diag(M 1) z``."""
    M = grad * slope
    # A point has no distance to itself; far from the origin its two terms would cancel badly.
    M.diagonal(dim1=-2, dim2=-1).zero_()
    columns = torch.cat([z, torch.ones_like(z[..., :1])], -1)
    product = M @ columns
    product = product.mul_(2.0) if symmetric else product + M.mT @ columns
    return product[..., :-1] - product[..., -1:] * z


def _like(value: Tensor | None) -> tuple[Size, torch.dtype] | None:
    return None if value is None else (value.shape, value.dtype)


def _fitted(gradient: Tensor | None, like: tuple[Size, torch.dtype] | None) -> Tensor | None:
    """The gradient in the shape and type of its argument."""
    if gradient is None or like is None:
        return None
    shape, dtype = like
    return (gradient if gradient.shape == shape else gradient.sum_to_size(shape)).to(dtype)


def _reaching(values: Tensor, ndim: int) -> Tensor:
    """The values with dimensions of size one behind them."""
    return values[(..., *(None,) * (ndim - values.ndim))]


class _Matrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, points, scale, noise, power, profile):
        covariance, parts = _covariance(points, scale, noise, power, profile)
        ctx.save_for_backward(parts.z, parts.scale, parts.k, *parts.kept)
        ctx.profile = profile
        ctx.likes = [_like(one) for one in (points, scale, noise, power)]
        return covariance.to(points.dtype)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("radial_covariance")
        z, scale, k, *kept = ctx.saved_tensors
        gradients = _gradients(
            grads[0].to(k.dtype), _Parts(z, scale, k, kept), ctx.profile, ctx.needs_input_grad[:4],
            symmetric=False,
        )  # fmt: skip
        return *map(_fitted, gradients, ctx.likes), None


class _LogDensity(torch.autograd.Function):
    """The gradient is computed with the value, where one is wanted: it needs the same factor."""

    @staticmethod
    def forward(ctx, points, scale, noise, power, residual, profile, density):
        covariance, parts = _covariance(points, scale, noise, power, profile)
        values, state = density.evaluate(covariance, residual.unsqueeze(-2).to(covariance.dtype))
        needed = ctx.needs_input_grad
        if any(needed):
            grad, of_residual = density.gradient(state, torch.ones_like(values))
            dtype = parts.z.dtype
            gradients = _gradients(grad.to(dtype), parts, profile, needed[:4], symmetric=True)
            gradients.append(of_residual.squeeze(-2) if needed[4] else None)
            ctx.save_for_backward(*gradients)
            ctx.likes = [_like(one) for one in (points, scale, noise, power, residual)]
        return values.flatten(covariance.ndim - 2).sum(-1).to(points.dtype)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("log densities")
        (grad,) = grads
        gradients = [
            None if one is None else _fitted(one * _reaching(grad, one.ndim), like)
            for one, like in zip(ctx.saved_tensors, ctx.likes, strict=True)
        ]
        return *gradients, None, None
