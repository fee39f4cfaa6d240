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

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Size, Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import UnknownNameError
from gpclml.linalg.covariance import ClosedForm, Pairs, common_batch
from gpclml.linalg.dense import DenseCovariance
from gpclml.linalg.matrices import (
    DOUBLE_UP_TO,
    inner_product,
    products_by_rows,
    refuse_double_backward,
)
from gpclml.linalg.profiles import PROFILES, Profile

__all__ = ["PROFILES", "RadialCovariance", "fitted", "radial_covariance"]


_ROWS = 1024  # of double-precision distances that are made at a time


_SHAPES = {
    "points": "float (*batch, n, d)", "lengthscale": "float (*batch, 1, d) | float (*batch, 1, 1)",
    "scale": "float (*batch)", "noise": "float (*batch, n) | float (*batch, 1)",
    "power": "float (*batch)",
}  # fmt: skip


@checked(late=True, **_SHAPES)
def radial_covariance(
    points: Tensor,  # shape: (*batch, n, d)
    profile: str,
    *,
    lengthscale: Tensor | None = None,  # shape: (*batch, 1, d) or (*batch, 1, 1)
    scale: Tensor | None = None,  # shape: (*batch,)
    noise: Tensor | None = None,  # shape: (*batch, n) or (*batch, 1)
    power: Tensor | None = None,  # shape: (*batch,)
) -> Tensor:
    r"""The covariance of points by a function of their distances, differentiable in closed form.

    With r the distance of two points in units of the lengthscales:

    - ``"rbf"``: :math:`\exp(-r^2 / 2)`
    - ``"matern_12"``, ``"matern_32"``, ``"matern_52"``: of smoothness 1/2, 3/2, 5/2
    - ``"rational_quadratic"``: :math:`(1 + r^2 / 2\alpha)^{-\alpha}`
    - ``"cosine"``: :math:`\cos \pi r`

    Args:
        points: Inputs, ``(*batch, n, d)``.
        profile: Name of the function.
        lengthscale: Units of distance, ``(*batch, 1, d)`` or one for all dimensions; ones if None.
        scale: Variance that multiplies it, ``(*batch,)``; one if None.
        noise: Variances that are added on the diagonal, ``(*batch, n)`` or one for all points;
            none if None.
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
        >>> radial_covariance(x, "matern_52", lengthscale=lengthscale.unsqueeze(0)).shape
        torch.Size([5, 5])
    """
    if profile not in PROFILES:
        raise UnknownNameError("profile", profile, tuple(PROFILES))
    covariance = _Matrix.apply(points, lengthscale, scale, noise, power, PROFILES[profile])
    assert isinstance(covariance, Tensor)
    return covariance


class _Arguments(NamedTuple):
    """What a covariance is a function of."""

    points: Tensor
    lengthscale: Tensor | None = None
    scale: Tensor | None = None
    noise: Tensor | None = None
    power: Tensor | None = None

    def batch_shape(self) -> Size:
        """The batch shape to which all of them broadcast."""
        points, lengthscale, scale, noise, power = self
        shapes = [points.shape[:-2]]
        shapes += [] if lengthscale is None else [lengthscale.shape[:-2]]
        shapes += [one.shape for one in (scale, power) if one is not None]
        shapes += [] if noise is None else [noise.shape[:-1]]
        return common_batch(*shapes) if any(shapes) else Size()


@checked(late=True, **_SHAPES)
class RadialCovariance(DenseCovariance):
    """The covariance of observations as a function of the distances of their points.

    Log densities of held-out points are computed together with their gradients, and no n x n array
    is kept. Whatever else is asked for is computed from the matrix, formed when it is needed.

    Args:
        points: As for :func:`radial_covariance`, and so are the next five.
        profile: Name of the function.
        lengthscale: Units of distance, ``(*batch, 1, d)`` or ``(*batch, 1, 1)``.
        scale: Variance that multiplies it, ``(*batch,)``.
        noise: Variances of the noise, ``(*batch, n)`` or ``(*batch, 1)``.
        power: The exponent of ``"rational_quadratic"``, ``(*batch,)``.
        factor_dtype: See :func:`gpclml.linalg.factorization_dtype`.
        checked: See :func:`gpclml.linalg.safe_cholesky`.
    """

    def __init__(
        self,
        points: Tensor,
        profile: str,
        *,
        lengthscale: Tensor | None = None,
        scale: Tensor | None = None,
        noise: Tensor | None = None,
        power: Tensor | None = None,
        factor_dtype: torch.dtype | None = None,
        checked: bool = True,
    ) -> None:
        own = {"factor_dtype": factor_dtype, "checked": checked, "profile": profile}
        parts = _Arguments(points, lengthscale, scale, noise, power)
        vars(self).update(own, arguments=parts)  # it is frozen

    profile: str
    arguments: _Arguments

    @cached_property
    def matrix(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The covariance as a matrix, differentiable."""
        return cast(Tensor, _Matrix.apply(*self.arguments, PROFILES[self.profile]))

    @property
    def shape(self) -> Size:
        """``(*batch, n, n)``, without forming the matrix."""
        n = self.arguments.points.shape[-2]
        return Size((*self.arguments.batch_shape(), n, n))

    @property
    def dtype(self) -> torch.dtype:
        """Of the points."""
        return self.arguments.points.dtype

    @property
    def device(self) -> torch.device:
        """Of the points."""
        return self.arguments.points.device

    def factored_in(self, dtype: torch.dtype | None, *, checked: bool = True) -> RadialCovariance:
        """With these settings of the Cholesky factors."""
        return RadialCovariance(
            profile=self.profile, factor_dtype=dtype, checked=checked, **self.arguments._asdict()
        )

    def _conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        if held_out.ndim > 1 or residual.shape[:-1] != self.shape[:-2]:
            return super()._conditional_log_density(residual, held_out)
        return self._at_once(residual, self.density([held_out.unsqueeze(0)]))

    def _block_log_density(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        if residual.shape[:-1] != self.shape[:-2]:
            return super()._block_log_density(residual, blocks)
        return self._at_once(residual, self._of_blocks(blocks))

    def _at_once(self, residual: Tensor, density: ClosedForm) -> Tensor:
        """The sum of the densities, whose gradients are computed with it."""
        profile = PROFILES[self.profile]
        return cast(Tensor, _LogDensity.apply(*self.arguments, residual, profile, density))

    def value_and_gradients(self, residual: Tensor, density: ClosedForm) -> tuple[Tensor, Pairs]:
        """By all that the covariance is made of, without a matrix that autograd keeps."""
        if residual.shape[:-1] != self.shape[:-2]:
            return super().value_and_gradients(residual, density)
        tensors = (*self.arguments, residual)
        needed = [one is not None and one.requires_grad for one in tensors]
        with torch.no_grad():
            value, gradients = _density_and_gradients(
                self.arguments, residual, PROFILES[self.profile], density, needed
            )
        pairs = zip(tensors, gradients, strict=True)
        return value, [
            (tensor, fitted(gradient, tensor.shape, tensor.dtype))
            for tensor, gradient in pairs if tensor is not None and gradient is not None
        ]  # fmt: skip


class _Parts(NamedTuple):
    """What a covariance is made of, as its gradients need it, all in one type."""

    z: Tensor
    lengthscale: Tensor | None
    scale: Tensor | None
    k: Tensor
    kept: Sequence[Tensor]


def _covariance(arguments: _Arguments, profile: Profile) -> tuple[Tensor, _Parts]:
    # Distances are differences of large numbers where points are far apart for their lengthscales:
    # they are computed in double precision, and so is all else where the factor will be.
    points, lengthscale, scale, noise, power = arguments
    n, dtype = points.shape[-2], points.dtype
    z = points.double()
    if lengthscale is not None:
        z = z / lengthscale
    z = z - z.mean(-2, keepdim=True)
    if profile.factor != 1.0:
        z.mul_(profile.factor)
    half = z.square().sum(-1, keepdim=True).mul_(-0.5)
    one = torch.ones_like(half)
    left, right = torch.cat([z, half, one], -1), torch.cat([z, one, half], -1).mT
    if n <= DOUBLE_UP_TO or dtype == torch.float64:
        dtype, e = torch.float64, left @ right
    else:
        e = torch.empty(*z.shape[:-1], n, dtype=dtype, device=z.device)
        for start in range(0, n, _ROWS):
            e[..., start : start + _ROWS, :] = left[..., start : start + _ROWS, :] @ right
    # Equal points have to be at distance zero exactly, as each is to itself. They have one norm, of
    # which a few roundings are left as their distance.
    floor = half.mul_(4.0 * torch.finfo(torch.float64).eps).to(dtype)
    e.masked_fill_(e > floor, 0.0).diagonal(dim1=-2, dim2=-1).zero_()
    z, (lengthscale, scale, noise, power) = z.to(dtype), [
        None if one is None else one.to(dtype) for one in (lengthscale, scale, noise, power)
    ]  # fmt: skip
    k, *kept = profile.value(e, None if power is None else power[..., None, None])
    parts = _Parts(z, lengthscale, scale, k, kept)
    if scale is None and noise is None:
        return k, parts
    covariance = k.clone() if scale is None else k * scale[..., None, None]
    if noise is not None:
        if noise.ndim > 1:
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
    """By all arguments in turn, with the batch shape of the covariance.

    Args:
        grad: Gradient by the covariance.
        parts: Of the covariance.
        profile: The function of distance.
        needed: Which of the five.
        symmetric: Whether ``grad`` is.
    """
    z, lengthscale, scale, k, kept = parts
    of_points, of_lengthscale, of_scale, of_noise, of_power = needed
    gradients: list[Tensor | None] = [None] * 5
    if of_noise:
        gradients[3] = grad.diagonal(dim1=-2, dim2=-1).clone()
    if of_scale:
        gradients[2] = inner_product(grad, k)
    if of_power:
        assert profile.power_slope is not None
        by_power = inner_product(grad, profile.power_slope(k, *kept))
        gradients[4] = by_power if scale is None else by_power * scale
    if of_points or of_lengthscale:
        differences = _differences if z.shape[-1] == 1 else _differences_by_product
        gradient = differences(grad, z, profile.slope(k, *kept), symmetric)
        if scale is not None:
            gradient = gradient * scale[..., None, None]
        if of_lengthscale:
            assert lengthscale is not None
            gradients[1] = (gradient * z).sum(-2, keepdim=True).neg_().div_(lengthscale)
        if of_points:
            factor = profile.factor if lengthscale is None else profile.factor / lengthscale
            gradients[0] = gradient * factor
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


def _density_and_gradients(
    arguments: _Arguments,
    residual: Tensor,
    profile: Profile,
    density: ClosedForm,
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum of the densities, and its gradients by the arguments and by the residual."""
    if density.order is not None:
        return _in_order(arguments, residual, profile, density, needed)
    covariance, parts = _covariance(arguments, profile)
    values, state = density.evaluate(covariance, residual.unsqueeze(-2).to(covariance.dtype))
    gradients: list[Tensor | None] = [None] * 6
    if any(needed):
        grad, of_residual = density.gradient(state, torch.ones_like(values))
        own = _gradients(grad.to(parts.z.dtype), parts, profile, needed[:5], symmetric=True)
        gradients = [*own, of_residual.squeeze(-2) if needed[5] else None]
    summed = values.flatten(covariance.ndim - 2).sum(-1)
    return summed.to(residual.dtype), gradients


_DIMS_OF_POINTS = (-2, 0, 0, -1, 0, -1)  # of arguments and residual; 0 where points have none


def _in_order(
    arguments: _Arguments,
    residual: Tensor,
    profile: Profile,
    density: ClosedForm,
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """The same in the order of the density: n x d numbers are moved rather than n x n."""
    order = cast(Tensor, density.order)
    points, noise = arguments.points.index_select(-2, order), arguments.noise
    if noise is not None and noise.shape[-1] > 1:
        noise = noise.index_select(-1, order)
    value, gradients = _density_and_gradients(
        arguments._replace(points=points, noise=noise), residual.index_select(-1, order),
        profile, density.of_ordered(), needed,
    )  # fmt: skip
    for place, (gradient, dim) in enumerate(zip(gradients, _DIMS_OF_POINTS, strict=True)):
        if gradient is not None and dim:
            gradients[place] = torch.empty_like(gradient).index_copy_(dim, order, gradient)
    return value, gradients


def _like(value: Tensor | None) -> tuple[Size, torch.dtype] | None:
    return None if value is None else (value.shape, value.dtype)


def fitted(gradient: Tensor, shape: Size, dtype: torch.dtype) -> Tensor:
    """The gradient in the shape and type of its argument."""
    return (gradient if gradient.shape == shape else gradient.sum_to_size(shape)).to(dtype)


class _Matrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, points, lengthscale, scale, noise, power, profile):
        arguments = _Arguments(points, lengthscale, scale, noise, power)
        covariance, parts = _covariance(arguments, profile)
        ctx.save_for_backward(*parts[:4], *parts.kept)
        ctx.profile = profile
        ctx.likes = [_like(one) for one in arguments]
        return covariance.to(points.dtype)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("radial_covariance")
        z, lengthscale, scale, k, *kept = ctx.saved_tensors
        parts = _Parts(z, lengthscale, scale, k, kept)
        needed = ctx.needs_input_grad[:5]
        gradients = _gradients(grads[0].to(k.dtype), parts, ctx.profile, needed, symmetric=False)
        pairs = zip(gradients, ctx.likes, strict=True)
        return *[None if g is None else fitted(g, *like) for g, like in pairs], None


class _LogDensity(torch.autograd.Function):
    """The gradient is computed with the value, where one is wanted: it needs the same factor."""

    @staticmethod
    def forward(ctx, points, lengthscale, scale, noise, power, residual, profile, density):
        arguments = _Arguments(points, lengthscale, scale, noise, power)
        value, gradients = _density_and_gradients(
            arguments, residual, profile, density, ctx.needs_input_grad
        )
        likes = [_like(one) for one in (*arguments, residual)]
        if not value.ndim:  # else members of a batch are weighted before they are summed
            gradients = [
                None if g is None or like is None else fitted(g, *like)
                for g, like in zip(gradients, likes, strict=True)
            ]
        ctx.save_for_backward(*gradients)
        ctx.likes = likes
        return value

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("log densities")
        (grad,) = grads  # one a member, which reaches all numbers of the member
        gradients = [
            None if one is None
            else one * grad if not grad.ndim
            else fitted(one * grad[(..., *(None,) * (one.ndim - grad.ndim))], *like)
            for one, like in zip(ctx.saved_tensors, ctx.likes, strict=True)
        ]  # fmt: skip
        return *gradients, None, None
