"""Shift and scale of inputs and targets."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError

_AT_ONCE = 1 << 20  # numbers; of more, column by column, since there are several copies of them


class Standardizer(torch.nn.Module):
    r"""The affine change of units :math:`z = (v - \text{offset}) / \text{scale}`.

    Offset and scale are buffers: they are saved, moved and cast with the model, and not
    trained. A log density of n values in units of z becomes one in units of v by subtracting
    :math:`n \log \text{scale}`.

    Args:
        offset: What is subtracted; broadcasts against the values.
        scale: What the difference is divided by; broadcasts against the values.

    Raises:
        ArgumentError: A scale is not positive.
    """

    offset: Tensor
    scale: Tensor

    @checked(late=True, offset="float (*batch)", scale="float (*batch)")
    def __init__(self, offset: Tensor, scale: Tensor) -> None:
        super().__init__()
        if not bool((scale > 0).all()):
            raise ArgumentError("scale", "a scale that is not positive", "positive numbers")
        self.register_buffer("offset", offset)
        self.register_buffer("scale", scale)

    @classmethod
    @checked(values="float (*batch, n)")
    def fit(cls, values: Tensor, dim: int) -> Standardizer:
        """The standardizer to mean 0 and sample standard deviation 1 along a dimension.

        NaN values are left out. Where the spread is within rounding of the magnitude (a
        constant column, a single value) the scale is 1.

        Args:
            values: Data; e.g. inputs ``(*batch, n, d)`` with ``dim=-2``, targets
                ``(*batch, n)`` with ``dim=-1``.
            dim: The dimension of the data points.

        Returns:
            A standardizer whose offset and scale have size 1 along ``dim``.
        """
        if not -values.ndim <= dim < values.ndim:
            raise ArgumentError("dim", dim, f"a dimension of values, {tuple(values.shape)}")
        columns = values.shape[-1] if dim % values.ndim < values.ndim - 1 else 1
        if columns > 1 and values.numel() > _AT_ONCE:
            fits = [cls.fit(column, dim) for column in values.split(1, -1)]
            offsets, scales = ([getattr(fit, name) for fit in fits] for name in ("offset", "scale"))
            return cls(torch.cat(offsets, -1), torch.cat(scales, -1))
        data = values.detach().to(torch.float64)
        observed = ~torch.isnan(data)
        count = observed.sum(dim, keepdim=True)
        data = torch.where(observed, data, 0.0)
        mean = data.sum(dim, keepdim=True) / count.clamp_min(1)
        deviation = torch.where(observed, data - mean, 0.0)
        largest = deviation.abs().amax(dim, keepdim=True)
        magnitude = data.abs().amax(dim, keepdim=True)
        constant = largest <= 100 * torch.finfo(values.dtype).eps * magnitude
        # In units of the largest deviation, so that squares neither overflow nor vanish.
        relative = deviation / torch.where(constant, 1.0, largest)
        scale = largest * (relative.square().sum(dim, keepdim=True) / (count - 1)).sqrt()
        return cls(mean.to(values.dtype), torch.where(constant, 1.0, scale).to(values.dtype))

    def check_representable(self, argument: str, power: int) -> None:
        """Refuses a scale so large or small that the type cannot hold what is computed with it.

        Args:
            argument: Name of the data, as the caller writes it.
            power: Power of the scale that the type has to hold: 2 for variances.

        Raises:
            ArgumentError: The scale is too large or too small; the error gives the bounds, which
                leave four digits for the numbers of a model.
        """
        info = torch.finfo(self.scale.dtype)
        least = 1e4 * info.tiny ** (1 / power)
        most = info.max / 4 if power == 1 else 1e-4 * info.max ** (1 / power)
        bad = (self.scale < least) | (self.scale > most)
        if bad.any():
            got = f"a standard deviation of {float(self.scale[bad][0]):.3g}"
            expected = f"one between {least:.1g} and {most:.1g}"
            expected += f", which {self.scale.dtype} can square" * (power == 2)
            raise ArgumentError(argument, got, expected, "Measure it in another unit.")

    @classmethod
    def identity(cls, values: Tensor, dim: int) -> Standardizer:
        """The standardizer that leaves values as they are, with buffers as :meth:`fit` makes.

        Args:
            values: Data.
            dim: The dimension of the data points.

        Returns:
            A standardizer of offset 0 and scale 1.
        """
        like = values.detach().narrow(dim, 0, 1)
        return cls(torch.zeros_like(like), torch.ones_like(like))

    @checked(late=True, passes_on="values", values="float (*batch)")
    def transform(self, values: Tensor) -> Tensor:
        """Values in standardized units.

        Raises:
            ShapeError: If they have other columns than the data.
        """
        expected = self.offset.shape
        sizes = zip(values.shape[::-1], expected[::-1], strict=False)
        if any(size not in (1, fitted) and fitted != 1 for size, fitted in sizes):
            raise ShapeError("values", tuple(values.shape), f"a shape that fits {tuple(expected)}")
        return (values - self.offset) / self.scale

    def inverse(self, values: Tensor) -> Tensor:
        """Standardized values in original units."""
        return values * self.scale + self.offset

    forward = transform
