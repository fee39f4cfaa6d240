"""Sines and cosines of the inputs, at whole or at random frequencies."""

from __future__ import annotations

import math
from typing import cast

import gpytorch
import torch
from gpytorch.constraints import Positive
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError
from gpclml.kernels._cosines import scaled_cosines

__all__ = ["FourierFeatures", "RandomFourierFeatures"]


class FourierFeatures(torch.nn.Module):
    r"""Sines and cosines of whole frequencies, :math:`\sin(dx), \cos(dx)`, d = 1 .. D.

    The Fourier models of Lotfi et al. (2022, Section 4.3 and Figure 4): all sines, then all
    cosines.

    Args:
        num_frequencies: Number D.

    Raises:
        ArgumentError: D is below one.
    """

    @checked
    def __init__(self, num_frequencies: int) -> None:
        super().__init__()
        if num_frequencies < 1:
            raise ArgumentError("num_frequencies", num_frequencies, "at least 1")
        self.num_frequencies = num_frequencies

    @checked(late=True, x="float (*batch, n, 1)")
    def forward(self, x: Tensor) -> Tensor:
        """Features of points.

        Args:
            x: One column, ``(*batch, n, 1)``.

        Returns:
            ``(*batch, n, 2 D)``.

        Raises:
            ShapeError: There are several columns.
        """
        if x.shape[-1] != 1:
            raise ShapeError("x", tuple(x.shape), "(*batch, n, 1)", "Use RandomFourierFeatures.")
        angles = x * torch.arange(1, self.num_frequencies + 1, dtype=x.dtype, device=x.device)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class RandomFourierFeatures(gpytorch.Module):
    r"""Cosines at random frequencies, whose inner products approximate an RBF kernel.

    .. math:: \phi(x) = \sigma_k \sqrt{2 / R} \, \cos(W x / \ell + b), \qquad
        W_{rj} \sim N(0, 1), \; b_r \sim U[0, 2\pi]

    (Rahimi and Recht 2007; Harvey and Hughes 2026, Section 2). Lengthscale and amplitude are
    GPyTorch parameters; frequencies and phases are fixed.

    Args:
        num_inputs: Number d of columns.
        num_features: Number R.
        lengthscale: Start of the lengthscale.
        amplitude: Start of :math:`\sigma_k`, whose square is the variance of the kernel.
        ard: Give each column a lengthscale.
        seed: Of frequencies and phases.
        weight: Frequencies W instead of random ones, ``(R, d)``.
        bias: Phases b to go with them, ``(R,)``.

    Raises:
        ArgumentError: A number is below one, lengthscale or amplitude not positive, or weight comes
            without bias.
        ShapeError: Weight and bias are not of these shapes.

    Examples:
        >>> features = RandomFourierFeatures(num_inputs=3, num_features=500)
        >>> model = BayesianLinearModel(x, y, features)
    """

    weight: Tensor
    bias: Tensor

    @checked(weight="float (R, d)", bias="float (R,)")
    def __init__(
        self,
        num_inputs: int,
        num_features: int,
        *,
        lengthscale: float = 1.0,
        amplitude: float = 1.0,
        ard: bool = False,
        seed: int = 0,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        for name, number in (("num_inputs", num_inputs), ("num_features", num_features)):
            if number < 1:
                raise ArgumentError(name, number, "at least 1")
        if (weight is None) != (bias is None):
            raise ArgumentError("bias", bias, "phases wherever weight is given, and only there")
        if weight is None or bias is None:
            generator = torch.Generator().manual_seed(seed)
            shape = num_features, num_inputs
            weight = torch.randn(shape, dtype=torch.float64, generator=generator)
            bias = 2 * math.pi * torch.rand(num_features, dtype=torch.float64, generator=generator)
            weight, bias = (part.to(torch.get_default_dtype()) for part in (weight, bias))
        elif weight.shape != (num_features, num_inputs) or bias.shape != (num_features,):
            got = f"{tuple(weight.shape)} and {tuple(bias.shape)}"
            expected = f"({num_features}, {num_inputs}) and ({num_features},)"
            raise ShapeError("weight, bias", got, expected)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        columns = num_inputs if ard else 1
        for name in ("lengthscale", "amplitude"):
            size = columns if name == "lengthscale" else 1
            raw = torch.nn.Parameter(torch.zeros(size, dtype=weight.dtype, device=weight.device))
            self.register_parameter(f"raw_{name}", raw)
            self.register_constraint(f"raw_{name}", Positive())
        self.lengthscale, self.amplitude = lengthscale, amplitude

    @property
    def lengthscale(self) -> Tensor:
        """One, or one a column, ``(1,)`` or ``(d,)``."""
        return self._get("lengthscale")

    @lengthscale.setter
    def lengthscale(self, value: float | Tensor) -> None:
        self._set("lengthscale", value)

    @property
    def amplitude(self) -> Tensor:
        """Standard deviation of the approximated process, ``(1,)``."""
        return self._get("amplitude")

    @amplitude.setter
    def amplitude(self, value: float | Tensor) -> None:
        self._set("amplitude", value)

    def _get(self, name: str) -> Tensor:
        constraint = cast(Positive, getattr(self, f"raw_{name}_constraint"))
        return constraint.transform(cast(Tensor, getattr(self, f"raw_{name}")))

    def _set(self, name: str, value: float | Tensor) -> None:
        raw = cast(Tensor, getattr(self, f"raw_{name}"))
        wanted = torch.as_tensor(value, dtype=raw.dtype, device=raw.device)
        if wanted.shape not in ((), (1,), raw.shape):
            raise ShapeError(name, tuple(wanted.shape), f"a number or {tuple(raw.shape)}")
        if not bool((wanted > 0).all()):
            raise ArgumentError(name, value, "a positive number")
        constraint = getattr(self, f"raw_{name}_constraint")
        self.initialize(**{f"raw_{name}": constraint.inverse_transform(wanted.expand_as(raw))})

    @checked(late=True, x="float (*batch, n, d)")
    def forward(self, x: Tensor) -> Tensor:
        """Features of points.

        Args:
            x: ``(*batch, n, d)``.

        Returns:
            ``(*batch, n, R)``.

        Raises:
            ShapeError: The points have another number of columns.
        """
        R, d = self.weight.shape
        if x.shape[-1] != d:
            raise ShapeError("x", tuple(x.shape), f"(*batch, n, {d})")
        scale = (self.amplitude * math.sqrt(2 / R)).squeeze()
        return scaled_cosines(x / self.lengthscale, self.weight, self.bias, scale)
